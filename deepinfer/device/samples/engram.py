"""Samples of the engram family."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.device.errors import ContractError
from deepinfer.device.numerics import Numerics
from deepinfer.device.ops import engram
from deepinfer.device.ops.engram import HashConstants
from deepinfer.device.samples import draws
from deepinfer.device.samples.canonical import CanonicalEngram, CanonicalFetch, ForeignHandle
from deepinfer.device.samples.registry import (
    Arguments,
    Builder,
    ErrorCase,
    Sample,
    declare,
    declare_error,
    declare_sample,
)
from deepinfer.device.weights import WeightFormat, stored_from_float

Edit = Callable[[Tensor], Tensor]
_VOCAB, _CLASSES, _PAD = 64, 16, 2
_PRIMES = (251, 257, 263, 269, 271, 277, 281, 283, 293, 307, 311, 313)


def _constants(num_layers: int, max_ngram: int, heads: int) -> HashConstants:
    columns = (max_ngram - 1) * heads
    # The largest multipliers that the int64 hash allows for this many classes.
    bound = (2**63 - 1) // _CLASSES // 2
    multipliers = [
        [2 * (bound - 7919 * (layer * max_ngram + shift)) - 1 for shift in range(max_ngram)]
        for layer in range(num_layers)
    ]
    primes = [
        [_PRIMES[(layer * columns + column) % len(_PRIMES)] for column in range(columns)]
        for layer in range(num_layers)
    ]
    offsets = [[sum(row[:column]) for column in range(columns)] for row in primes]
    return HashConstants(
        token_map=(torch.arange(_VOCAB) // (_VOCAB // _CLASSES)).int(),
        multipliers=torch.tensor(multipliers, dtype=torch.int64),
        primes=torch.tensor(primes, dtype=torch.int64),
        offsets=torch.tensor(offsets, dtype=torch.int64),
        pad=_PAD,
    )


def _hash(
    ids: tuple[tuple[int, ...], ...] = ((7, 30, 9, 12), (40, 3)),
    history: tuple[tuple[int, ...], ...] = ((1, 2, 3), (-1, -1, 5)),
    *,
    num_layers: int = 2,
    heads: int = 2,
    edit: Edit = torch.clone,
) -> Builder:
    """`ids` and `history` by request."""

    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        row_seq = [seq for seq, tokens in enumerate(ids) for _ in tokens]
        row_offset = [offset for tokens in ids for offset in range(len(tokens))]
        flat = [token for tokens in ids for token in tokens]
        return {
            "ids": edit(torch.tensor(flat, dtype=torch.int64)),
            "history": torch.tensor(history, dtype=torch.int64),
            "row_seq": torch.tensor(row_seq, dtype=torch.int64),
            "row_offset": torch.tensor(row_offset, dtype=torch.int64),
            "constants": _constants(num_layers, len(history[0]) + 1, heads),
        }

    return build


declare(
    engram.ngram_hash,
    {
        "control": _hash(),
        "n=0": _hash(((),), ((1, 2, 3),)),
        "n=1": _hash(((7,),), ((1, 2, 3),)),
        "n=1,no-history": _hash(((7,),), ((-1, -1, -1),)),
        "chunk-after-history": _hash(((9, 12),), ((1, 7, 30),)),
        "empty-request-between": _hash(((7, 8), (), (9,)), ((1, 2, 3), (4, 5, 6), (7, 8, 9))),
        "dead-token": _hash(((7, -1, 9, 12, 13, 14),), ((1, 2, 3),)),
        "dead-current-token": _hash(((-1,),), ((1, 2, 3),)),
        "dead-in-history": _hash(((7, 8, 9),), ((1, -1, 3),)),
        "largest-id": _hash(((63, 63, 63, 63, 0),), ((63, 0, 63),)),
        "layers=1": _hash(num_layers=1),
        "heads=1": _hash(heads=1),
        "bigrams": _hash(history=((3,), (5,))),
        "strided": _hash(edit=draws.strided),
    },
)

_COLUMNS, _TABLE_ROWS, _TABLE_WIDTH = 3, 20, 64


def _table(generator: torch.Generator, fmt: WeightFormat) -> CanonicalEngram:
    values = draws.normal(generator, _TABLE_ROWS, _TABLE_WIDTH)
    # Rows of very different magnitude, a group of zeros, a negative zero.
    values *= 2.0 ** torch.arange(-30, -30 + 2 * _TABLE_ROWS, 2).unsqueeze(1)
    values[4, :32] = 0.0
    values[5, 0] = -0.0
    return CanonicalEngram(stored_from_float(values, fmt))


def _fetch(
    rows: int = 4,
    *,
    fmt: WeightFormat = WeightFormat.FP8_ROW32,
    edit: Edit = torch.clone,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        index = draws.integers(generator, _TABLE_ROWS, rows, _COLUMNS)
        return {"table": _table(generator, fmt), "rows": edit(index)}

    return build


def _wait(start: Builder) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        arguments = start(generator, numerics)
        table, rows = arguments["table"], arguments["rows"]
        assert isinstance(table, CanonicalEngram)
        assert isinstance(rows, Tensor)
        return {"handle": CanonicalFetch(table, rows)}

    return build


_FETCHES = {
    "control": _fetch(),
    "n=0": _fetch(0),
    "n=1": _fetch(1),
    "first-and-last-row": _fetch(2, edit=lambda x: torch.where(x % 2 == 0, 0, _TABLE_ROWS - 1)),
    "repeated": _fetch(edit=lambda x: torch.full_like(x, 5)),
    "zero-group": _fetch(edit=lambda x: torch.full_like(x, 4)),
    "table=bf16": _fetch(fmt=WeightFormat.BF16),
    "table=f32": _fetch(fmt=WeightFormat.F32),
    "strided": _fetch(edit=draws.strided),
}
declare(engram.engram_fetch_start, _FETCHES)
declare(engram.engram_fetch_wait, {name: _wait(start) for name, start in _FETCHES.items()})

_STREAMS, _WIDTH = 4, 32


def _inject(
    rows: int = 4,
    *,
    streams: int = _STREAMS,
    dead: tuple[bool, ...] | None = None,
    eps: float = 1e-20,
    edit_streams: Edit = torch.clone,
    edit_kv: Edit = torch.clone,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        dtype = draws.activation_dtype(numerics)
        residual = draws.normal(generator, rows, streams, _WIDTH, dtype=dtype)
        kv = draws.normal(generator, rows, (streams + 1) * _WIDTH, dtype=dtype)
        return {
            "streams": edit_streams(residual),
            "kv": edit_kv(kv),
            "query_key_weight": 1.0 + 0.2 * draws.normal(generator, streams, _WIDTH),
            "dead": None if dead is None else torch.tensor(dead, dtype=torch.bool),
            "eps": eps,
        }

    return build


def _zero_stream(x: Tensor) -> Tensor:
    x = x.clone()
    x[1, 2] = 0.0
    return x


declare(
    engram.engram_inject,
    {
        "control": _inject(),
        "n=0": _inject(0),
        "n=1": _inject(1),
        "streams=1": _inject(streams=1),
        "dead-rows": _inject(dead=(False, True, False, True)),
        "all-dead": _inject(dead=(True, True, True, True)),
        "none-dead": _inject(dead=(False, False, False, False)),
        "zero-dot": _inject(edit_streams=_zero_stream),
        "eps=1e-2": _inject(eps=1e-2),
        "strided": _inject(edit_streams=draws.strided, edit_kv=draws.strided),
        "outlier-channel": _inject(edit_streams=draws.with_outlier),
    },
)
declare_sample(
    engram.engram_inject,
    Sample("nan-row", _inject(edit_streams=draws.with_nan_row), loose_rows={"out": (3,)}),
)


def _foreign_table(generator: torch.Generator, numerics: Numerics) -> Arguments:
    return {**_fetch()(generator, numerics), "table": ForeignHandle("table")}


def _foreign_fetch(generator: torch.Generator, numerics: Numerics) -> Arguments:
    return {"handle": ForeignHandle("handle")}


declare_error(
    engram.engram_fetch_start,
    ErrorCase("foreign-handle", _foreign_table, ContractError, "handle"),
)
declare_error(
    engram.engram_fetch_wait,
    ErrorCase("foreign-handle", _foreign_fetch, ContractError, "handle"),
)
