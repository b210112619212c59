"""Make the task files of `deepinfer eval`: questions whose right answers are known.

    python tools/make_eval_tasks.py --definitions FILE

Every row is a pure function of its task, group and number; the seeds lie in the range that is kept
for evaluation (70,000,000 to 79,999,999), which training never uses. FILE is a JSON object of the
training's definitions, word -> [part of speech, gloss], the most frequent word first.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deepinfer.evaluation.heldout import read_heldout
from deepinfer.evaluation.items import CHARACTERS_PER_TOKEN, TASKS_FOLDER

Row = dict[str, Any]

FIRST_SEED = 70_000_000
PROSE = ("prose_austen", "speech_sotu", "docs_python", "verse_tempest")
DISTANCES = (8, 24, 48, 128, 256, 512, 960)
COPY_LENGTHS = (8, 16, 32, 64)
NUM_DEFINITIONS_CONSIDERED = 400
NUM_WORDS_COPIED = 700


def _words(text: str) -> list[str]:
    return text.split()


FIRST_NAMES = _words(
    "Ada Ben Clara David Ella Felix Grace Henry Iris Jack Julia Karl Laura Leo Martha Max Mira "
    "Nora Oscar Paula Quinn Rosa Sam Sofia Tara Thomas Vera Walter Yara Zoe"
)
LAST_NAMES = _words(
    "Baker Bishop Brook Carter Clark Dale Field Fisher Ford Frost Hall Hill Hunter King Lake Lane "
    "Marsh Mason Moss North Park Reed Smith Snow Stone Turner Ward Wells West Wood"
)
CITIES = _words(
    "Athens Berlin Boston Cairo Dublin Lima Lisbon London Madrid Oslo Paris Prague Rome"
)
JOBS = _words("baker farmer fisherman gardener hunter miller painter sailor shepherd teacher")
ANIMALS = _words("bear cat crow deer dog fox frog goat goose horse mouse owl rabbit turtle wolf")
COLORS = _words("black blue brown green grey red white yellow")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")


def plain_words(definitions: dict[str, list[str]]) -> list[str]:
    """The most frequent defined words of 3 to 9 letters: words that training copies too."""
    words = [word for word in definitions if re.fullmatch("[a-z]{3,9}", word)]
    return words[:NUM_WORDS_COPIED]


def recall(r: random.Random, distance: int) -> Row:
    """Four facts in natural filler; the first is asked for `distance` tokens later."""
    first = r.sample(FIRST_NAMES, 4)
    names = [name if r.random() < 0.5 else f"{name} {r.choice(LAST_NAMES)}" for name in first]
    facts = [[name, f"{r.randrange(10_000):04d}"] for name in names]
    # Other facts lie inside the gap where it is long enough to hold them.
    room = min(3, distance // 60)
    num_inside = room if distance >= 200 or r.random() < 0.3 else 0
    lead = r.randint(0, 40)
    filler = r.choice(PROSE)
    text = read_heldout(filler)
    needed = (distance + lead) * CHARACTERS_PER_TOKEN
    start = text.index(" ", r.randrange(len(text) - needed)) + 1
    return {
        "group": str(distance),
        "facts": facts,
        "inside": sorted(round(r.random(), 3) for _ in range(num_inside)),
        "lead": lead,
        "filler": filler,
        "offset": start,
        "answer": facts[0][1],
    }


def _single(group: str, question: str, answer: str) -> Row:
    return {"group": group, "turns": [question], "answer": answer}


def copy(r: random.Random, num_words: int, words: list[str]) -> Row:
    """Words to repeat."""
    text = " ".join(r.choice(words) for _ in range(num_words))
    return _single(str(num_words), f"Repeat exactly: {text}", text)


def json_object(r: random.Random) -> Row:
    """Up to five fields to put into a JSON object."""
    fields: list[tuple[str, object]] = [
        ("name", r.choice(FIRST_NAMES)),
        ("age", r.randint(1, 99)),
        ("city", r.choice(CITIES)),
        ("color", r.choice(COLORS)),
        ("job", r.choice(JOBS)),
        ("animal", r.choice(ANIMALS)),
        ("count", r.randint(0, 999)),
        ("active", r.random() < 0.5),
    ]
    chosen = r.sample(fields, r.randint(1, 5))
    words = [f"{key} {str(v).lower() if isinstance(v, bool) else v}" for key, v in chosen]
    question = f"Make a JSON object with {', '.join(words)}."
    return _single("object", question, json.dumps(dict(chosen)))


def add(r: random.Random, num_digits: int) -> Row:
    """A sum of two numbers of at most `num_digits` digits."""
    a, b = r.randrange(10**num_digits), r.randrange(10**num_digits)
    return _single(f"{num_digits}digit", f"What is {a} + {b}?", f"{a} + {b} = {a + b}.")


def turns(r: random.Random) -> Row:
    """Something said in the first turn, asked for after others."""
    name, city, day = r.choice(FIRST_NAMES), r.choice(CITIES), r.randrange(7)
    asks_name = r.random() < 0.5
    between = [(f"What day comes after {DAYS[day]}?", f"{DAYS[(day + 1) % 7]}.")]
    for _ in range(r.randint(0, 2)):
        a, b = r.randrange(1000), r.randrange(1000)
        larger = f"{max(a, b)} is larger." if a != b else "They are equal."
        between.append((f"Which is larger, {a} or {b}?", larger))
    told = [f"My name is {name} and I live in {city}.", f"Nice to meet you, {name}!"]
    asked = "What is my name?" if asks_name else "Where do I live?"
    return {
        "group": "name" if asks_name else "city",
        "turns": [*told, *(part for pair in between for part in pair), asked],
        "answer": f"Your name is {name}." if asks_name else f"You live in {city}.",
    }


def definer(definitions: dict[str, list[str]]) -> Callable[[random.Random], Row]:
    """Asks for glosses of frequent nouns."""
    nouns = [
        (word, gloss)
        for word, (kind, gloss) in definitions.items()
        if kind == "noun" and 12 <= len(gloss) <= 60 and ";" not in gloss
    ][:NUM_DEFINITIONS_CONSIDERED]

    def define(r: random.Random) -> Row:
        word, gloss = r.choice(nouns)
        return _single("noun", f"What does {word} mean?", f"{word} (noun): {gloss}")

    return define


def rows(make: Callable[..., Row], count: int, *arguments: object, number: int) -> Iterator[Row]:
    """`count` different rows; `number` sets the task's own seeds apart."""
    seen: set[str] = set()
    index = 0
    while len(seen) < count:
        row = make(random.Random(FIRST_SEED + number * 10_000 + index), *arguments)
        index += 1
        key = json.dumps(row, sort_keys=True)
        if key not in seen:
            seen.add(key)
            yield row


def make_tasks(definitions: dict[str, list[str]]) -> dict[str, list[Row]]:
    """All rows by task."""
    words = plain_words(definitions)
    return {
        "recall": [
            row
            for number, distance in enumerate(DISTANCES)
            for row in rows(recall, 64, distance, number=number)
        ],
        "copy": [
            row
            for number, length in enumerate(COPY_LENGTHS, 20)
            for row in rows(copy, 64, length, words, number=number)
        ],
        "json": list(rows(json_object, 128, number=40)),
        "add": [
            row
            for number, digits in ((50, 2), (51, 3))
            for row in rows(add, 128, digits, number=number)
        ],
        "turns": list(rows(turns, 64, number=60)),
        "define": list(rows(definer(definitions), 64, number=70)),
    }


def main() -> int:
    """Write the files and say how large they are."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--definitions", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    definitions = json.loads(args.definitions.read_text(encoding="utf-8"))
    for task, made in make_tasks(definitions).items():
        path = TASKS_FOLDER / f"{task}.jsonl"
        lines = [json.dumps(row, ensure_ascii=False) for row in made]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        sys.stdout.write(f"{path.name}: {len(made)} rows, {path.stat().st_size} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
