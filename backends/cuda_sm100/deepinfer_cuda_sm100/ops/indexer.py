"""Indexer family on Triton kernels; `index_select` is composed of them."""

from __future__ import annotations

from torch import Tensor

from deepinfer.device.handles import RowCache
from deepinfer.device.op import OpTable
from deepinfer.device.ops import indexer
from deepinfer_cuda_sm100.caches import record_rows
from deepinfer_kernels.attention.rope_triton import rope
from deepinfer_kernels.indexer import scores_triton, select_triton


def index_query(q: Tensor, positions: Tensor, rope_table: Tensor, cache: RowCache) -> Tensor:
    rounds = record_rows(cache).format == "mxfp4"
    return rope(q, positions, rope_table, inverse=False, rounds_mxfp4=rounds)


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
    return scores_triton.index_scores(
        q,
        head_weights,
        record_rows(cache).rows,
        block_table,
        row_seq,
        visible,
        entries_per_block=entries_per_block,
        max_visible=max_visible,
    )


def select_topk(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    return select_triton.select_topk(scores, k)


def select_candidates(scores: Tensor, visible: Tensor, num_blocks: int, block_size: int) -> Tensor:
    return select_triton.select_candidates(scores, visible, num_blocks, block_size)


def mask_candidates(scores: Tensor, candidates: Tensor, block_size: int) -> Tensor:
    return select_triton.mask_candidates(scores, candidates, block_size)


def select_visible(visible: Tensor, k: int) -> Tensor:
    return select_triton.select_visible(visible, k)


def register(table: OpTable, reason: str) -> None:
    """Add this family's implementations to `table`."""
    table.implements(indexer.index_query, reason=reason)(index_query)
    table.implements(indexer.index_scores, reason=reason)(index_scores)
    table.implements(indexer.select_topk, reason=reason)(select_topk)
    table.implements(indexer.select_candidates, reason=reason)(select_candidates)
    table.implements(indexer.mask_candidates, reason=reason)(mask_candidates)
    table.implements(indexer.select_visible, reason=reason)(select_visible)
