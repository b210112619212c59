"""End-to-end tasks with known answers, from a seed range that training never uses."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from deepinfer_training.documents import Generators
from deepinfer_training.sequences import Split, document_rng

RECALL_DISTANCES = (8, 24, 48, 128, 256, 512, 960)
COPY_LENGTHS = (8, 16, 32, 64)
_FILLER_FILES = ("prose_austen", "speech_sotu", "docs_python", "verse_tempest")
_MAX_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One prompt with its answer.

    Attributes:
        ids: prompt and answer.
        start: index of the answer's first token.
        stop: index after its last token.
    """

    ids: list[int]
    start: int
    stop: int


class Tasks:
    """Makes the items of every task."""

    def __init__(self, generators: Generators, heldout: Path, split: Split, seed: int) -> None:
        """Tokenise the held-out texts that fill the recall prompts.

        Args:
            generators: formats and word lists.
            heldout: folder of the held-out texts.
            split: DEV while training, CONFORMANCE for what is reported.
            seed: of the items.
        """
        self._make, self._split, self._seed = generators, split, seed
        self._filler = [
            generators.text.encode((heldout / f"{name}.txt").read_text(encoding="utf-8"))
            for name in _FILLER_FILES
        ]

    def _rng(self, task: int, index: int) -> random.Random:
        return document_rng(self._split, self._seed, (task << 20) + index)

    def recall(self, distance: int, count: int) -> list[TaskItem]:
        """Four facts, one question; `distance` tokens stand between fact and question."""
        return [self._recall(distance, self._rng(distance, i)) for i in range(count)]

    def _recall(self, distance: int, rng: random.Random) -> TaskItem:
        make, encode = self._make, self._make.text.encode

        def span(length: int) -> list[int]:
            source = rng.choice(self._filler)
            start = rng.randrange(max(1, len(source) - length))
            return source[start : start + length]

        names: list[str] = []
        while len(names) < 4:
            name = make.name(rng)
            if all(name.split()[0] != other.split()[0] for other in names):
                names.append(name)
        values = ["".join(rng.choices("0123456789", k=4)) for _ in names]
        facts = [encode(make.fact(n, v)) for n, v in zip(names, values, strict=True)]
        question, answer = encode(make.question(names[0])), encode(f" {values[0]}.")
        others = facts[1:]
        inside = [fact for fact in others if distance >= 200 or rng.random() < 0.3]
        inside = inside[: distance // 20]
        left = distance - sum(map(len, inside))
        middle: list[int] = []
        cut = 0
        for fact, place in zip(inside, sorted(rng.randint(0, left) for _ in inside), strict=True):
            middle += span(place - cut) + fact
            cut = place
        middle += span(left - cut)
        before: list[int] = []
        for fact in others:
            if not any(fact is each for each in inside):
                before += fact + span(rng.randint(0, 12))
        fixed = 1 + len(facts[0]) + distance + len(question) + len(answer)
        room = max(0, _MAX_TOKENS - fixed)
        before = (span(rng.randint(0, min(200, max(0, room - len(before))))) + before)[:room]
        ids = [make.text.bos, *before, *facts[0], *middle, *question]
        # The final stop is not part of the answer: the digits are.
        return TaskItem(ids + answer, len(ids), len(ids) + len(answer) - 1)

    def copy(self, length: int, count: int) -> list[TaskItem]:
        """`length` words to repeat."""
        items = []
        for i in range(count):
            text = " ".join(self._rng(2000 + length, i).choices(self._make.words, k=length))
            items.append(self._chat(f"Repeat exactly: {text}", text))
        return items

    def addition(self, digits: int, count: int) -> list[TaskItem]:
        """Sums of two numbers of up to `digits` digits."""
        items = []
        for i in range(count):
            rng = self._rng(3000 + digits, i)
            a, b = rng.randrange(10**digits), rng.randrange(10**digits)
            items.append(self._chat(f"What is {a} + {b}?", f"{a} + {b} = {a + b}."))
        return items

    def json(self, count: int) -> list[TaskItem]:
        """JSON objects whose values stand in the question."""
        items = []
        for i in range(count):
            document = self._make.json(self._rng(4000, i))
            start = document.weights.index(1.0)
            items.append(TaskItem(document.ids, start, len(document.ids)))
        return items

    def _chat(self, question: str, answer: str) -> TaskItem:
        text = self._make.text
        prompt = [text.bos, *text.chat_prompt(question)]
        ids = [*prompt, *text.encode(answer), text.eos]
        return TaskItem(ids, len(prompt), len(ids))


def load_heldout(folder: Path) -> dict[str, bytes]:
    """Held-out texts by file name without ending."""
    return {file.stem: file.read_bytes() for file in sorted(folder.glob("*.txt"))}


def dump(content: object, file: Path) -> None:
    """Write readable JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, ensure_ascii=False, indent=1)
    file.write_text(text + "\n", encoding="utf-8")
