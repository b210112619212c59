"""Samples of the kv family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer.device.backend import CacheKind
from deepinfer.device.errors import ContractError
from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpSpec
from deepinfer.device.ops import kv
from deepinfer.device.samples import draws
from deepinfer.device.samples.canonical import ForeignHandle
from deepinfer.device.samples.registry import (
    Arguments,
    Builder,
    ErrorCase,
    declare,
    declare_error,
)

Edit = Callable[[Tensor], Tensor]
_ROWS, _POSITIONS = 10, 64


def _store(
    positions: tuple[int, ...] = (0, 7, 30),
    slots: tuple[int, ...] = (4, 0, 6),
    *,
    kind: CacheKind = CacheKind.WINDOW,
    width: int = 64,
    edit: Edit = torch.clone,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        dtype = draws.activation_dtype(numerics)
        x = draws.normal(generator, len(positions), width, dtype=dtype)
        return {
            "x": edit(x),
            "positions": torch.tensor(positions, dtype=torch.int64),
            "slots": torch.tensor(slots, dtype=torch.int64),
            "rope_table": draws.rope_table(_POSITIONS, 16),
            "cache": draws.cache(generator, numerics, kind=kind, num_rows=_ROWS, width=width),
        }

    return build


def _zero_group(x: Tensor) -> Tensor:
    x = x.clone()
    x[1, :32] = 0.0
    return x


declare(
    kv.rope_store,
    {
        "control": _store(),
        "kind=compressed": _store(kind=CacheKind.COMPRESSED),
        "kind=index": _store(kind=CacheKind.INDEX),
        "n=0": _store((), ()),
        "n=1": _store((5,), (3,)),
        "first-and-last-slot": _store((1, 2), (_ROWS - 1, 0)),
        "position=last": _store((_POSITIONS - 1, 0), (2, 3)),
        "slot=-1": _store((3, 4, 5), (-1, 2, -1)),
        "all-skipped": _store((0, 0), (-1, -1)),
        "skipped-row-holds-nan": _store(slots=(4, 0, -1), edit=draws.with_nan_row),
        "all-rotated": _store(width=16, kind=CacheKind.COMPRESSED),
        "window,spread": _store(width=96, edit=draws.with_spread_groups),
        "compressed,spread": _store(
            width=96, kind=CacheKind.COMPRESSED, edit=draws.with_spread_groups
        ),
        "index,spread": _store(width=96, kind=CacheKind.INDEX, edit=draws.with_spread_groups),
        "zero-group": _store(edit=_zero_group),
        "zero-group,kind=compressed": _store(kind=CacheKind.COMPRESSED, edit=_zero_group),
        "zero-group,kind=index": _store(kind=CacheKind.INDEX, edit=_zero_group),
        "outlier-channel": _store(edit=draws.with_outlier),
        "outlier-channel,kind=index": _store(kind=CacheKind.INDEX, edit=draws.with_outlier),
        "small-values": _store(edit=lambda x: x * 2.0**-20),
        "strided": _store(edit=draws.strided),
    },
)


def _copy(
    source: tuple[int, ...] = (3, 1, 8),
    destination: tuple[int, ...] = (0, 9, 4),
    *,
    kind: CacheKind = CacheKind.WINDOW,
    same: bool = False,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        read = draws.cache(generator, numerics, kind=kind, num_rows=_ROWS, width=32)
        written = (
            read if same else draws.cache(generator, numerics, kind=kind, num_rows=_ROWS, width=32)
        )
        return {
            "source": read,
            "source_slots": torch.tensor(source, dtype=torch.int64),
            "destination_slots": torch.tensor(destination, dtype=torch.int64),
            "destination": written,
        }

    return build


declare(
    kv.copy_rows,
    {
        "control": _copy(),
        "kind=compressed": _copy(kind=CacheKind.COMPRESSED),
        "kind=index": _copy(kind=CacheKind.INDEX),
        "n=0": _copy((), ()),
        "n=1": _copy((2,), (5,)),
        "first-and-last": _copy((_ROWS - 1, 0), (0, _ROWS - 1)),
        "source=-1": _copy((-1, 1, 8), (0, 9, 4)),
        "destination=-1": _copy((3, 1, 8), (0, -1, 4)),
        "both=-1": _copy((-1, -1), (-1, -1)),
        "one-row-to-many": _copy((3, 3, 3), (0, 1, 2)),
        "within-one-cache": _copy((3, 1), (0, 9), same=True),
    },
)


def _entries(
    entries: tuple[tuple[int, ...], ...] = ((0, 5, 11), (7, -1, 3), (2, 2, -1)),
    row_seq: tuple[int, ...] = (0, 1, 1),
    *,
    table: tuple[tuple[int, ...], ...] = ((6, 0, 3), (5, 2, 4)),
    per_block: int = 4,
    edit: Edit = torch.clone,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        index = torch.tensor(entries, dtype=torch.int64).view(len(row_seq), -1)
        return {
            "entries": edit(index),
            "row_seq": torch.tensor(row_seq, dtype=torch.int64),
            "block_table": torch.tensor(table, dtype=torch.int64),
            "entries_per_block": per_block,
        }

    return build


def _no_entries(generator: torch.Generator, numerics: Numerics) -> Arguments:
    arguments = _entries()(generator, numerics)
    empty = torch.zeros((0, 3), dtype=torch.int64)
    return {**arguments, "entries": empty, "row_seq": torch.zeros(0, dtype=torch.int64)}


declare(
    kv.entry_slots,
    {
        "control": _entries(),
        "n=0": _no_entries,
        "n=1": _entries(((9, 1),), (1,)),
        "all-absent": _entries(((-1, -1), (-1, -1)), (0, 1)),
        "block-1,block,block+1": _entries(((3, 4, 5),), (0,)),
        "last-entry": _entries(((11,), (11,)), (0, 1)),
        "block-not-allocated": _entries(
            ((1, 5, 9), (4, 0, 8)), (0, 1), table=((6, -1, 3), (-1, 2, -1))
        ),
        "one-entry-per-block": _entries(((2, 0, 1),), (0,), per_block=1),
        "strided": _entries(edit=draws.strided),
    },
)


def _foreign(build_rest: Builder, argument: str) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        return {**build_rest(generator, numerics), argument: ForeignHandle(argument)}

    return build


def _two_caches(kind: CacheKind, width: int) -> Builder:
    """A destination of another kind or width than the source's."""

    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        other = draws.cache(generator, numerics, kind=kind, num_rows=_ROWS, width=width)
        return {**_copy()(generator, numerics), "destination": other}

    return build


_ERRORS: tuple[tuple[OpSpec[..., Any], str, Builder, str], ...] = (
    (kv.rope_store, "foreign-handle", _foreign(_store(), "cache"), "handle"),
    (kv.copy_rows, "foreign-source", _foreign(_copy(), "source"), "handle"),
    (kv.copy_rows, "foreign-destination", _foreign(_copy(), "destination"), "handle"),
    (kv.copy_rows, "two-widths", _two_caches(CacheKind.WINDOW, 64), "width"),
)
for _spec, _name, _build, _pattern in _ERRORS:
    declare_error(_spec, ErrorCase(_name, _build, ContractError, _pattern))
# In exact numerics every kind has the same fp32 record.
declare_error(
    kv.copy_rows,
    ErrorCase(
        "two-records",
        _two_caches(CacheKind.INDEX, 32),
        ContractError,
        "record",
        numerics=(Numerics.NORMATIVE,),
    ),
)
