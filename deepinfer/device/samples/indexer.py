"""Samples of the indexer family: queries and scores; see `selection.py` for the choosing ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.device.backend import CacheKind
from deepinfer.device.errors import ContractError
from deepinfer.device.numerics import Numerics
from deepinfer.device.ops import indexer
from deepinfer.device.samples import draws, selection
from deepinfer.device.samples.canonical import ForeignHandle
from deepinfer.device.samples.registry import (
    Arguments,
    Builder,
    ErrorCase,
    Sample,
    declare,
    declare_error,
    declare_sample,
)

Edit = Callable[[Tensor], Tensor]
_WIDTH, _ROTATED, _POSITIONS = 32, 16, 64


def _query(
    positions: tuple[int, ...] = (0, 9, 30), *, heads: int = 4, edit: Edit = torch.clone
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        dtype = draws.activation_dtype(numerics)
        q = draws.normal(generator, len(positions), heads, 2 * _WIDTH, dtype=dtype)
        return {
            "q": edit(q),
            "positions": torch.tensor(positions, dtype=torch.int64),
            "rope_table": draws.rope_table(_POSITIONS, _ROTATED),
            "cache": draws.cache(
                generator, numerics, kind=CacheKind.INDEX, num_rows=2, width=2 * _WIDTH
            ),
        }

    return build


def _zero_head(x: Tensor) -> Tensor:
    x = x.clone()
    x[1, 2] = 0.0
    return x


declare(
    indexer.index_query,
    {
        "control": _query(),
        "n=0": _query(()),
        "n=1": _query((5,)),
        "heads=1": _query(heads=1),
        "position=last": _query((_POSITIONS - 1, 0)),
        "zero-head": _query(edit=_zero_head),
        "strided": _query(edit=draws.strided),
        "outlier-channel": _query(edit=draws.with_outlier),
    },
)
declare_sample(
    indexer.index_query,
    Sample("nan-row", _query(edit=draws.with_nan_row), loose_rows={"out": (2,)}),
)

_BLOCK, _NUM_BLOCKS = 4, 8


def _scores(
    rows: tuple[tuple[int, ...], ...] = ((5, 6, 7), (10, 11)),
    *,
    table: tuple[tuple[int, ...], ...] = ((6, 0, 3), (5, 2, 4)),
    max_visible: int | None = None,
    max_query_len: int | None = None,
    heads: int = 4,
    width: int = _WIDTH,
    edit: Edit = torch.clone,
) -> Builder:
    """`rows` holds the visible entries of each request's rows; block 7 is never in a table."""

    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        dtype = draws.activation_dtype(numerics)
        visible = [count for seq in rows for count in seq]
        row_seq = [seq for seq, counts in enumerate(rows) for _ in counts]
        q = draws.normal(generator, len(visible), heads, width, dtype=dtype)
        weights = draws.normal(generator, len(visible), heads, dtype=dtype)
        return {
            "q": edit(draws.representable(q, CacheKind.INDEX, numerics).to(dtype)),
            "head_weights": weights * (heads * width) ** -0.5,
            "cache": draws.cache(
                generator,
                numerics,
                kind=CacheKind.INDEX,
                num_rows=_BLOCK * _NUM_BLOCKS,
                width=width,
                poisoned=tuple(range(_BLOCK * (_NUM_BLOCKS - 1), _BLOCK * _NUM_BLOCKS)),
            ),
            "block_table": torch.tensor(table, dtype=torch.int64),
            "row_seq": torch.tensor(row_seq, dtype=torch.int64),
            "visible": torch.tensor(visible, dtype=torch.int64),
            "entries_per_block": _BLOCK,
            "max_visible": max(visible, default=0) if max_visible is None else max_visible,
            "max_query_len": max_query_len or max(map(len, rows), default=1),
        }

    return build


declare(
    indexer.index_scores,
    {
        "control": _scores(),
        "n=0": _scores(((), ()), max_visible=5),
        "n=1": _scores(((7,),), table=((1, 2),)),
        "n=20": _scores((tuple(range(1, 12)), tuple(range(2, 11))), table=((1, 2, 3), (4, 0, 5))),
        "decode": _scores(((9,), (4,), (12,)), table=((1, 2, 3), (4, -1, -1), (0, 6, 5))),
        "visible=0,1,2": _scores(((0, 1, 2),), table=((3,),)),
        "visible=block-1,block,block+1": _scores(((3, 4, 5),), table=((3, 1),)),
        "nothing-visible": _scores(((0, 0),), table=((-1,),)),
        "bound=above-visible": _scores(max_visible=12),
        "unallocated-blocks": _scores(((2, 3), (12,)), table=((6, -1, -1), (5, 2, 4))),
        "padding-rows": _scores(((5,), (10, 0, 0, 0)), max_query_len=1),
        "query-bound=above-rows": _scores(max_query_len=9),
        "heads=1": _scores(heads=1),
        "width=128": _scores(width=128),
        "strided": _scores(edit=draws.strided),
        "nan-padding-row": _scores(((5,), (10, 0)), max_query_len=1, edit=draws.with_nan_row),
    },
)


def _foreign(build_rest: Builder) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        return {**build_rest(generator, numerics), "cache": ForeignHandle("cache")}

    return build


declare_error(
    indexer.index_query, ErrorCase("foreign-handle", _foreign(_query()), ContractError, "handle")
)
declare_error(
    indexer.index_scores, ErrorCase("foreign-handle", _foreign(_scores()), ContractError, "handle")
)

declare(indexer.select_topk, selection.TOPK)
declare(indexer.select_candidates, selection.CANDIDATES)
declare(indexer.mask_candidates, selection.MASKS)
declare(indexer.select_visible, selection.VISIBLE)
declare(indexer.index_select, selection.INDEX_SELECT)
