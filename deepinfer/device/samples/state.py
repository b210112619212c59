"""Samples of the state family: layouts with empty, short and long requests and padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.device.numerics import Numerics
from deepinfer.device.ops import state
from deepinfer.device.ops.state import RowLayout
from deepinfer.device.runtime import StepKind
from deepinfer.device.samples import draws
from deepinfer.device.samples.registry import Arguments, Builder, declare


@dataclass(frozen=True, slots=True)
class Step:
    """Query and context lengths of every request, and the capacity in rows."""

    query: tuple[int, ...]
    context: tuple[int, ...]
    num_rows: int

    def layout(self) -> RowLayout:
        """The row layout that belongs to this step, from the contract's words."""
        seq, offset, position, valid = [], [], [], []
        for index, (length, done) in enumerate(zip(self.query, self.context, strict=True)):
            for row in range(length):
                seq.append(index)
                offset.append(row)
                position.append(done + row)
                valid.append(True)
        missing = self.num_rows - len(seq)
        starts = [sum(self.query[:index]) for index in range(len(self.query) + 1)]
        return RowLayout(
            _index(seq + [len(self.query) - 1] * missing),
            _index(offset + [0] * missing),
            _index(position + [0] * missing),
            torch.tensor(valid + [False] * missing, dtype=torch.bool),
            _index(starts),
        )


def _index(values: list[int] | tuple[int, ...]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


_STEPS = {
    "control": Step((3, 5, 2), (0, 7, 12), 10),
    "padding-rows": Step((3, 5, 2), (0, 7, 12), 16),
    "n=0": Step((0, 0), (4, 0), 0),
    "nothing-valid": Step((0, 0), (4, 0), 5),
    "n=1": Step((1,), (0,), 1),
    "one-request": Step((7,), (3,), 8),
    "empty-request-first": Step((0, 4), (9, 2), 6),
    "empty-request-between": Step((2, 0, 3), (1, 5, 0), 5),
    "empty-request-last": Step((4, 0), (2, 9), 6),
    "one-row-each": Step((1, 1, 1, 1), (0, 5, 11, 40), 4),
    "large-positions": Step((2, 1), (1_000_000, 262_143), 3),
}


def _layout(step: Step, *, strided: bool = False) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        query = _index(step.query)
        return {
            "query_lens": draws.strided(query) if strided else query,
            "context_lens": _index(step.context),
            "num_rows": step.num_rows,
        }

    return build


declare(state.row_layout, {name: _layout(step) for name, step in _STEPS.items()})
declare(state.row_layout, {"strided": _layout(_STEPS["control"], strided=True)})

_WINDOW = 4


def _window(
    step: Step,
    *,
    kind: StepKind,
    ring: int = 6,
    floors: tuple[int, ...] | None = None,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        num_seqs = len(step.query)
        # Persistent slots need not be in order and may leave gaps.
        slots = torch.randperm(num_seqs + 2, generator=generator)[:num_seqs]
        return {
            "rows": step.layout(),
            "query_lens": _index(step.query),
            "context_lens": _index(step.context),
            "seq_slots": slots,
            "floors": _index(floors or (0,) * num_seqs),
            "kind": kind,
            "window": _WINDOW,
            "ring": ring,
        }

    return build


_EDGES = Step((1, 1, 1, 1, 1), (0, _WINDOW - 2, _WINDOW - 1, _WINDOW, 5), 6)
declare(
    state.window_plan,
    {f"prefill,{name}": _window(step, kind=StepKind.PREFILL) for name, step in _STEPS.items()},
)
declare(
    state.window_plan,
    {
        "decode": _window(_STEPS["one-row-each"], kind=StepKind.DECODE),
        "decode,n=0": _window(_STEPS["n=0"], kind=StepKind.DECODE),
        "decode,nothing-valid": _window(_STEPS["nothing-valid"], kind=StepKind.DECODE),
        "decode,drafts": _window(Step((2, 2, 1), (0, 5, 20), 6), kind=StepKind.DECODE),
        "decode,around-the-window": _window(_EDGES, kind=StepKind.DECODE),
        "decode,ring=window": _window(_STEPS["one-row-each"], kind=StepKind.DECODE, ring=_WINDOW),
        "decode,floors": _window(
            _STEPS["one-row-each"], kind=StepKind.DECODE, floors=(0, 4, 11, 39)
        ),
        "decode,large-positions": _window(_STEPS["large-positions"], kind=StepKind.DECODE),
        "empty": _window(_STEPS["nothing-valid"], kind=StepKind.EMPTY),
        "prefill,around-the-window": _window(_EDGES, kind=StepKind.PREFILL),
        "prefill,chunk-around-the-ring": _window(
            Step((5, 6, 7), (0, 3, 20), 18), kind=StepKind.PREFILL
        ),
        "prefill,floors": _window(_STEPS["control"], kind=StepKind.PREFILL, floors=(0, 9, 12)),
    },
)


def _compress(step: Step, *, ratio: int, block_size: int = 4, pending: int = 3) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        num_seqs = len(step.query)
        longest = max(q + c for q, c in zip(step.query, step.context, strict=True))
        columns = max(1, -(-longest // block_size))
        blocks = torch.arange(num_seqs * columns).flip(0).view(num_seqs, columns)
        return {
            "rows": step.layout(),
            "query_lens": _index(step.query),
            "seq_slots": torch.randperm(num_seqs + 2, generator=generator)[:num_seqs],
            "block_table": blocks,
            "ratio": ratio,
            "block_size": block_size,
            "pending_ring": pending,
        }

    return build


_SHORT = {name: step for name, step in _STEPS.items() if name != "large-positions"}
declare(
    state.compress_plan,
    {f"ratio=1,{name}": _compress(step, ratio=1) for name, step in _SHORT.items()},
)
declare(
    state.compress_plan,
    {f"ratio=2,{name}": _compress(step, ratio=2) for name, step in _SHORT.items()},
)
_PAIRS = Step((1, 1, 1, 2, 2), (0, 1, 2, 0, 1), 7)
declare(
    state.compress_plan,
    {
        "ratio=2,around-a-pair": _compress(_PAIRS, ratio=2),
        "ratio=2,chunk-longer-than-ring": _compress(Step((7,), (2,), 7), ratio=2, pending=2),
        "ratio=2,one-entry-per-block": _compress(_STEPS["control"], ratio=2, block_size=2),
        "ratio=1,one-entry-per-block": _compress(_STEPS["control"], ratio=1, block_size=1),
        "ratio=2,large-positions": _compress(
            Step((2, 1), (1_000_000, 262_143), 3), ratio=2, block_size=1 << 18
        ),
    },
)
