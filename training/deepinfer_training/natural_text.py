"""The natural part of the training data: one array of token ids, cut by source."""

from __future__ import annotations

import json
import lzma
import random
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepinfer.device.errors import ConfigError

TOKENS_FILE = "tokens.u16.xz"
INDEX_FILE = "tokens.json"
# What each natural domain is drawn from, by the name of a source in the index.
DOMAIN_SOURCES = {
    "prose": ("austen", "mobydick", "shakespeare", "web"),
    "speeches": ("sotu",),
    "reference": ("wordnet", "jargon", "devil"),
    "docs": ("pydoc", "pgdoc", "sqlite"),
    "code": ("stdlib",),
    "chinese": ("zh_classics", "zh_tang"),
}
_FILLER_DOMAINS = ("prose", "speeches", "reference", "docs")


class NaturalText:
    """Spans of natural tokens by domain; spans of a source are equally likely at every position."""

    def __init__(self, folder: Path) -> None:
        """Unpack the token file; about 53 MB.

        Args:
            folder: holds tokens.u16.xz and tokens.json ([name, start, tokens, bytes] a source).
        Raises:
            ConfigError: a file is missing or a source is not in the index.
        """
        for name in (TOKENS_FILE, INDEX_FILE):
            if not (folder / name).is_file():
                raise ConfigError(f"{folder / name} is missing; make it with prepare_tokens")
        tokens = np.frombuffer(lzma.decompress((folder / TOKENS_FILE).read_bytes()), np.uint16)
        index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        parts = {name: tokens[start : start + count] for name, start, count, _ in index}
        absent = {s for names in DOMAIN_SOURCES.values() for s in names} - parts.keys()
        if absent:
            raise ConfigError(f"{folder / INDEX_FILE} lacks the sources {sorted(absent)}")
        self._parts: dict[str, list[NDArray[np.uint16]]] = {
            domain: [parts[name] for name in names] for domain, names in DOMAIN_SOURCES.items()
        }
        self._parts["filler"] = [p for d in _FILLER_DOMAINS for p in self._parts[d]]
        self._lengths = {
            domain: [len(part) for part in parts] for domain, parts in self._parts.items()
        }

    def span(self, rng: random.Random, domain: str, length: int) -> list[int]:
        """`length` consecutive tokens of a domain, or of "filler" for English prose and docs."""
        part = rng.choices(self._parts[domain], weights=self._lengths[domain])[0]
        start = rng.randrange(max(1, len(part) - length))
        return [int(token) for token in part[start : start + length]]
