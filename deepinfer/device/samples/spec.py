"""Samples of the spec family: accepted rows, draft blocks, confidences, admitted drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer.device.errors import ContractError
from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpSpec
from deepinfer.device.ops import spec
from deepinfer.device.samples import draws
from deepinfer.device.samples.canonical import (
    CanonicalEmbedding,
    CanonicalLinear,
    ForeignHandle,
)
from deepinfer.device.samples.registry import (
    Arguments,
    Builder,
    ErrorCase,
    Sample,
    declare,
    declare_error,
    declare_sample,
)
from deepinfer.device.samples.state import Step
from deepinfer.device.weights import WeightFormat, stored_from_float

Edit = Callable[[Tensor], Tensor]


def _index(values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _context(step: Step, accepted: tuple[int, ...], *, ring: int = 6) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        num_seqs = len(step.query)
        return {
            "rows": step.layout(),
            "num_accepted": _index(accepted),
            # Persistent slots need not be in order and may leave gaps.
            "seq_slots": torch.randperm(num_seqs + 2, generator=generator)[:num_seqs],
            "ring": ring,
        }

    return build


_VERIFIED = Step((4, 4, 1, 4), (0, 7, 12, 30), 13)
declare(
    spec.draft_context,
    {
        "control": _context(_VERIFIED, (3, 1, 1, 4)),
        "n=0": _context(Step((0, 0), (4, 0), 0), (0, 0)),
        "n=1": _context(Step((1,), (0,), 1), (1,)),
        "nothing-valid": _context(Step((0, 0), (4, 0), 5), (0, 0)),
        "nothing-accepted": _context(_VERIFIED, (0, 0, 0, 0)),
        "padding-rows": _context(Step((4, 2), (3, 9), 9), (2, 2)),
        "empty-request-between": _context(Step((2, 0, 3), (1, 5, 0), 5), (1, 0, 3)),
        "chunk-around-the-ring": _context(Step((5, 6, 7), (0, 3, 20), 18), (5, 6, 7)),
        "chunk-cut-short": _context(Step((9, 8), (2, 0), 17), (8, 7)),
        "large-positions": _context(Step((2, 1), (1_000_000, 262_143), 3), (1, 1)),
    },
)

_WINDOW, _BLOCK = 4, 3


def _plan(
    anchors: tuple[int, ...] = (9, 2, 30),
    *,
    floors: tuple[int, ...] | None = None,
    valid: tuple[bool, ...] | None = None,
    block_size: int = _BLOCK,
    ring: int = _WINDOW + _BLOCK,
    edit: Edit = torch.clone,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        num_seqs = len(anchors)
        return {
            "anchor_positions": edit(_index(anchors)),
            "seq_slots": torch.randperm(num_seqs + 2, generator=generator)[:num_seqs],
            "floors": _index(floors or (0,) * num_seqs),
            "valid": torch.tensor(valid or (True,) * num_seqs, dtype=torch.bool),
            "block_size": block_size,
            "window": _WINDOW,
            "ring": ring,
        }

    return build


declare(
    spec.draft_plan,
    {
        "control": _plan(),
        "n=0": _plan(()),
        "n=1": _plan((5,)),
        "anchor=0,1,W-1,W,W+1": _plan((0, 1, _WINDOW - 1, _WINDOW, _WINDOW + 1)),
        "padding-requests": _plan(valid=(True, False, True)),
        "nothing-valid": _plan(valid=(False, False, False)),
        "floors": _plan((9, 9, 30), floors=(7, 9, 0)),
        "block=1": _plan(block_size=1),
        "larger-ring": _plan(ring=11),
        "large-positions": _plan((1_000_000, 262_143)),
        "strided": _plan(edit=draws.strided),
    },
)

_VOCAB, _RANK, _WIDTH = 23, 16, 48


def _markov(tokens: tuple[int, ...] = (3, 22, 0, 3), *, edit: Edit = torch.clone) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        table = stored_from_float(draws.normal(generator, _VOCAB, _RANK), WeightFormat.BF16)
        head = draws.matrix(generator, _VOCAB, _RANK, WeightFormat.BF16)
        return {
            "base": edit(4.0 * draws.normal(generator, len(tokens), _VOCAB)),
            "tokens": _index(tokens),
            "embedding": CanonicalEmbedding(table),
            "head": CanonicalLinear((head,)),
        }

    return build


declare(
    spec.markov_step,
    {
        "control": _markov(),
        "n=0": _markov(()),
        "n=1": _markov((7,)),
        "n=17": _markov(tuple(range(17))),
        "first-and-last-id": _markov((0, _VOCAB - 1)),
        "zero-base": _markov(edit=torch.zeros_like),
        "strided": _markov(edit=draws.strided),
    },
)
declare_sample(
    spec.markov_step,
    Sample("nan-row", _markov(edit=draws.with_nan_row), loose_rows={"logits": (3,)}),
)


def _confidence(
    rows: int = 4,
    *,
    temperature: float | None = None,
    fmt: WeightFormat = WeightFormat.BF16,
    edit: Edit = torch.clone,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        dtype = draws.activation_dtype(numerics)
        scales = 0.5 + torch.rand(rows, generator=generator)
        return {
            "hidden": edit(draws.normal(generator, rows, _WIDTH, dtype=dtype)),
            "features": draws.normal(generator, rows, _RANK, dtype=dtype),
            "weight": CanonicalLinear((draws.matrix(generator, 1, _WIDTH + _RANK, fmt),)),
            "temperature": scales if temperature is None else torch.full((rows,), temperature),
        }

    return build


declare(
    spec.draft_confidence,
    {
        "control": _confidence(),
        "n=0": _confidence(0),
        "n=1": _confidence(1),
        "n=17": _confidence(17),
        "temperature=1": _confidence(temperature=1.0),
        "temperature=0.01": _confidence(temperature=0.01),
        "weight=f32": _confidence(fmt=WeightFormat.F32),
        "outlier-channel": _confidence(edit=draws.with_outlier),
        "strided": _confidence(edit=draws.strided),
    },
)
declare_sample(
    spec.draft_confidence,
    Sample(
        "nan-row",
        _confidence(edit=draws.with_nan_row),
        loose_rows={"logit": (3,), "probability": (3,)},
    ),
)


_DRAFTS = 5


def _survival(
    available: tuple[int, ...] = (5, 5, 3, 0, 5, 1, 4),
    *,
    budget: int = 11,
    edit: Edit = torch.clone,
) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        confidences = torch.rand(len(available), _DRAFTS, generator=generator).sqrt()
        return {
            "survival": edit(confidences.cumprod(1)),
            "available": _index(available),
            "budget": _index((budget,)),
        }

    return build


def _coarse(survival: Tensor) -> Tensor:
    """Few different values, so that most of them are ties."""
    return (survival * 3.0).ceil() / 3.0


def _near_floor(survival: Tensor) -> Tensor:
    """Requests that fall below the floor behind their first, second, ... draft."""
    below = torch.arange(_DRAFTS) > torch.arange(len(survival)).unsqueeze(1) % _DRAFTS
    return torch.where(below, spec.SURVIVAL_FLOOR * 0.999, spec.SURVIVAL_FLOOR)


def _lost(survival: Tensor) -> Tensor:
    """NaN from the second draft of the first request on, and in the whole second."""
    result = survival.clone()
    result[0, 1:], result[1] = float("nan"), float("nan")
    return result


_EIGHT = (5,) * 8
declare(
    spec.admit_drafts,
    {
        "control": _survival(),
        "n=0": _survival(()),
        "n=1": _survival((5,), budget=3),
        "n=300": _survival((5, 2, 4) * 100, budget=500),
        "budget=0": _survival(budget=0),
        "budget=1": _survival(budget=1),
        "budget-of-all": _survival(budget=23),
        "budget-beyond-all": _survival(budget=1000),
        "nothing-available": _survival((0, 0, 0)),
        "all-equal": _survival(_EIGHT, budget=19, edit=torch.ones_like),
        "ties": _survival(_EIGHT, budget=13, edit=_coarse),
        "all-zero": _survival(_EIGHT, edit=torch.zeros_like),
        "around-the-floor": _survival(_EIGHT, budget=30, edit=_near_floor),
        "nan": _survival(_EIGHT, budget=30, edit=_lost),
        "strided": _survival(edit=draws.strided),
    },
)


def _foreign(build_rest: Builder, argument: str) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        return {**build_rest(generator, numerics), argument: ForeignHandle(argument)}

    return build


_ERRORS: tuple[tuple[OpSpec[..., Any], str, Builder], ...] = (
    (spec.markov_step, "foreign-embedding", _foreign(_markov(), "embedding")),
    (spec.markov_step, "foreign-head", _foreign(_markov(), "head")),
    (spec.draft_confidence, "foreign-handle", _foreign(_confidence(), "weight")),
)
for _spec, _name, _build in _ERRORS:
    declare_error(_spec, ErrorCase(_name, _build, ContractError, "handle"))
