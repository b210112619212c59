"""Packed sequences: every one is a function of split, seed and index."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepinfer_training.documents import Document, Generators
from deepinfer_training.natural_text import DOMAIN_SOURCES, NaturalText

# Share of the sequences, in percent.
SHARES = {
    "prose": 15.0, "speeches": 8.0, "reference": 9.0, "docs": 10.0, "code": 8.0, "chinese": 5.0,
    "tales": 9.0, "recall": 17.5, "copy": 7.0, "dialogue": 6.0, "arithmetic": 3.0, "json": 2.5,
}  # fmt: skip
DOMAINS = tuple(SHARES)
# Documents start at multiples of this: pairs of a ratio-2 compressor never straddle two.
_ALIGNMENT = 8
_SHORTEST_PIECE = 24


class Split(enum.Enum):
    """Disjoint seed ranges; a document of one split never occurs in another by construction."""

    TRAIN = 0
    DEV = 1
    CONFORMANCE = 2


def document_rng(split: Split, seed: int, index: int) -> random.Random:
    """Random generator of one sequence; seed from 1 to 2^20 - 1, index below 2^40.

    Numbers below 2^40 are left to the tasks of `deepinfer eval`.
    """
    if not (1 <= seed < 1 << 20 and 0 <= index < 1 << 40):
        raise ValueError(f"seed {seed} or index {index} leaves its split's range")
    return random.Random((split.value << 60) + (seed << 40) + index)


@dataclass(frozen=True, slots=True)
class Batch:
    """B packed sequences of T tokens.

    Attributes:
        ids: [B, T] uint16.
        documents: [B, T] uint8 number of the document a token belongs to.
        weights: [B, T] float16 weight of a token as a target.
        domains: [B] uint8 index into DOMAINS.
    """

    ids: NDArray[np.uint16]
    documents: NDArray[np.uint8]
    weights: NDArray[np.float16]
    domains: NDArray[np.uint8]

    @classmethod
    def join(cls, batches: list[Batch]) -> Batch:
        """Batches of one length, one after the other."""
        return cls(
            np.concatenate([b.ids for b in batches]),
            np.concatenate([b.documents for b in batches]),
            np.concatenate([b.weights for b in batches]),
            np.concatenate([b.domains for b in batches]),
        )

    def part(self, start: int, stop: int | None) -> Batch:
        """Some of the sequences."""
        rows = slice(start, stop)
        return Batch(self.ids[rows], self.documents[rows], self.weights[rows], self.domains[rows])

    def __len__(self) -> int:
        return len(self.ids)


class SequenceSource:
    """Makes sequences of any length from the data folder."""

    def __init__(self, folder: Path, pad_token: int) -> None:
        """Load tokenizer, word lists and natural text from `folder`."""
        self.natural = NaturalText(folder)
        self.generators = Generators(folder, self.natural)
        self._pad = pad_token

    def sequence(
        self, split: Split, seed: int, index: int, length: int, domain: str | None = None
    ) -> Batch:
        """One sequence; documents of one domain fill it.

        Args:
            split: seed range.
            seed: of the run.
            index: number of the sequence.
            length: tokens, a multiple of 8.
            domain: one of DOMAINS; drawn by SHARES if absent.
        """
        rng = document_rng(split, seed, index)
        domain = domain or rng.choices(DOMAINS, weights=list(SHARES.values()))[0]
        ids = np.full(length, self._pad, np.uint16)
        weights = np.zeros(length, np.float16)
        documents = np.zeros(length, np.uint8)
        if domain in DOMAIN_SOURCES:
            span = self.natural.span(rng, domain, length - 1)
            ids[0] = self.generators.text.bos
            ids[1 : 1 + len(span)] = span
            weights[1 : 1 + len(span)] = 1.0
        elif domain == "recall":
            document = self.generators.recall(rng, length)
            ids[: len(document.ids)] = document.ids
            weights[: len(document.ids)] = document.weights
        else:
            self._pack(rng, domain, (ids, weights, documents))
        return Batch(
            ids[None], documents[None], weights[None], np.array([DOMAINS.index(domain)], np.uint8)
        )

    def _pack(
        self,
        rng: random.Random,
        domain: str,
        arrays: tuple[NDArray[np.uint16], NDArray[np.float16], NDArray[np.uint8]],
    ) -> None:
        ids, weights, documents = arrays
        length, start, number = len(ids), 0, 0
        while start < length - _ALIGNMENT:
            document: Document = getattr(self.generators, domain)(rng)
            count = min(len(document.ids), length - start)
            if start and count < min(len(document.ids), _SHORTEST_PIECE):
                break
            ids[start : start + count] = document.ids[:count]
            weights[start : start + count] = document.weights[:count]
            end = min(length, -(-(start + count) // _ALIGNMENT) * _ALIGNMENT)
            documents[start:end] = number
            start, number = end, number + 1
        documents[start:] = number

    def batch(
        self, split: Split, seed: int, first: int, count: int, length: int,
        domain: str | None = None,
    ) -> Batch:  # fmt: skip
        """Sequences first .. first + count - 1."""
        return Batch.join(
            [self.sequence(split, seed, first + i, length, domain) for i in range(count)]
        )
