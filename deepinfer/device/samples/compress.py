"""Samples of the compress family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.device.numerics import Numerics
from deepinfer.device.ops.compress import compress_pair
from deepinfer.device.samples import draws
from deepinfer.device.samples.registry import (
    Arguments,
    Builder,
    Sample,
    declare,
    declare_sample,
)

_WIDTH, _RING_ROWS = 24, 8


@dataclass(frozen=True, slots=True)
class _Rows:
    """Index arguments of one call."""

    previous: tuple[int, ...]
    read: tuple[int, ...]
    write: tuple[int, ...]
    emit: tuple[int, ...]


# Two requests: rows 0..3 begin at an odd position (its even token waits in ring row 2), rows
# 4..5 at an even one.
_CONTROL = _Rows(
    previous=(-1, 0, 1, 2, -1, 4),
    read=(2, 3, 0, 1, 7, 4),
    write=(3, 0, 1, 2, 4, 5),
    emit=(0, 2, 5),
)


def _case(rows: _Rows = _CONTROL, edit: Callable[[Tensor], Tensor] = torch.clone) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        def index(values: tuple[int, ...]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64)

        return {
            "values_gates": edit(draws.normal(generator, len(rows.previous), 2 * _WIDTH)),
            "previous_row": index(rows.previous),
            "ring_read": index(rows.read),
            "ring_write": index(rows.write),
            "emit_rows": index(rows.emit),
            "ring": draws.normal(generator, _RING_ROWS, 2 * _WIDTH),
            "like": torch.empty(0, dtype=draws.activation_dtype(numerics)),
        }

    return build


def _equal_gates(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, _WIDTH:] = 0.5
    return x


def _far_gates(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, _WIDTH:] *= 80.0
    return x


declare(
    compress_pair,
    {
        "control": _case(),
        "n=0": _case(_Rows((), (), (), ())),
        "n=0,padding-entry": _case(_Rows((), (), (), (-1,))),
        "n=1,from-ring": _case(_Rows((-1,), (6,), (7,), (0,))),
        "n=1,nothing-emitted": _case(_Rows((-1,), (1,), (0,), ())),
        "n=1,largest-ring-row": _case(_Rows((-1,), (7,), (7,), (0,))),
        "pairs-within-the-step": _case(_Rows((-1, 0, 1, 2), (7, 0, 1, 2), (0, 1, 2, 3), (1, 3))),
        "reads-before-writing": _case(_Rows((-1, -1), (0, 1), (1, 0), (0, 1))),
        "nothing-written": _case(_Rows((-1, 0), (2, 3), (-1, -1), (0,))),
        "equal-gates": _case(edit=_equal_gates),
        "far-gates": _case(edit=_far_gates),
        "strided": _case(edit=draws.strided),
        "outlier-channel": _case(edit=draws.with_outlier),
    },
)
declare_sample(
    compress_pair,
    Sample(
        "nan-padding-row",
        _case(_Rows((-1, 0, -1), (2, 3, 0), (3, 0, -1), (0, -1, -1)), edit=draws.with_nan_row),
        loose_rows={"out": (1, 2)},
    ),
)
declare_sample(
    compress_pair,
    Sample(
        "padding-entries",
        _case(_Rows((-1, 0), (2, 3), (3, 4), (0, -1, -1))),
        loose_rows={"out": (1, 2)},
    ),
)
