"""Truths of the indexer family."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.device.backend import CacheKind
from deepinfer.device.ops.indexer import IndexPlan, Selection
from deepinfer.device.samples.canonical import CanonicalCache
from deepinfer_conformance.naive import numbers, stored
from deepinfer_conformance.naive.attention import rotated
from deepinfer_conformance.naive.kv import recorded

_ABSENT = -math.inf


def index_query(q: Tensor, positions: Tensor, rope_table: Tensor, cache: CanonicalCache) -> Tensor:
    """Token by token, head by head; [T, H, N] in q's dtype."""
    table = stored.matrix(rope_table)
    rows = []
    for heads, position in zip(q.double().tolist(), positions.tolist(), strict=True):
        turned = [rotated(head, table[position], inverse=False, like=q) for head in heads]
        normative = numbers.is_normative(q)
        rows.append([recorded(head, CacheKind.INDEX, normative=normative) for head in turned])
    return torch.tensor(rows, dtype=torch.float64).view(q.shape).to(q.dtype)


def _score(
    heads: list[list[float]], weights: list[float], key: list[float], *, like: Tensor
) -> float:
    total = 0.0
    for head, weight in zip(heads, weights, strict=True):
        dot = math.fsum(a * b for a, b in zip(head, key, strict=True))
        positive = max(numbers.to_activation(dot, like), 0.0)
        total += numbers.to_activation(positive * weight, like)
    return numbers.to_activation(total, like)


def index_scores(
    q: Tensor,
    head_weights: Tensor,
    cache: CanonicalCache,
    block_table: Tensor,
    row_seq: Tensor,
    visible: Tensor,
    *,
    entries_per_block: int,
    max_visible: int,
    max_query_len: int,
) -> Tensor:
    """Token by token, entry by entry; [T, max_visible] float64."""
    keys = stored.matrix(cache.values)
    weights = stored.matrix(head_weights)
    scores = torch.full((q.shape[0], max_visible), _ABSENT, dtype=torch.float64)
    for token, heads in enumerate(q.double().tolist()):
        for entry in range(int(visible[token])):
            block = int(block_table[int(row_seq[token]), entry // entries_per_block])
            key = keys[block * entries_per_block + entry % entries_per_block]
            scores[token, entry] = _score(heads, weights[token], key, like=q)
    return scores


def _best(row: list[float], k: int) -> list[int]:
    """The k best finite or infinite positions, lowest first among equals, ascending, -1 padded."""
    order = sorted(range(len(row)), key=lambda at: (-row[at], at))
    chosen = sorted(at for at in order[:k] if row[at] != _ABSENT)
    return chosen + [-1] * (k - len(chosen))


def _select(scores: Tensor, k: int) -> Tensor:
    rows = [_best(row, k) for row in stored.matrix(scores)]
    return torch.tensor(rows, dtype=torch.int64).view(scores.shape[0], k)


def select_topk(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Row by row with a full sort; [T, k] int64."""
    return _select(scores, k)


def block_scores(scores: Tensor, visible: Tensor, block_size: int) -> Tensor:
    """[T, blocks] float64: maximum of each block, +inf for the newest block of a row."""
    num_blocks = -(-scores.shape[1] // block_size)
    best = torch.full((scores.shape[0], num_blocks), _ABSENT, dtype=torch.float64)
    for token, row in enumerate(stored.matrix(scores)):
        for block in range(num_blocks):
            best[token, block] = max(row[block * block_size : (block + 1) * block_size])
        if int(visible[token]) > 0:
            best[token, (int(visible[token]) - 1) // block_size] = math.inf
    return best


def select_candidates(scores: Tensor, visible: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """Row by row; [T, num_blocks] int64."""
    return _select(block_scores(scores, visible, block_size), num_blocks)


def mask_candidates(scores: Tensor, candidates: Tensor, block_size: int) -> Tensor:
    """Entry by entry; [T, n]."""
    result = scores.clone()
    for token, blocks in enumerate(candidates.tolist()):
        for entry in range(scores.shape[1]):
            if entry // block_size not in blocks:
                result[token, entry] = _ABSENT
    return result


def select_visible(visible: Tensor, k: int) -> Tensor:
    """Row by row; [T, k] int64."""
    rows = [[entry if entry < count else -1 for entry in range(k)] for count in visible.tolist()]
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), k)


def _plan_scores(
    q: Tensor,
    head_weights: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    cache: CanonicalCache,
    candidates: Tensor | None,
    *,
    plan: IndexPlan,
) -> dict[str, Tensor]:
    """Scores that decide entries and candidate blocks of `index_select`."""
    scores = index_scores(
        index_query(q, positions, rope_table, cache),
        head_weights,
        cache,
        plan.block_table,
        plan.row_seq,
        plan.visible,
        entries_per_block=plan.entries_per_block,
        max_visible=plan.max_visible,
        max_query_len=plan.max_query_len,
    )
    blocks = block_scores(scores, plan.visible, plan.candidate_block_size)
    # With at most k visible entries all are taken, candidates or not.
    restricted = plan.max_visible > plan.topk and not plan.publishes_candidates
    if restricted and candidates is not None:
        scores = mask_candidates(scores, candidates, plan.candidate_block_size)
    result = {"entries": scores}
    if plan.publishes_candidates:
        result["candidates"] = blocks
    elif candidates is not None:
        # Passed through as they came: only exactly these are right.
        given = torch.full_like(blocks, _ABSENT)
        for token, chosen in enumerate(candidates.tolist()):
            given[token, [block for block in chosen if block >= 0]] = 0.0
        result["candidates"] = given
    return result


def index_select(
    q: Tensor,
    head_weights: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    cache: CanonicalCache,
    candidates: Tensor | None,
    *,
    plan: IndexPlan,
) -> Selection:
    """Score, restrict, sort, row by row."""
    scores = _plan_scores(q, head_weights, positions, rope_table, cache, candidates, plan=plan)
    if plan.publishes_candidates:
        candidates = _select(scores["candidates"], plan.num_candidate_blocks)
    return Selection(_select(scores["entries"], plan.topk), candidates)


def _topk_scores(scores: Tensor, visible: Tensor, k: int) -> dict[str, Tensor]:
    return {"out": scores}


def _candidate_scores(
    scores: Tensor, visible: Tensor, num_blocks: int, block_size: int
) -> dict[str, Tensor]:
    return {"out": block_scores(scores, visible, block_size)}


SELECTION_SCORES = {
    "select_topk": _topk_scores,
    "select_candidates": _candidate_scores,
    "index_select": _plan_scores,
}
"""Scores by which each op chooses, per output; ties among them are nobody's fault."""
