"""Tiers of decode steps: the few capacities that graphs are captured with.

A graph has the shapes it was captured with, and a step has any. Steps are therefore padded to
tiers: requests to a power of two, the host bound of the key length likewise, and the rows of a
verification, whose number varies by request, to half steps between powers of two. Padding
requests have no rows and padding rows write nowhere, so a tier computes what the exact step would.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.engine.batch_builder import BuiltStep

_MIN_KEY_LEN = 512
"""Smallest tier of the key length in tokens; below it all steps share a graph."""


@dataclass(frozen=True, slots=True)
class Tier:
    """Capacity of a graph, and what else its launches depend on.

    Attributes:
        num_seqs: requests.
        num_rows: rows of all requests, at least `num_seqs`.
        query_len: host bound of the rows of a request.
        key_len: host bound of context_len + query_len, in tokens.
        has_budget: whether the device deals out a budget of drafts.
    """

    num_seqs: int
    num_rows: int
    query_len: int
    key_len: int
    has_budget: bool = False


def seq_tier(num_seqs: int) -> int:
    """Smallest power of two that holds so many requests."""
    return 1 << (num_seqs - 1).bit_length()


def row_tier(num_rows: int) -> int:
    """Smallest of 1, 2, 3, 4, 6, 8, 12, 16, ... that holds so many rows."""
    power = 1 << (num_rows - 1).bit_length()
    between = power // 4 * 3
    return between if num_rows <= between else power


def tier_of(built: BuiltStep, *, max_key_len: int, max_drafts: int) -> Tier:
    """Smallest tier that holds a decode step.

    Args:
        built: the step.
        max_key_len: longest sequence; the last tier ends there.
        max_drafts: most drafts of a request. The bound of a request's rows is always that of so
            many: near the ends of answers it falls step by step, which would be a graph each.
    """
    batch = built.batch
    num_seqs = seq_tier(batch.query_lens.shape[0])
    # Without drafts a request is a row, and more tiers would only be more graphs.
    num_rows = max(num_seqs, row_tier(batch.input_ids.shape[0])) if max_drafts else num_seqs
    key_len = max(_MIN_KEY_LEN, 1 << (batch.max_key_len - 1).bit_length())
    key_len = min(key_len, max(max_key_len, batch.max_key_len))
    return Tier(num_seqs, num_rows, 1 + max_drafts, key_len, built.draft_budget.shape[0] > 0)
