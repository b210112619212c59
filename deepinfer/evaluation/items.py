"""Items of a task: a prompt as token ids, the right answer, and how much may be generated."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.device.errors import ConfigError
from deepinfer.evaluation.heldout import read_heldout
from deepinfer.text.tokenizer import TextTokenizer

# Text that is sure to hold so many tokens of prose; the task files keep as much to each offset.
CHARACTERS_PER_TOKEN = 8
# The right text may be spelled in more tokens than the tokenizer would take.
SPARE_TOKENS = 8
TASKS_FOLDER = Path(__file__).parent / "data" / "tasks"

# The chat format of the family: user turns, and answers of a model that does not think aloud.
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"  # noqa: RUF001
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜></think>"  # noqa: RUF001


@dataclass(frozen=True, slots=True)
class Item:
    """One question.

    Attributes:
        group: what its score is reported under, within the task.
        prompt: token ids.
        answer: the only right answer, text.
        max_tokens: tokens that the right answer needs, its end included, and some to spare.
        stop: text that ends the answer, besides the end token.
    """

    group: str
    prompt: list[int]
    answer: str
    max_tokens: int
    stop: str | None = None


def task_names() -> tuple[str, ...]:
    """Names of the tasks with a file, in alphabetical order."""
    return tuple(sorted(path.stem for path in TASKS_FOLDER.glob("*.jsonl")))


def read_items(task: str, tokenizer: TextTokenizer, *, limit: int | None = None) -> Iterator[Item]:
    """Items of a task in the order of its file.

    Args:
        task: one of `task_names`.
        tokenizer: of the checkpoint that is asked.
        limit: most items of a group; None: all.
    Raises:
        ConfigError: the task is unknown, a row is not one of a task, or the tokenizer lacks the
            special tokens of the chat format.
    """
    path = TASKS_FOLDER / f"{task}.jsonl"
    if not path.is_file():
        raise ConfigError(f"task {task!r} is unknown; expected one of {', '.join(task_names())}")
    for spelling in (BOS, EOS, "<｜User｜>", "<｜Assistant｜>", "</think>"):  # noqa: RUF001
        if len(tokenizer.encode(spelling, add_bos=False)) != 1:
            raise ConfigError(
                f"the checkpoint's tokenizer has no special token {spelling}; the tasks need the "
                "chat format of the family"
            )
    counts: Counter[str] = Counter()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        row = json.loads(line)
        counts[row["group"]] += 1
        if limit is not None and counts[row["group"]] > limit:
            continue
        if "facts" in row:
            yield _recall_item(row, tokenizer)
        elif "turns" in row:
            yield _chat_item(row, tokenizer)
        else:
            raise ConfigError(
                f"{path.name}, line {number} has the keys {sorted(row)}; expected `facts` or "
                "`turns`; make the file anew with tools/make_eval_tasks.py"
            )


def _chat_item(row: dict[str, Any], tokenizer: TextTokenizer) -> Item:
    """User and assistant turns by turns, the last one the user's."""
    text = BOS
    for index, turn in enumerate(row["turns"]):
        text += f"{USER}{turn}{ASSISTANT}" if index % 2 == 0 else f"{turn}{EOS}"
    answer = row["answer"]
    length = len(tokenizer.encode(answer, add_bos=False)) + 1 + SPARE_TOKENS
    return Item(row["group"], tokenizer.encode(text, add_bos=False), answer, length)


def _recall_item(row: dict[str, Any], tokenizer: TextTokenizer) -> Item:
    """Facts inside held-out prose; between the asked fact and the question lie exactly `group`
    tokens of the checkpoint's own tokenizer, other facts included.
    """

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_bos=False)

    asked, *others = [encode(f"\nThe code of {name} is {code}.\n") for name, code in row["facts"]]
    distance, lead = int(row["group"]), row["lead"]
    inside, before = others[: len(row["inside"])], others[len(row["inside"]) :]
    room = distance - sum(len(fact) for fact in inside)
    filler = encode(
        read_heldout(row["filler"])[row["offset"] :][: CHARACTERS_PER_TOKEN * (distance + lead)]
    )
    if room < 0 or len(filler) < lead + room:
        raise ConfigError(
            f"a recall item of distance {distance} does not fit: {len(filler)} tokens of filler "
            f"for {lead + room}; the checkpoint's tokenizer is not of the family"
        )
    gap, filled = [], lead
    for fact, share in zip(inside, row["inside"], strict=True):
        cut = lead + round(share * room)
        gap += filler[filled:cut] + fact
        filled = cut
    gap += filler[filled : lead + room]
    question = encode(f"\nQuestion: What is the code of {row['facts'][0][0]}?\nAnswer:")
    prompt = encode(BOS) + filler[:lead]
    for fact in before:
        prompt += fact
    prompt += asked + gap + question
    answer = f" {row['answer']}"
    return Item(row["group"], prompt, answer, len(encode(answer + ".")) + SPARE_TOKENS, stop=".")
