"""Samples of the state family.

Layouts with empty, short and long requests and padding; corrections with newcomers beside
followers, drafts and limits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.device.numerics import Numerics
from deepinfer.device.ops import state
from deepinfer.device.ops.state import NEWCOMER, RowLayout, StepInputs, StepResults
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

_VOCABULARY, _HISTORY = 500, 3
_NO_LIMIT = 1 << 40


@dataclass(frozen=True, slots=True)
class _Follow:
    """A step built on the host, and the results it goes on from.

    `accepted` has one entry for each result row; `remap` names them. `drafted` is how many drafts
    each request has; None: `max_drafts` of each.
    """

    query: tuple[int, ...]
    context: tuple[int, ...]
    remap: tuple[int, ...]
    accepted: tuple[int, ...] = (0,)
    reached: tuple[int, ...] = (0,)
    max_drafts: int = 0
    limits: tuple[int, ...] | None = None
    num_rows: int | None = None
    drafted: tuple[int, ...] | None = None


def _inputs(step: _Follow, generator: torch.Generator) -> StepInputs:
    num_tokens = sum(step.query)
    ids = draws.integers(generator, _VOCABULARY, num_tokens)
    padding = (step.num_rows or num_tokens) - num_tokens
    history = draws.integers(generator, _VOCABULARY, len(step.query), _HISTORY)
    for row, context in enumerate(step.context):
        history[row, : max(0, _HISTORY - context)] = -1
    return StepInputs(
        torch.nn.functional.pad(ids, (0, padding)),
        _index(step.query),
        _index(step.context),
        history,
    )


def _follow(step: _Follow, *, strided: bool = False) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        num_results, width = len(step.accepted), 1 + step.max_drafts
        host = _inputs(step, generator)
        results = StepResults(
            draws.integers(generator, _VOCABULARY, num_results, width),
            _index(step.accepted),
            _index(step.reached),
            draws.integers(generator, _VOCABULARY, num_results, _HISTORY),
        )
        num_seqs = len(step.query)
        draft_ids = draws.integers(generator, _VOCABULARY, num_seqs, step.max_drafts)
        for seq, count in enumerate(step.drafted or ()):
            draft_ids[seq, count : count + 1] = -1  # what follows is no draft either
        if strided:
            host = StepInputs(*map(draws.strided, host))
            results = StepResults(*map(draws.strided, results))
            draft_ids = draws.strided(draft_ids)
        limits = step.limits or (_NO_LIMIT,) * len(step.query)
        return {
            "host": host,
            "draft_ids": draft_ids,
            "limits": _index(limits),
            "remap": _index(step.remap),
            "results": results,
        }

    return build


_N = NEWCOMER
_CONTROL = _Follow((1, 1, 1, 1), (9, 4, 30, 7), (2, _N, 0, 1), (0, 0, 0), (9, 30, 8))
# Four requests with 1,000 positions each accept 0 to 3 of 3 drafts, and nobody on the host knows.
_PUBLISHED = _Follow((4,) * 4, (1004,) * 4, (0, 1, 2, 3), (0, 1, 2, 3), (1001, 1002, 1003, 1004), 3)
_MIXED = _Follow((6, 2, 6, 1), (20, 3, 50, 9), (1, _N, 0, _N), (5, 2), (47, 15), 5)
declare(
    state.correct_inputs,
    {
        "control": _follow(_CONTROL),
        "published-example": _follow(_PUBLISHED),
        "drafts-and-newcomers": _follow(_MIXED),
        "padding-rows": _follow(replace(_MIXED, num_rows=20)),
        "limit-cuts-drafts": _follow(replace(_MIXED, limits=(49, 4, 16, 9))),
        "limit-reached": _follow(replace(_MIXED, limits=(47, 3, 15, 0))),
        "all-newcomers": _follow(_Follow((3, 1), (0, 12), (_N, _N), max_drafts=2)),
        "few-drafts": _follow(replace(_MIXED, drafted=(2, 0, 5, 1))),
        "no-drafts": _follow(replace(_MIXED, drafted=(0, 0, 0, 0))),
        "n=0": _follow(_Follow((0, 0), (4, 0), (_N, 0))),
        "n=1": _follow(_Follow((1,), (5,), (0,), reached=(5,))),
        "one-follows-two-steps-back": _follow(
            _Follow((1, 1), (8, 6), (3, 0), (0,) * 4, (8, 1, 2, 6))
        ),
        "large-positions": _follow(_Follow((1,), (1_000_000,), (0,), reached=(999_999,))),
        "strided": _follow(_MIXED, strided=True),
    },
)


def _next(
    step: _Follow,
    seqs: tuple[int, ...],
    accepted: tuple[int, ...],
    kind: StepKind = StepKind.DECODE,
    *,
    strided: bool = False,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        inputs = _inputs(step, generator)
        return {
            "inputs": StepInputs(*map(draws.strided, inputs)) if strided else inputs,
            "seqs": _index(seqs),
            "num_accepted": _index(accepted),
            "kind": kind,
        }

    return build


def _rows(query: tuple[int, ...], context: tuple[int, ...], num_rows: int | None = None) -> _Follow:
    return _Follow(query, context, (), num_rows=num_rows)


_ROUND = _rows((6, 2, 6, 1), (20, 3, 50, 0))
_CHUNKS = _rows((5, 1, 2), (0, 0, 9))
declare(
    state.next_inputs,
    {
        "control": _next(_rows((1, 1, 1), (9, 4, 1)), (0, 1, 2), (0, 0, 0)),
        "drafts": _next(_ROUND, (0, 1, 2, 3), (5, 0, 3, 0)),
        "some-sample": _next(_ROUND, (2, 0), (1, 4)),
        "accepted-beyond-the-rows": _next(_ROUND, (1, 3), (5, 5)),
        "past-its-end": _next(_rows((0, 1), (9, 4)), (0, 1), (2, 0)),
        "prefill": _next(_CHUNKS, (0, 1, 2), (0, 0, 0), StepKind.PREFILL),
        "padding-rows": _next(_rows((1, 2), (2, 0), 8), (0, 1), (0, 1)),
        "n=0": _next(_ROUND, (), ()),
        "zero_rows": _next(_rows((0,), (4,)), (0,), (0,)),
        "n=1": _next(_rows((1,), (0,)), (0,), (0,)),
        "strided": _next(_ROUND, (0, 1, 2, 3), (5, 0, 3, 0), strided=True),
    },
)
