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
from deepinfer.device.ops.sampling import SampleParams, SampleWork
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

_DRAFTS, _TARGET_VOCAB = 4, 19


def _verify(
    query: tuple[int, ...] = (5, 3, 1, 5),
    *,
    temperature: tuple[float, ...] = (0.0, 0.9, 1.3),
    work: SampleWork = SampleWork.SORTED,
    drafted: tuple[int, ...] | None = None,
    num_rows: int | None = None,
    one_hot: bool = False,
    noise: float = 0.7,
    edit: Edit = torch.clone,
    edit_drafts: Edit = torch.clone,
) -> Builder:
    """Requests that verify query - 1 drafts each; a drafter's logits are the target's and noise.

    Args:
        query: rows of each request.
        temperature: of the requests, over and over.
        work: what the rows need; nothing is cut below SORTED.
        drafted: drafts of each request before the first -1; None: all.
        num_rows: capacity in rows; None: no padding.
        one_hot: the drafts are certain, and there are no logits of theirs.
        noise: how far the drafter is from the target; 0: it is the target.
        edit: of the logits.
        edit_drafts: of the draft logits.
    """

    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        num_seqs, count = len(query), num_rows or sum(query)
        starts = torch.nn.functional.pad(_index(query).cumsum(0), (1, 0))
        owner = torch.arange(num_seqs).repeat_interleave(_index(query))
        owner = torch.nn.functional.pad(owner, (0, count - len(owner)))
        logits = 2.0 * draws.normal(generator, count, _TARGET_VOCAB)
        rows = (starts[:-1, None] + torch.arange(_DRAFTS)).clamp_max(max(0, count - 1))
        shape = (num_seqs, _DRAFTS, _TARGET_VOCAB)
        proposed = logits[rows] if count else torch.zeros(shape)
        proposed = proposed + noise * draws.normal(generator, *shape)
        heat = torch.tensor([temperature[seq % len(temperature)] for seq in range(num_seqs)])
        # What a greedy or a sampling drafter would give.
        scale = torch.where(heat > 0, heat, 1e-3).view(-1, 1, 1)
        gumbel = -torch.log(-torch.log(torch.rand(shape, generator=generator)))
        draft_ids = (proposed / scale + (0.0 if one_hot else 1.0) * gumbel).argmax(-1)
        for seq, have in enumerate(drafted or ()):
            draft_ids[seq, have:] = -1
        row = torch.arange(count)
        cuts = work is SampleWork.SORTED
        params = SampleParams(
            temperature=heat[owner],
            top_k=torch.tensor([0, 9])[row % 2] if cuts else torch.zeros_like(row),
            top_p=torch.tensor([1.0, 0.9, 1.0])[row % 3] if cuts else torch.ones(count),
            min_p=torch.tensor([0.0, 0.0, 0.0, 0.05])[row % 4],
            seeds=draws.integers(generator, 2**62, num_seqs)[owner],
            sample_index=owner % 2,
            positions=7 + row,
        )
        return {
            "logits": edit(logits),
            "params": params,
            "work": work,
            "query_starts": starts,
            "draft_ids": draft_ids,
            "draft_logits": None if one_hot else edit_drafts(proposed),
        }

    return build


declare(
    spec.verify_drafts,
    {
        "control": _verify(),
        "n=0": _verify((0, 0)),
        "n=1": _verify((1,)),
        "greedy": _verify(temperature=(0.0,), work=SampleWork.GREEDY, one_hot=True, noise=0.3),
        "greedy-rejected": _verify(temperature=(0.0,), work=SampleWork.GREEDY, one_hot=True),
        "greedy-among-sampling": _verify((5,) * 6, work=SampleWork.RANDOM),
        "random": _verify((5,) * 8, temperature=(1.0, 0.7), work=SampleWork.RANDOM),
        "drafter-is-target": _verify((5,) * 4, temperature=(1.0,), work=SampleWork.RANDOM, noise=0),
        "drafter-far-off": _verify((5,) * 4, temperature=(1.0,), noise=9.0),
        "one-hot": _verify((5,) * 6, temperature=(1.0, 0.6), one_hot=True),
        "one-hot-far-off": _verify((5,) * 4, temperature=(1.0,), one_hot=True, noise=9.0),
        "ragged": _verify((2, 5, 0, 1, 4)),
        "few-drafts": _verify((5, 5, 3, 5), drafted=(4, 2, 0, 1)),
        "padding-rows": _verify((4, 1, 5), num_rows=17),
        "low-temperature": _verify((5,) * 3, temperature=(1e-4,), work=SampleWork.RANDOM),
        "strided": _verify(edit=draws.strided, edit_drafts=draws.strided),
    },
)
declare_sample(
    spec.verify_drafts,
    # The last row, a bonus row, holds NaN; its request still accepts what comes before.
    Sample("nan-row", _verify(edit=draws.with_nan_row), loose_rows={"token_ids": (3,)}),
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
