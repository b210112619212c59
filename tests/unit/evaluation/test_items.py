"""Items: prompts in the chat format, recall at exact distances, files that the tool made."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deepinfer.device.errors import ConfigError
from deepinfer.evaluation import items
from deepinfer.evaluation.items import TASKS_FOLDER, read_items, task_names
from deepinfer.text.tokenizer import TextTokenizer

TOOL = Path(__file__).parents[3] / "tools" / "make_eval_tasks.py"
GOLDEN = Path(__file__).parents[2] / "data/golden/tiny_a/checkpoint"


def _rows(task: str) -> list[dict[str, Any]]:
    lines = (TASKS_FOLDER / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """tools/make_eval_tasks.py."""
    spec = importlib.util.spec_from_file_location("make_eval_tasks", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_are_those_that_the_tool_makes(tool: ModuleType) -> None:
    words = {word: ["noun", "a gloss that nobody asks for"] for word in ("one", "two", "three")}
    made = tool.make_tasks(words | {f"word{n}": ["noun", f"gloss number {n}"] for n in range(99)})
    assert set(made) == set(task_names())
    # The others hold words of the training's definitions, which are not in the repository.
    for task in ("recall", "json", "add", "turns"):
        assert made[task] == _rows(task), task


def test_files_are_small_and_hold_no_row_twice() -> None:
    paths = list(TASKS_FOLDER.glob("*.jsonl"))
    assert sum(path.stat().st_size for path in paths) <= 300_000
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(set(lines)) == len(lines)


def test_sums_and_objects_are_right() -> None:
    for row in _rows("add"):
        a, b, c = (int(part) for part in row["answer"].rstrip(".").replace("=", "+").split("+"))
        assert a + b == c
        assert row["turns"] == [f"What is {a} + {b}?"]
    for row in _rows("json"):
        for key, value in json.loads(row["answer"]).items():
            assert f"{key} {json.dumps(value).strip(chr(34))}" in row["turns"][0]
    for row in _rows("copy"):
        assert row["turns"] == [f"Repeat exactly: {row['answer']}"]
        assert len(row["answer"].split()) == int(row["group"])


def test_recall_asks_at_the_stated_distance(tokenizer: TextTokenizer) -> None:
    found: dict[int, int] = {}
    for row, item in zip(_rows("recall"), read_items("recall", tokenizer), strict=True):
        name, code = row["facts"][0]
        fact = tokenizer.encode(f"\nThe code of {name} is {code}.\n")
        question = tokenizer.encode(f"\nQuestion: What is the code of {name}?\nAnswer:")
        assert item.prompt[0] == tokenizer.bos_token_id
        assert item.prompt[-len(question) :] == question
        stated = len(item.prompt) - len(question) - int(item.group) - len(fact)
        assert item.prompt[stated : stated + len(fact)] == fact
        text = tokenizer.decode(item.prompt)
        assert all(f"The code of {n} is {c}." in text for n, c in row["facts"])
        assert item.answer == f" {code}"
        found[int(item.group)] = found.get(int(item.group), 0) + 1
    assert found == dict.fromkeys((8, 24, 48, 128, 256, 512, 960), 64)


def test_chat_prompt_spells_the_format(tokenizer: TextTokenizer) -> None:
    row, item = _rows("turns")[0], next(read_items("turns", tokenizer))
    text = tokenizer.decode(item.prompt, skip_special_tokens=False)
    first, reply = row["turns"][:2]
    bos, eos, user, assistant = items.BOS, items.EOS, items.USER, items.ASSISTANT
    assert text.startswith(f"{bos}{user}{first}{assistant}{reply}{eos}{user}")
    assert text.endswith(f"{row['turns'][-1]}{assistant}")
    assert item.max_tokens == len(tokenizer.encode(row["answer"])) + 1 + items.SPARE_TOKENS


def test_unknown_task_and_other_tokenizers_are_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(ConfigError, match="task 'sums' is unknown; expected one of add, copy"):
        next(read_items("sums", tokenizer))
    with pytest.raises(ConfigError, match="no special token"):
        next(read_items("add", TextTokenizer.from_directory(GOLDEN)))


def test_row_of_another_kind_is_refused(
    tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd.jsonl").write_text('{"group": "x", "prompt": "y"}\n')
    monkeypatch.setattr(items, "TASKS_FOLDER", tmp_path)
    read: Callable[[str, TextTokenizer], Any] = read_items
    with pytest.raises(ConfigError, match=r"odd.jsonl, line 1 has the keys"):
        next(read("odd", tokenizer))
