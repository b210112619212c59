"""Synthetic documents with known answers, and the tokens and loss weights they are made of."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from deepinfer_training import vocabulary as words
from deepinfer_training.natural_text import NaturalText
from deepinfer_training.tales import tale

ANSWER_WEIGHT = 1.0
FILLER_WEIGHT = 0.3
_CACHED_LENGTH = 48
_CACHE_SIZE = 200_000


@dataclass(slots=True)
class Document:
    """Tokens and the weight of each as a target.

    Attributes:
        ids: token ids.
        weights: same length; 1 for what the model has to get right, 0 for what is given.
    """

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, ids: Sequence[int], weight: float) -> None:
        """Append tokens of one weight."""
        self.ids.extend(ids)
        self.weights.extend([weight] * len(ids))


class Text:
    """The tokenizer, with a cache for short strings, and the ids of its special tokens."""

    def __init__(self, tokenizer_file: Path) -> None:
        # Workers are processes already; threads inside them only get in each other's way.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._cache: dict[str, list[int]] = {}
        self.bos, self.eos = self._id("<｜begin▁of▁sentence｜>"), self._id("<｜end▁of▁sentence｜>")  # noqa: RUF001
        self.user, self.assistant = self._id("<｜User｜>"), self._id("<｜Assistant｜>")  # noqa: RUF001
        self.end_think = self._id("</think>")

    def _id(self, token: str) -> int:
        found: int | None = self._tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"the tokenizer has no token {token!r}")
        return found

    def encode(self, text: str) -> list[int]:
        """Token ids of trusted text."""
        if len(text) > _CACHED_LENGTH:
            return list(self._tokenizer.encode(text).ids)
        if text not in self._cache:
            if len(self._cache) >= _CACHE_SIZE:
                self._cache.clear()
            self._cache[text] = list(self._tokenizer.encode(text).ids)
        return self._cache[text]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def chat_prompt(self, question: str) -> list[int]:
        """A user turn and the start of a direct answer."""
        return [self.user, *self.encode(question), self.assistant, self.end_think]


class Generators:
    """All synthetic documents; each is a function of the random generator it is given."""

    def __init__(self, folder: Path, natural: NaturalText) -> None:
        """Load what the documents draw from.

        Args:
            folder: holds tokenizer.json, words.json (list of words) and definitions.json
                (word -> [part of speech, gloss]).
            natural: filler of the recall documents.
        """
        self.text = Text(folder / "tokenizer.json")
        self.words: list[str] = json.loads((folder / "words.json").read_text(encoding="utf-8"))
        self.definitions: dict[str, list[str]] = json.loads(
            (folder / "definitions.json").read_text(encoding="utf-8")
        )
        self._defined = sorted(self.definitions)
        self._natural = natural

    # ---- names, facts and questions of the recall documents

    def name(self, rng: random.Random) -> str:
        """A first name, half the time with a surname; one in ten is made up."""
        if rng.random() < 0.1:
            syllables = rng.choices(words.SYLLABLES.split(), k=rng.randint(2, 3))
            return "".join(syllables).capitalize()
        first = rng.choice(words.WOMEN + words.MEN)
        return first if rng.random() < 0.5 else f"{first} {rng.choice(words.SURNAMES)}"

    @staticmethod
    def fact(name: str, value: str) -> str:
        """The line that states a code."""
        return f"\nThe code of {name} is {value}.\n"

    @staticmethod
    def question(name: str) -> str:
        """The line that asks for it; the answer is ` VALUE.`."""
        return f"\nQuestion: What is the code of {name}?\nAnswer:"

    def recall(self, rng: random.Random, length: int) -> Document:
        """Facts scattered in natural text and questions about them, at most `length` tokens."""
        return _RecallWriter(self, self._natural, rng, length).write()

    # ---- chat

    def chat(self, turns: Sequence[tuple[str, str]]) -> Document:
        """A conversation of (question, answer) turns; answers weigh fully."""
        document = Document([self.text.bos], [0.0])
        for question, answer in turns:
            document.add(self.text.chat_prompt(question), FILLER_WEIGHT)
            document.add([*self.text.encode(answer), self.text.eos], ANSWER_WEIGHT)
        return document

    def tales(self, rng: random.Random) -> Document:
        """A tale."""
        document = Document([self.text.bos], [0.0])
        document.add([*self.text.encode(tale(rng)), self.text.eos], 1.0)
        return document

    def copy(self, rng: random.Random) -> Document:
        """Repeat words or numbers: as they are, in reverse, or every second."""
        count = int(2 ** rng.uniform(1.5, 6.1))
        kind = rng.random()
        if kind < 0.6:
            items = rng.choices(self.words, k=count)
        elif kind < 0.8:
            items = [str(rng.randrange(10 ** rng.randint(1, 4))) for _ in range(max(2, count // 2))]
        else:
            other = words.COLORS + words.WOMEN + words.MEN + words.CITIES
            items = [rng.choice(self.words if rng.random() < 0.5 else other) for _ in range(count)]
        order = rng.random()
        if order < 0.8:
            return self.chat([("Repeat exactly: " + " ".join(items), " ".join(items))])
        items = items[:16]
        if order < 0.92:
            return self.chat(
                [("Repeat in reverse order: " + " ".join(items), " ".join(items[::-1]))]
            )
        return self.chat([("Repeat every second word: " + " ".join(items), " ".join(items[::2]))])

    def arithmetic(self, rng: random.Random) -> Document:
        """Sums and differences, mostly of two digits."""
        turns = []
        for _ in range(rng.randint(2, 6)):
            limit = 1000 if rng.random() < 0.1 else 100
            a, b = rng.randrange(limit), rng.randrange(limit)
            if rng.random() < 0.65:
                turns.append((f"What is {a} + {b}?", f"{a} + {b} = {a + b}."))
            else:
                a, b = max(a, b), min(a, b)
                turns.append((f"What is {a} - {b}?", f"{a} - {b} = {a - b}."))
        return self.chat(turns)

    def json(self, rng: random.Random) -> Document:
        """A JSON object whose values stand in the question."""
        fields: list[tuple[str, object]] = [
            ("name", rng.choice(words.WOMEN + words.MEN)),
            ("age", rng.randint(1, 99)),
            ("city", rng.choice(words.CITIES)),
            ("color", rng.choice(words.COLORS)),
            ("job", rng.choice(words.JOBS)),
            ("animal", rng.choice(words.ANIMALS)),
            ("count", rng.randint(0, 999)),
            ("active", rng.random() < 0.5),
        ]
        rng.shuffle(fields)
        content = dict(fields[: rng.randint(1, 5)])
        spoken = [f"{key} {str(v).lower() if v in (True, False) and isinstance(v, bool) else v}"
                  for key, v in content.items()]  # fmt: skip
        if rng.random() < 0.2:
            key = rng.choice(("tags", "items"))
            listed = rng.choices(self.words, k=rng.randint(1, 4))
            content[key] = listed
            spoken.append(f"{key} {' '.join(listed)}")
        return self.chat([(f"Make a JSON object with {', '.join(spoken)}.", json.dumps(content))])

    def dialogue(self, rng: random.Random) -> Document:
        """One to five turns of small questions; later ones may refer to earlier ones."""
        turns: list[tuple[str, str]] = []
        known: tuple[str, str] | None = None
        for _ in range(rng.randint(1, 4)):
            kind = rng.randrange(8)
            if kind <= 1:
                turns.append(self._definition(rng))
            elif kind == 2:
                word = rng.choice(self.words)
                turns.append((f"Spell {word}.", "-".join(word)))
            elif kind == 3:
                a, b = rng.randrange(1000), rng.randrange(1000)
                answer = "They are equal." if a == b else f"{max(a, b)} is larger."
                turns.append((f"Which is larger, {a} or {b}?", answer))
            elif kind == 4:
                names, what = rng.choice(((words.DAYS, "day"), (words.MONTHS, "month")))
                index = rng.randrange(len(names))
                following = names[(index + 1) % len(names)]
                turns.append((f"What {what} comes after {names[index]}?", f"{following}."))
            elif kind == 5:
                items = rng.choices(self.words, k=rng.randint(2, 5))
                index = rng.randrange(len(items))
                listed = f"Here is a list: {', '.join(items)}."
                turns.append((f"{listed} What is word number {index + 1}?", f"{items[index]}."))
            elif kind == 6:
                turns.append(("Tell me a story.", tale(rng)))
            else:
                known = (rng.choice(words.WOMEN + words.MEN), rng.choice(words.CITIES))
                told = f"My name is {known[0]} and I live in {known[1]}."
                turns.append((told, f"Nice to meet you, {known[0]}!"))
            if known and rng.random() < 0.4:
                turns.append(
                    rng.choice((
                        ("What is my name?", f"Your name is {known[0]}."),
                        ("Where do I live?", f"You live in {known[1]}."),
                    ))
                )  # fmt: skip
        return self.chat(turns)

    def _definition(self, rng: random.Random) -> tuple[str, str]:
        word = rng.choice(self._defined)
        part, gloss = self.definitions[word]
        asked = rng.choice(("What does {} mean?", "Define {}.", "What is the meaning of {}?"))
        return asked.format(word), f"{word} ({part}): {gloss}"


class _RecallWriter:
    """Writes one recall document."""

    def __init__(
        self, generators: Generators, natural: NaturalText, rng: random.Random, length: int
    ) -> None:
        self._make, self._natural, self._rng, self._length = generators, natural, rng, length
        self._document = Document([generators.text.bos], [0.0])
        self._used: set[str] = set()
        # Pieces are usually encoded one by one; users' text is encoded as a whole, which may
        # merge a piece's end with the next one's start, so some documents are written that way.
        self._as_text = rng.random() < 0.3
        self._pending = ""

    def write(self) -> Document:
        if self._rng.random() < 0.5:
            self._facts_early()
        else:
            self._mixed_distances()
        self._flush()
        del self._document.ids[self._length :], self._document.weights[self._length :]
        return self._document

    def _room(self) -> int:
        return self._length - len(self._document.ids) - len(self._pending) // 3

    def _add(self, text: str) -> None:
        if self._as_text:
            self._pending += text
        else:
            self._document.add(self._make.text.encode(text), FILLER_WEIGHT)

    def _flush(self) -> None:
        if self._pending:
            self._document.add(self._make.text.encode(self._pending), FILLER_WEIGHT)
            self._pending = ""

    def _filler(self, count: int) -> None:
        if count <= 0:
            return
        span = self._natural.span(self._rng, "filler", count)
        if self._as_text:
            self._pending += self._make.text.decode(span)
        else:
            self._document.add(span, FILLER_WEIGHT)

    def _fact(self) -> tuple[str, str]:
        name = self._fresh_name()
        value = "".join(self._rng.choices("0123456789", k=4))
        if self._rng.random() < 0.2:
            value = self._rng.choice(self._make.words)
        self._add(self._make.fact(name, value))
        return name, value

    def _fresh_name(self) -> str:
        name = self._make.name(self._rng)
        while name in self._used:
            name = self._make.name(self._rng)
        self._used.add(name)
        return name

    def _ask(self, name: str, value: str) -> None:
        self._add(self._make.question(name))
        self._flush()
        weight = FILLER_WEIGHT if value == "unknown" else ANSWER_WEIGHT
        self._document.add(self._make.text.encode(f" {value}."), weight)
        self._document.add(self._make.text.encode("\n"), weight)

    def _facts_early(self) -> None:
        """All facts first, then text, then the questions: long distances."""
        rng = self._rng
        num_facts = rng.randint(1, 8 if self._length >= 256 else 4)
        asked = rng.randint(1, num_facts)
        room = self._length - 2 - 14 * num_facts - 26 * asked
        if room < 0:
            num_facts = asked = 1
            room = max(0, self._length - 50)
        before = int(room * rng.random() * 0.3)
        between = int((room - before) * rng.random() ** 0.5)
        self._filler(rng.randint(0, before))
        facts = []
        for _ in range(num_facts):
            facts.append(self._fact())
            self._filler(rng.randint(0, max(0, 2 * before // (3 * num_facts))))
        self._filler(between)
        rng.shuffle(facts)
        for name, value in facts[:asked]:
            self._ask(name, value)
            if rng.random() < 0.5:
                self._filler(rng.randint(0, 12))
        if rng.random() < 0.1:
            self._ask(self._fresh_name(), "unknown")
        self._filler(self._room())

    def _mixed_distances(self) -> None:
        """Facts and questions in turn: many questions at all distances."""
        rng = self._rng
        longest = (
            rng.choice((2, 8, 16)) if rng.random() < 0.4 else rng.choice((8, 24, 60, 120, 250))
        )
        most_open = rng.randint(1, 8)
        facts: list[tuple[str, str]] = []
        while self._room() > 42:
            if not facts or (len(facts) < most_open and rng.random() < 0.5):
                facts.append(self._fact())
            elif rng.random() < 0.05:
                self._ask(self._fresh_name(), "unknown")
            else:
                index = rng.randrange(len(facts)) if rng.random() < 0.6 else 0
                self._ask(*facts[index])
                if rng.random() < 0.75:
                    facts.pop(index)
            self._filler(int(longest * rng.random() ** 1.5))
        for name, value in facts[:2]:
            self._ask(name, value)
