"""Inputs for the choosing ops of the indexer family: ties, edges of k, edges of blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.device.backend import CacheKind
from deepinfer.device.numerics import Numerics
from deepinfer.device.ops.indexer import IndexPlan
from deepinfer.device.samples import draws
from deepinfer.device.samples.registry import Arguments, Builder

Edit = Callable[[Tensor], Tensor]
_K, _COLUMNS = 5, 18


def _visible_scores(
    generator: torch.Generator, visible: tuple[int, ...], columns: int
) -> tuple[Tensor, Tensor]:
    counts = torch.tensor(visible, dtype=torch.int64)
    scores = draws.normal(generator, len(visible), columns)
    hidden = torch.arange(columns) >= counts.unsqueeze(1)
    return scores.masked_fill(hidden, -torch.inf), counts


def _topk(
    visible: tuple[int, ...] = (18, 11, 7),
    *,
    columns: int = _COLUMNS,
    k: int = _K,
    edit: Edit = torch.clone,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        scores, counts = _visible_scores(generator, visible, columns)
        return {"scores": edit(scores), "visible": counts, "k": k}

    return build


def _with_holes(scores: Tensor) -> Tensor:
    """-inf outside candidate blocks, which leaves the first row fewer than k entries."""
    scores = scores.clone()
    scores[:, 4:12] = -torch.inf
    scores[0, :15] = -torch.inf
    return scores


def _tied(scores: Tensor) -> Tensor:
    """Few different values, so that the k-th is shared by many."""
    return torch.where(torch.isinf(scores), scores, (scores * 2.0).round() / 2.0)


TOPK: dict[str, Builder] = {
    "control": _topk(),
    "n=0": _topk(()),
    "n=1": _topk((9,)),
    "visible=0,1": _topk((0, 1)),
    "visible=k-1,k,k+1": _topk((_K - 1, _K, _K + 1)),
    "visible=all": _topk((_COLUMNS, _COLUMNS)),
    "columns=k-1": _topk((4, 2), columns=_K - 1),
    "columns=0": _topk((0, 0), columns=0),
    "columns=40000": _topk((40000, 33000), columns=40000, edit=_tied),
    "k=1": _topk(k=1),
    "masked": _topk(edit=_with_holes),
    "nothing-left": _topk(edit=lambda x: torch.full_like(x, -torch.inf)),
    "ties": _topk(edit=_tied),
    "all-equal": _topk(edit=lambda x: torch.where(torch.isinf(x), x, 0.0)),
    "all-negative": _topk(edit=lambda x: -x.abs() - 1.0),
    "bf16-scores": _topk(edit=lambda x: x.bfloat16().float()),
    "strided": _topk(edit=draws.strided),
}

_SIZE = 4


def _candidates(
    visible: tuple[int, ...] = (18, 9, 16),
    *,
    columns: int = _COLUMNS,
    num_blocks: int = 3,
    edit: Edit = torch.clone,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        scores, counts = _visible_scores(generator, visible, columns)
        return {
            "scores": edit(scores),
            "visible": counts,
            "num_blocks": num_blocks,
            "block_size": _SIZE,
        }

    return build


def _newest_worst(scores: Tensor) -> Tensor:
    """Falling scores: the newest block is the worst one."""
    falling = -torch.arange(scores.shape[1], dtype=torch.float32).expand_as(scores)
    return torch.where(torch.isinf(scores), scores, falling)


CANDIDATES: dict[str, Builder] = {
    "control": _candidates(),
    "n=0": _candidates(()),
    "n=1": _candidates((13,)),
    "visible=0,1": _candidates((0, 1)),
    "visible=block-1,block,block+1": _candidates((_SIZE - 1, _SIZE, _SIZE + 1)),
    "visible=all-blocks": _candidates((12, 13, 16), num_blocks=4),
    "blocks=1": _candidates(num_blocks=1),
    "blocks=more-than-there-are": _candidates(num_blocks=9),
    "columns=multiple-of-block": _candidates((16, 13), columns=16),
    "columns=1": _candidates((1, 0), columns=1),
    "newest-is-worst": _candidates(edit=_newest_worst),
    "ties": _candidates(edit=_tied),
    "strided": _candidates(edit=draws.strided),
}


def _mask(
    candidates: tuple[tuple[int, ...], ...] = ((0, 2, 4), (1, 3, -1)),
    *,
    columns: int = _COLUMNS,
    edit: Edit = torch.clone,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        return {
            "scores": edit(draws.normal(generator, len(candidates), columns)),
            "candidates": torch.tensor(candidates, dtype=torch.int64).view(len(candidates), -1),
            "block_size": _SIZE,
        }

    return build


def _empty_mask(generator: torch.Generator, numerics: Numerics) -> Arguments:
    return {
        "scores": torch.zeros(0, _COLUMNS),
        "candidates": torch.zeros((0, 3), dtype=torch.int64),
        "block_size": _SIZE,
    }


MASKS: dict[str, Builder] = {
    "control": _mask(),
    "n=0": _empty_mask,
    "n=1": _mask(((1, 2, -1),)),
    "none": _mask(((-1, -1, -1),)),
    "all": _mask(((0, 1, 2, 3, 4),)),
    "partial-last-block": _mask(((4, -1),)),
    "columns=multiple-of-block": _mask(((0, 3),), columns=16),
    "already-hidden": _mask(edit=lambda x: x.masked_fill(x < 0, -torch.inf)),
    "strided": _mask(edit=draws.strided),
}


def _all_visible(visible: tuple[int, ...], k: int = _K) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        return {"visible": torch.tensor(visible, dtype=torch.int64), "k": k}

    return build


VISIBLE: dict[str, Builder] = {
    "control": _all_visible((3, 2, 5)),
    "n=0": _all_visible(()),
    "n=1": _all_visible((4,)),
    "visible=0,1,k-1,k": _all_visible((0, 1, _K - 1, _K)),
    "k=1": _all_visible((0, 1), k=1),
}

_HEADS, _WIDTH, _ENTRIES = 4, 32, 4


def _index_select(
    rows: tuple[tuple[int, ...], ...] = ((15, 16, 17), (20,)),
    *,
    candidates: tuple[tuple[int, ...], ...] | None = None,
    publishes: bool = False,
    topk: int = _K,
) -> Builder:
    """`rows` holds the visible entries of each request's rows."""

    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        dtype = draws.activation_dtype(numerics)
        visible = [count for seq in rows for count in seq]
        num_rows, per_seq = len(visible), -(-max(visible, default=1) // _ENTRIES)
        num_blocks = per_seq * len(rows)
        table = torch.randperm(num_blocks, generator=generator).view(len(rows), per_seq)
        plan = IndexPlan(
            block_table=table,
            row_seq=torch.tensor(
                [seq for seq, counts in enumerate(rows) for _ in counts], dtype=torch.int64
            ),
            visible=torch.tensor(visible, dtype=torch.int64),
            entries_per_block=_ENTRIES,
            max_visible=max(visible, default=0),
            max_query_len=max(map(len, rows)),
            topk=topk,
            num_candidate_blocks=3,
            candidate_block_size=_SIZE,
            publishes_candidates=publishes,
        )
        q = draws.normal(generator, num_rows, _HEADS, _WIDTH, dtype=dtype)
        weights = draws.normal(generator, num_rows, _HEADS, dtype=dtype)
        return {
            "q": q,
            "head_weights": weights * (_HEADS * _WIDTH) ** -0.5,
            "positions": (plan.visible - 1).clamp_min(0),
            "rope_table": draws.rope_table(64, 16),
            "cache": draws.cache(
                generator,
                numerics,
                kind=CacheKind.INDEX,
                num_rows=num_blocks * _ENTRIES,
                width=_WIDTH,
            ),
            "candidates": None
            if candidates is None
            else torch.tensor(candidates, dtype=torch.int64),
            "plan": plan,
        }

    return build


_GIVEN = ((0, 2, 3), (1, 2, 3), (0, 1, 4), (2, 3, 4))
INDEX_SELECT: dict[str, Builder] = {
    "control": _index_select(),
    "n=0": _index_select(((),)),
    "n=1": _index_select(((13,),)),
    "publishes": _index_select(publishes=True),
    "restricted": _index_select(candidates=_GIVEN),
    "visible=0,1,k+1": _index_select(((0, 1, _K + 1),)),
    "bound=k": _index_select(((_K - 1, _K),)),
    "bound=k,publishes": _index_select(((0, 3, 4, 5),), publishes=True),
    "bound=k,restricted": _index_select(((3, 5),), candidates=((0, -1, -1), (0, 1, -1))),
    "k=12": _index_select(topk=12),
}
