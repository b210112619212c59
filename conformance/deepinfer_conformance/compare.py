"""Every comparison kind of the contracts: one output against its truth, and a verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.device.backend import CacheKind
from deepinfer.device.comparison import (
    Close,
    Codes,
    Comparison,
    Distribution,
    Exact,
    Product,
    SelectionSet,
    Ulp,
)
from deepinfer_conformance.selections import Order, compare_selection
from deepinfer_conformance.verdict import Verdict, place, shape_verdict

# Product bounds are those of bf16 outputs, whose last rounding flips. fp32 outputs have 16 more
# bits and no such flips; half of the gain is kept as slack for the order of summation.
_FP32_SHARE = 2.0**-8
_MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7}
# Largest step between neighbouring values of a group, relative to the group's largest value.
_CODE_STEPS = {
    CacheKind.WINDOW: (32, 1.0 / 7.0),
    CacheKind.COMPRESSED: (16, 0.7),
    CacheKind.INDEX: (32, 0.7),
}


@dataclass(frozen=True, slots=True)
class Context:
    """What a comparison needs besides the two tensors.

    Attributes:
        loose_rows: rows that the contract leaves unspecified.
        scores: [T, n] scores behind a selection.
        order: order a selection has to be in.
        cache: kind of a quantised cache whose values are compared; None for fp32 values.
    """

    loose_rows: tuple[int, ...] = ()
    scores: Tensor | None = None
    order: Order = Order.ASCENDING
    cache: CacheKind | None = None


def compare(kind: Comparison, value: Tensor, truth: Tensor, context: Context) -> Verdict:
    """Judge one output.

    Args:
        kind: comparison of the contract.
        value: what the backend gave, on the CPU.
        truth: what it should be; float64 stands for a float dtype of the backend's choice.
        context: loose rows, scores, record.

    Returns:
        The verdict; a wrong shape or dtype fails whatever the kind.
    """
    wrong = shape_verdict(value, truth)
    if wrong is not None:
        return wrong
    if truth.dtype is torch.float64:
        truth = truth.to(value.dtype)
    if context.loose_rows:
        kept = torch.ones(value.shape[0], dtype=torch.bool)
        kept[list(context.loose_rows)] = False
        value, truth = value[kept], truth[kept]
        scores = None if context.scores is None else context.scores[kept]
    else:
        scores = context.scores
    if isinstance(kind, SelectionSet):
        if scores is None:
            raise ValueError("a SelectionSet comparison needs the scores behind the selection")
        return compare_selection(kind, value, truth, scores=scores, order=context.order)
    if isinstance(kind, Exact | Distribution):
        return _exact(value, truth)
    wrong = _non_finite(value, truth)
    if wrong is not None:
        return wrong
    finite = torch.isfinite(truth)
    x, ref = value.double().where(finite, 0.0), truth.double().where(finite, 0.0)
    if isinstance(kind, Codes) and context.cache is not None:
        return _codes(kind, x, ref, context.cache)
    if isinstance(kind, Product):
        return _product(kind, x, ref, share=_FP32_SHARE if value.dtype is torch.float32 else 1.0)
    if isinstance(kind, Close):
        return _close(kind, x, ref)
    return _ulp(kind if isinstance(kind, Ulp) else Ulp(), x, ref, dtype=value.dtype)


def _exact(value: Tensor, truth: Tensor) -> Verdict:
    if value.dtype.is_floating_point and value.dtype.itemsize == 1:
        # Quantised codes: the sign of zero and the code of NaN count.
        value, truth = value.view(torch.uint8), truth.view(torch.uint8)
    differs = value != truth
    if value.dtype.is_floating_point:
        differs &= ~(value.isnan() & truth.isnan())
    count = int(differs.sum())
    return Verdict(count == 0, count, 0.0, place(differs.double(), value, truth))


def _non_finite(value: Tensor, truth: Tensor) -> Verdict | None:
    """Infinities and NaN must stand where the truth has them."""
    same = torch.isfinite(value) == torch.isfinite(truth)
    same &= torch.isfinite(truth) | (value == truth) | (value.isnan() & truth.isnan())
    if bool(same.all()):
        return None
    return Verdict(False, math.inf, 0.0, place((~same).double(), value, truth))


def _worst(excess: Tensor) -> float:
    return float(excess.max()) if excess.numel() else 0.0


def _close(kind: Close, x: Tensor, ref: Tensor) -> Verdict:
    ratio = (x - ref).abs() / (kind.atol + kind.rtol * ref.abs())
    return Verdict(_worst(ratio) <= 1.0, _worst(ratio), 1.0, place(ratio, x, ref))


def _row_rms(ref: Tensor) -> Tensor:
    return ref.square().mean(-1, keepdim=True).sqrt() if ref.dim() else ref.abs()


def _ulp(kind: Ulp, x: Tensor, ref: Tensor, *, dtype: torch.dtype) -> Verdict:
    """Distance in units of the last place of the truth, after the absolute slack."""
    bits = _MANTISSA_BITS[dtype]
    _, exponent = torch.frexp(ref)
    unit = torch.ldexp(torch.ones_like(ref), (exponent - 1).clamp_min(-126) - bits)
    excess = ((x - ref).abs() - kind.atol_row_rms * _row_rms(ref)).clamp_min(0.0) / unit
    # A small tensor may have one flipped rounding, too.
    allowed = max(1, math.floor((1.0 - kind.share_1ulp) * excess.numel()))
    passed = _worst(excess) <= 2.0 and int((excess > 1.0).sum()) <= allowed
    return Verdict(passed, _worst(excess), 2.0, place(excess, x, ref))


def _product(kind: Product, x: Tensor, ref: Tensor, *, share: float) -> Verdict:
    """The worst of the three measures, each in units of its bound."""
    difference = x - ref
    norm = float(ref.square().sum())
    if norm == 0.0:
        count = int((difference != 0).sum())
        return Verdict(count == 0, count, 0.0, place(difference.abs(), x, ref))
    frobenius = math.sqrt(float(difference.square().sum()) / norm)
    row = ref.abs().amax(-1, keepdim=True)
    relative = torch.where(
        difference == 0, 0.0, difference.abs() / row.clamp_min(torch.finfo(torch.float64).tiny)
    )
    diff = float(difference.square().sum()) / (float(x.square().sum()) + norm)
    worst = max(
        frobenius / (kind.max_frobenius * share),
        _worst(relative) / (kind.max_error_row * share),
        diff / (kind.max_diff * share * share),
    )
    return Verdict(worst <= 1.0, worst, 1.0, place(relative, x, ref))


def _codes(kind: Codes, x: Tensor, ref: Tensor, cache: CacheKind) -> Verdict:
    """Share of elements that differ; each by one code of its group at most."""
    length, step = _CODE_STEPS[cache]
    largest = ref.unflatten(-1, (-1, length)).abs().amax(-1, keepdim=True)
    steps = (x - ref).abs().unflatten(-1, (-1, length)) / (step * largest).clamp_min(1e-300)
    steps = steps.flatten(-2)
    count = int((x != ref).sum())
    # A small tensor may have one crossed tie, too.
    allowed = max(1, math.floor(kind.max_share * x.numel()))
    passed = count <= allowed and _worst(steps) <= 1.0
    return Verdict(passed, float(count), float(allowed), place(steps, x, ref))


def chi_square(counts: Tensor, probabilities: Tensor, false_alarm: float) -> Verdict:
    """Draw counts against exact probabilities.

    Args:
        counts: [V] draws of each token.
        probabilities: [V] float64, sum 1; a token of probability 0 must never be drawn.
        false_alarm: probability that a right sampler is refused.

    Returns:
        The verdict; error is the p-value's complement, in units that grow with the misfit.
    """
    possible = probabilities > 0
    if int(counts[~possible].sum()):
        where = f"token {int((counts * ~possible).argmax())} has probability 0 and was drawn"
        return Verdict(False, math.inf, 1.0, where)
    expected = probabilities[possible] * counts.sum()
    statistic = ((counts[possible] - expected).square() / expected).sum()
    freedom = torch.tensor((int(possible.sum()) - 1) / 2.0, dtype=torch.float64)
    if float(freedom) == 0.0:
        return Verdict(True, 0.0, 1.0, "one possible token")
    p_value = float(torch.special.gammaincc(freedom, statistic.double() / 2.0))
    error = math.log(max(p_value, 1e-300)) / math.log(false_alarm)
    return Verdict(p_value >= false_alarm, error, 1.0, f"p = {p_value:.3g}")
