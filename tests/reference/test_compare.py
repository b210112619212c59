"""Each comparison kind accepts what a right backend may give and rejects a planted wrong value."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepinfer.device.backend import CacheKind
from deepinfer.device.comparison import (
    ATTENTION,
    PROJECTION,
    Close,
    Codes,
    Comparison,
    Distribution,
    Exact,
    Product,
    SelectionSet,
    Ulp,
)
from deepinfer.device.formats import quantize_a8, round_trip_a8
from deepinfer_conformance.compare import Context, chi_square, compare
from deepinfer_conformance.selections import Order

_KINDS: tuple[Comparison, ...] = (
    Exact(), Codes(), Ulp(), Close(), Product(), PROJECTION, ATTENTION, Distribution(),
)  # fmt: skip


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _passes(kind: Comparison, value: Tensor, truth: Tensor, context: Context | None = None) -> bool:
    return compare(kind, value, truth, context or Context()).passed


@pytest.mark.parametrize("kind", _KINDS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_values_pass(kind: Comparison, dtype: torch.dtype) -> None:
    truth = _normal(4, 32).to(dtype)
    assert _passes(kind, truth.clone(), truth)


@pytest.mark.parametrize("kind", _KINDS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_planted_value_is_rejected(kind: Comparison, dtype: torch.dtype) -> None:
    truth = _normal(4, 32).to(dtype)
    wrong = truth.clone()
    wrong[2, 7] += 0.25
    assert not _passes(kind, wrong, truth)


@pytest.mark.parametrize("kind", _KINDS, ids=repr)
@pytest.mark.parametrize("planted", [math.nan, math.inf])
def test_one_planted_non_finite_value_is_rejected(kind: Comparison, planted: float) -> None:
    truth = _normal(4, 32)
    wrong = truth.clone()
    wrong[0, 0] = planted
    assert not _passes(kind, wrong, truth)


@pytest.mark.parametrize("kind", _KINDS, ids=repr)
def test_wrong_shape_is_rejected(kind: Comparison) -> None:
    assert not _passes(kind, _normal(4, 31), _normal(4, 32))


def test_wrong_dtype_is_rejected() -> None:
    truth = torch.arange(4)
    assert not _passes(Exact(), truth.int(), truth)


def test_verdict_names_place_and_both_values() -> None:
    truth = torch.zeros(2, 3, dtype=torch.int64)
    wrong = truth.clone()
    wrong[1, 2] = 9
    verdict = compare(Exact(), wrong, truth, Context())
    assert verdict.error == 1
    assert verdict.where == "at [1, 2]: 9, expected 0"


def test_loose_rows_are_not_looked_at() -> None:
    truth = _normal(3, 8)
    wrong = truth.clone()
    wrong[2] = math.nan
    assert _passes(Ulp(), wrong, truth, Context(loose_rows=(2,)))
    assert not _passes(Ulp(), wrong, truth, Context(loose_rows=(1,)))


def test_exact_sees_the_sign_of_a_quantised_zero() -> None:
    truth = torch.zeros(4).to(torch.float8_e4m3fn)
    wrong = torch.full((4,), -0.0).to(torch.float8_e4m3fn)
    assert not _passes(Exact(), wrong, truth)


def test_ulp_allows_one_step_and_rejects_three() -> None:
    truth = torch.ones(64, 32, dtype=torch.bfloat16)
    one, three = truth.clone(), truth.clone()
    one[3, 3] += 2.0**-7
    three[3, 3] += 3 * 2.0**-7
    assert _passes(Ulp(), one, truth)
    assert not _passes(Ulp(), three, truth)


def test_ulp_rejects_many_values_two_steps_away() -> None:
    truth = torch.ones(64, 32, dtype=torch.bfloat16)
    wrong = truth.clone()
    wrong[:8] += 2 * 2.0**-7
    assert not _passes(Ulp(), wrong, truth)


def test_close_bound_is_relative() -> None:
    truth = torch.tensor([1000.0])
    assert _passes(Close(rtol=1e-3, atol=0.0), truth + 0.9, truth)
    assert not _passes(Close(rtol=1e-3, atol=0.0), truth + 1.1, truth)


def test_close_wants_infinities_where_the_truth_has_them() -> None:
    truth = torch.tensor([1.0, -math.inf])
    assert _passes(Close(), truth.clone(), truth)
    assert not _passes(Close(), torch.tensor([1.0, -1e30]), truth)


def test_product_allows_flipped_roundings() -> None:
    exact = _normal(64, 64).double()
    noise = 1.0 + 1e-6 * _normal(64, 64, seed=1).double()
    truth, value = exact.bfloat16(), (exact * noise).bfloat16()
    assert _passes(Product(), value, truth)


@pytest.mark.parametrize("factor", [1.01, 2.0, -1.0])
def test_product_rejects_a_wrong_scale(factor: float) -> None:
    truth = _normal(8, 64).bfloat16()
    assert not _passes(Product(), (truth * factor).bfloat16(), truth)


def test_product_is_tighter_in_fp32() -> None:
    truth = _normal(8, 64)
    value = truth.bfloat16().float()
    assert not _passes(Product(), value, truth)
    assert not _passes(ATTENTION, value, truth)


def test_product_of_zeros_must_be_zero() -> None:
    truth = torch.zeros(2, 8)
    assert not _passes(Product(), truth + 1e-6, truth)


def test_codes_allow_one_neighbouring_code() -> None:
    truth = round_trip_a8(_normal(8, 64))
    codes, scale = quantize_a8(truth)
    stepped = codes.view(torch.uint8).clone()
    stepped[3, 5] ^= 1
    from_codes = stepped.view(torch.float8_e4m3fn).float()
    value = from_codes * 2.0 ** (scale.float().repeat_interleave(32, 1) - 127.0)
    assert _passes(Codes(), value, truth, Context(cache=CacheKind.WINDOW))


def test_codes_reject_many_neighbouring_codes() -> None:
    truth = round_trip_a8(_normal(8, 64))
    value = truth.clone()
    value[:, :2] *= 1.125
    assert not _passes(Codes(), value, truth, Context(cache=CacheKind.WINDOW))


@pytest.mark.parametrize("kind", CacheKind)
def test_codes_reject_a_value_far_off(kind: CacheKind) -> None:
    truth = round_trip_a8(_normal(8, 64))
    value = truth.clone()
    value[0, 0] = 8.0
    assert not _passes(Codes(), value, truth, Context(cache=kind))


_SCORES = torch.tensor([[5.0, 1.0, 3.0, 3.0, -math.inf, 0.5]])


@pytest.mark.parametrize(
    ("chosen", "right"),
    [
        ([0, 2, -1], True),
        ([0, 3, -1], True),  # an equal score at the boundary
        ([0, 1, -1], False),  # a worse one
        ([2, 3, -1], False),  # the best is missing
        ([2, 0, -1], False),  # not ascending
        ([0, -1, 2], False),  # padding in between
        ([0, -1, -1], False),  # too few
        ([0, 2, 3], False),  # too many
        ([0, 0, -1], False),  # twice
        ([0, 4, -1], False),  # masked
        ([0, 9, -1], False),  # out of range
    ],
)
def test_selection_is_a_set_up_to_ties(chosen: list[int], right: bool) -> None:
    value, truth = torch.tensor([chosen]), torch.tensor([[0, 2, -1]])
    assert _passes(SelectionSet(), value, truth, Context(scores=_SCORES)) is right


@pytest.mark.parametrize(("chosen", "right"), [([0, 3, 2], True), ([2, 0, 3], False)])
def test_selection_best_first(chosen: list[int], right: bool) -> None:
    context = Context(scores=_SCORES, order=Order.BEST_FIRST)
    value, truth = torch.tensor([chosen]), torch.tensor([[0, 2, 3]])
    assert _passes(SelectionSet(), value, truth, context) is right


def test_selection_without_scores_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="needs the scores"):
        compare(SelectionSet(), torch.zeros(1, 1), torch.zeros(1, 1), Context())


def _draws(probabilities: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.multinomial(probabilities, 100_000, replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=len(probabilities))


def test_chi_square_passes_the_right_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    assert chi_square(_draws(probabilities), probabilities, 1e-6).passed


def test_chi_square_rejects_a_slightly_wrong_distribution() -> None:
    drawn = torch.tensor([0.52, 0.28, 0.15, 0.05], dtype=torch.float64)
    claimed = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    assert not chi_square(_draws(drawn), claimed, 1e-6).passed


def test_chi_square_rejects_an_impossible_token() -> None:
    claimed = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    assert not chi_square(torch.tensor([500, 499, 1]), claimed, 1e-6).passed
