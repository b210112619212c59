"""Samples of the attention family."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.device.backend import CacheKind
from deepinfer.device.errors import ContractError
from deepinfer.device.numerics import Numerics
from deepinfer.device.ops.attention import rope, sparse_attention
from deepinfer.device.samples import draws
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
_LAST_POSITION = 63


def _rope(
    positions: tuple[int, ...] = (0, 5, 1, 40, 17),
    *,
    heads: int = 3,
    width: int = 32,
    rotated: int = 16,
    inverse: bool = False,
    edit: Edit = torch.clone,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        dtype = draws.activation_dtype(numerics)
        x = draws.normal(generator, len(positions), heads, width, dtype=dtype)
        return {
            "x": edit(x),
            "positions": torch.tensor(positions, dtype=torch.int64),
            "rope_table": draws.rope_table(_LAST_POSITION + 1, rotated),
            "inverse": inverse,
        }

    return build


declare(
    rope,
    {
        "control": _rope(),
        "inverse": _rope(inverse=True),
        "n=0": _rope(()),
        "n=1": _rope((7,)),
        "position=last": _rope((_LAST_POSITION, _LAST_POSITION - 1, 0)),
        "one-position": _rope((9, 9, 9)),
        "heads=1": _rope(heads=1),
        "all-rotated": _rope(width=16),
        "one-pair": _rope(width=33, rotated=2),
        "strided": _rope(edit=draws.strided),
        "outlier-channel": _rope(edit=draws.with_outlier),
    },
)
declare_sample(rope, Sample("nan-row", _rope(edit=draws.with_nan_row), loose_rows={"out": (4,)}))

_WINDOW, _TOPK, _WIDTH = 8, 6, 32
_WINDOW_ROWS, _COMPRESSED_ROWS = 20, 24
_POISONED = 19


def _present(generator: torch.Generator, counts: tuple[int, ...], width: int, high: int) -> Tensor:
    """[len(counts), width] slots below `high`; row i has counts[i] entries in random columns."""
    slots = torch.full((len(counts), width), -1, dtype=torch.int64)
    for row, count in enumerate(counts):
        columns = torch.randperm(width, generator=generator)[:count]
        slots[row, columns] = torch.randperm(high, generator=generator)[:count]
    return slots


def _attention(
    window: tuple[int, ...] = (8, 3, 7, 5),
    compressed: tuple[int, ...] | None = (6, 4, 1, 5),
    *,
    heads: int = 2,
    sink: float | None = None,
    width: int = _WIDTH,
    scale: float = _WIDTH**-0.5,
    edit: Edit = torch.clone,
    edit_slots: Edit = torch.clone,
) -> Builder:
    """`window` and `compressed` hold the number of entries of each row."""

    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        dtype = draws.activation_dtype(numerics)
        q = draws.normal(generator, len(window), heads, width, dtype=dtype)
        # The last window row is never selected and holds NaN, as a released row may.
        arguments: Arguments = {
            "q": edit(q),
            "window": draws.cache(
                generator, numerics, kind=CacheKind.WINDOW, num_rows=_WINDOW_ROWS,
                width=width, poisoned=(_POISONED,),
            ),
            "window_slots": edit_slots(_present(generator, window, _WINDOW, _POISONED)),
            "compressed": None,
            "compressed_slots": None,
            "sink": draws.vector(
                draws.normal(generator, heads) if sink is None else torch.full((heads,), sink)
            ),
            "scale": scale,
        }  # fmt: skip
        if compressed is not None:
            arguments["compressed"] = draws.cache(
                generator,
                numerics,
                kind=CacheKind.COMPRESSED,
                num_rows=_COMPRESSED_ROWS,
                width=width,
            )
            slots = _present(generator, compressed, _TOPK, _COMPRESSED_ROWS)
            arguments["compressed_slots"] = edit_slots(slots)
        return arguments

    return build


def _all_last(slots: Tensor) -> Tensor:
    return torch.full_like(slots, _POISONED - 1)


declare(
    sparse_attention,
    {
        "control": _attention(),
        "n=0": _attention((), ()),
        "n=1": _attention((8,), (6,)),
        "n=17": _attention((8, 1, 5) * 5 + (2, 7), None, heads=1),
        "n=36": _attention((8, 3, 7, 5) * 9, (6, 4, 1, 5) * 9),
        "window-only": _attention(compressed=None),
        # Wider than what kernels read at a time, and many groups with scales of their own.
        "width=288": _attention(width=288, scale=288**-0.5),
        "heads=1": _attention(heads=1),
        "window=0,1,W-1,W": _attention((0, 1, _WINDOW - 1, _WINDOW)),
        "topk=0,1,k-1,k": _attention(compressed=(0, 1, _TOPK - 1, _TOPK)),
        "no-window-entry": _attention((0, 0), (3, 6)),
        "row-without-entry": _attention((0, 4, 0), (0, 3, 0)),
        "rows-without-entry,window-only": _attention((0, 0), None),
        "one-entry": _attention((1, 0), (0, 1)),
        "repeated-last-slot": _attention(edit_slots=_all_last),
        "sink=+30": _attention(sink=30.0),
        "sink=-30": _attention(sink=-30.0),
        "scale=4": _attention(scale=4.0),
        "strided": _attention(edit=draws.strided),
        "strided-slots": _attention(edit_slots=draws.strided),
        "outlier-channel": _attention(edit=draws.with_outlier),
    },
)
declare_sample(
    sparse_attention,
    Sample("nan-row", _attention(edit=draws.with_nan_row), loose_rows={"out": (3,)}),
)


def _foreign_window(generator: torch.Generator, numerics: Numerics) -> Arguments:
    return {**_attention()(generator, numerics), "window": ForeignHandle("window")}


def _slots_missing(generator: torch.Generator, numerics: Numerics) -> Arguments:
    return {**_attention()(generator, numerics), "compressed_slots": None}


def _cache_missing(generator: torch.Generator, numerics: Numerics) -> Arguments:
    return {**_attention()(generator, numerics), "compressed": None}


for _name, _build, _pattern in (
    ("foreign-handle", _foreign_window, "handle"),
    ("compressed-without-slots", _slots_missing, "compressed_slots"),
    ("slots-without-compressed", _cache_missing, "compressed"),
):
    declare_error(sparse_attention, ErrorCase(_name, _build, ContractError, _pattern))
