"""Indexer family: scoring compressed entries and choosing which a query attends to.

Selections are ascending entry indices padded with -1, so that a row's attention sums in one
order whatever its batch. Ties go to the lowest index in the reference; the comparison allows
any choice among equal scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.device.comparison import Close, Exact, SelectionSet, Ulp
from deepinfer.device.handles import RowCache
from deepinfer.device.op import OpTable, op


@op(family="indexer", compare=Ulp())
def index_query(q: Tensor, positions: Tensor, rope_table: Tensor, cache: RowCache) -> Tensor:
    """Rotate index queries and round them as the index cache's record rounds keys.

    Args:
        q: [T, H, N] activation dtype.
        positions: [T] int64.
        rope_table: [max_positions, R] fp32, cos then sin.
        cache: index-key cache; its record says whether queries are quantised.

    Returns:
        [T, H, N] in q's dtype; in normative numerics E2M1 groups of 32, round trip.
    """
    raise NotImplementedError


@op(
    family="indexer",
    compare=Close(rtol=2.0**-7, atol=2.0**-7, origin="scores are rounded to bf16"),
)
def index_scores(
    q: Tensor,
    head_weights: Tensor,
    cache: RowCache,
    block_table: Tensor,
    row_seq: Tensor,
    visible: Tensor,
    *,
    entries_per_block: int,
    max_visible: int,
    max_query_len: int,
) -> Tensor:
    """Scores of every visible entry: sum over heads of relu(<q_h, k_j>) * weight_h.

    Args:
        q: [T, H, N] activation dtype, from `index_query`.
        head_weights: [T, H] activation dtype, scaled, may be negative.
        cache: index keys of width N.
        block_table: [R, max_blocks] int64.
        row_seq: [T] int64, rows of one request stand together.
        visible: [T] int64 entries a row may see; 0 for padding rows.
        entries_per_block: entries of one block.
        max_visible: host upper bound of `visible`.
        max_query_len: host upper bound of rows per request.

    Returns:
        [T, max_visible] fp32, -inf from `visible` on. In normative numerics the dot, the
        weighted product and the sum over heads (fp32) are each rounded to bf16.
    """
    raise NotImplementedError


@op(family="indexer", compare=SelectionSet())
def select_topk(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """The k best entries of each row.

    Args:
        scores: [T, n] fp32; -inf is never chosen.
        visible: [T] int64.
        k: entries to choose.

    Returns:
        [T, k] int64, ascending, padded with -1 at the end.
    """
    raise NotImplementedError


@op(family="indexer", compare=SelectionSet())
def select_candidates(scores: Tensor, visible: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """The best blocks of entries; the newest, possibly partial block is always kept.

    Args:
        scores: [T, n] fp32, -inf where not visible.
        visible: [T] int64.
        num_blocks: blocks to choose.
        block_size: entries of a block.

    Returns:
        [T, num_blocks] int64, ascending, padded with -1 at the end; a block scores the maximum
        of its entries, and blocks without a visible entry are dropped.
    """
    raise NotImplementedError


@op(family="indexer", compare=Exact())
def mask_candidates(scores: Tensor, candidates: Tensor, block_size: int) -> Tensor:
    """Scores with -inf outside the candidate blocks.

    Args:
        scores: [T, n] fp32.
        candidates: [T, B] int64 block indices, -1 absent.
        block_size: entries of a block.

    Returns:
        [T, n] fp32.
    """
    raise NotImplementedError


@op(family="indexer", compare=Exact())
def select_visible(visible: Tensor, k: int) -> Tensor:
    """All visible entries, for steps in which no row sees more than k.

    Args:
        visible: [T] int64, at most k.
        k: width of the selection.

    Returns:
        [T, k] int64: 0 .. visible - 1, then -1.
    """
    raise NotImplementedError


class IndexPlan(NamedTuple):
    """What an index source needs to know of the step and of its place in the model.

    Attributes:
        block_table: [R, max_blocks] int64.
        row_seq: [T] int64.
        visible: [T] int64 entries each row may see.
        entries_per_block: entries of one cache block.
        max_visible: host upper bound of `visible`.
        max_query_len: host upper bound of rows per request.
        topk: width of the selection.
        num_candidate_blocks: blocks to publish or restrict to; 0 without candidates.
        candidate_block_size: entries of a candidate block.
        publishes_candidates: this layer is the candidate source.
    """

    block_table: Tensor
    row_seq: Tensor
    visible: Tensor
    entries_per_block: int
    max_visible: int
    max_query_len: int
    topk: int
    num_candidate_blocks: int
    candidate_block_size: int
    publishes_candidates: bool


class Selection(NamedTuple):
    """Entries chosen and, from the candidate source on, the candidate blocks.

    Attributes:
        entries: [T, topk] int64, ascending, -1 padded.
        candidates: [T, num_candidate_blocks] int64, or None.
    """

    entries: Tensor
    candidates: Tensor | None


def _compose_index_select(ops: OpTable) -> Callable[..., Selection]:
    query_of, score = ops[index_query], ops[index_scores]
    topk, blocks, mask = ops[select_topk], ops[select_candidates], ops[mask_candidates]
    everything = ops[select_visible]

    def index_select(
        q: Tensor,
        head_weights: Tensor,
        positions: Tensor,
        rope_table: Tensor,
        cache: RowCache,
        candidates: Tensor | None,
        *,
        plan: IndexPlan,
    ) -> Selection:
        if plan.max_visible <= plan.topk:
            # Nothing is left out, so nothing needs a score; all blocks fit into the candidates,
            # which the configuration guarantees for topk entries.
            if plan.publishes_candidates:
                size = plan.candidate_block_size
                num_blocks = torch.div(plan.visible + (size - 1), size, rounding_mode="floor")
                candidates = everything(num_blocks, plan.num_candidate_blocks)
            return Selection(everything(plan.visible, plan.topk), candidates)
        scores = score(
            query_of(q, positions, rope_table, cache),
            head_weights,
            cache,
            plan.block_table,
            plan.row_seq,
            plan.visible,
            entries_per_block=plan.entries_per_block,
            max_visible=plan.max_visible,
            max_query_len=plan.max_query_len,
        )
        if plan.publishes_candidates:
            candidates = blocks(
                scores, plan.visible, plan.num_candidate_blocks, plan.candidate_block_size
            )
        elif candidates is not None:
            scores = mask(scores, candidates, plan.candidate_block_size)
        return Selection(topk(scores, plan.visible, plan.topk), candidates)

    return index_select


@op(
    family="indexer",
    compare={"entries": SelectionSet(), "candidates": SelectionSet()},
    compose=_compose_index_select,
)
def index_select(
    q: Tensor,
    head_weights: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    cache: RowCache,
    candidates: Tensor | None,
    *,
    plan: IndexPlan,
) -> Selection:
    """Choose the entries each row attends to: rotate, score, restrict, take the best.

    Args:
        q: [T, H, N] activation dtype, raw projection.
        head_weights: [T, H] activation dtype, scaled.
        positions: [T] int64.
        rope_table: [max_positions, R] fp32.
        cache: index keys of the KV source.
        candidates: blocks published by the candidate source before, or None.
        plan: the step's bounds and the layer's role.

    Returns:
        The selection; when no row sees more than topk entries all visible ones.

    Source: CSA2 indexer, two-level top-k.
    """
    raise NotImplementedError
