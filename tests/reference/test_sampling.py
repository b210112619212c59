"""Choosing tokens: filters against plain Python, draws against exact probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.device.ops.sampling import Purpose, SampleParams, SampleWork
from deepinfer_conformance.naive import sampling as naive
from deepinfer_reference.ops.sampling import filter_logits, finite_rows, sample_tokens

INF = math.inf


def _params(
    num_rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> SampleParams:
    """Rows that differ only in their position."""
    return SampleParams(
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.full((num_rows,), top_k),
        top_p=torch.full((num_rows,), top_p),
        min_p=torch.full((num_rows,), min_p),
        seeds=torch.full((num_rows,), 1234),
        sample_index=torch.zeros(num_rows, dtype=torch.int64),
        positions=torch.arange(num_rows),
    )


def _kept(logits: list[float], **controls: float) -> list[int]:
    """Ids that a filter keeps."""
    params = _params(1, **controls)  # type: ignore[arg-type]
    filtered = filter_logits(torch.tensor([logits]), params, SampleWork.SORTED)
    return [token for token, value in enumerate(filtered[0].tolist()) if value > -INF]


def test_temperature_zero_takes_the_best_and_lowest_of_equal_ids() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0]])
    for work in SampleWork:
        assert sample_tokens(logits, _params(1, temperature=0.0), work).tolist() == [1]


def test_temperature_divides_the_distance_to_the_best() -> None:
    logits = torch.tensor([[3.0, 1.0, -INF]])
    filtered = filter_logits(logits, _params(1, temperature=0.5), SampleWork.RANDOM)
    assert filtered.tolist() == [[0.0, -4.0, -INF]]


def test_top_k_keeps_the_k_best() -> None:
    assert _kept([1.0, 4.0, 3.0, 2.0], top_k=2) == [1, 2]


def test_top_k_takes_the_lowest_id_among_equals() -> None:
    assert _kept([2.0, 3.0, 2.0, 2.0], top_k=2) == [0, 1]


def test_many_equal_logits_are_taken_in_order_of_id() -> None:
    assert _kept([0.0] * 3000, top_k=5) == [0, 1, 2, 3, 4]


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    assert _kept([1.0, 2.0], top_k=9) == [0, 1]


def test_top_p_keeps_the_shortest_run_that_reaches_it() -> None:
    logits = [math.log(p) for p in (0.1, 0.5, 0.25, 0.15)]
    assert _kept(logits, top_p=0.4) == [1]
    assert _kept(logits, top_p=0.6) == [1, 2]
    assert _kept(logits, top_p=0.8) == [1, 2, 3]
    assert _kept(logits, top_p=0.95) == [0, 1, 2, 3]


def test_a_run_that_reaches_top_p_exactly_is_not_extended() -> None:
    assert _kept([0.0] * 4, top_p=0.5) == [0, 1]


def test_top_p_of_one_keeps_even_the_least_likely() -> None:
    assert _kept([0.0, -90.0, -100.0], top_p=1.0) == [0, 1, 2]


def test_top_p_of_zero_keeps_one_token_of_lowest_id() -> None:
    assert _kept([1.0, 2.0, 2.0], top_p=0.0) == [1]


def test_top_p_counts_only_what_top_k_left() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # Of the two best, the first holds 4/7 > 0.5; of all four it would not.
    assert _kept(logits, top_k=2, top_p=0.5) == [0]
    assert _kept(logits, top_p=0.5) == [0, 1]


def test_min_p_is_relative_to_the_best() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.2)]
    assert _kept(logits, min_p=0.5) == [0, 1]
    assert _kept(logits, min_p=1.0) == [0]


def test_filters_see_the_distribution_after_temperature() -> None:
    logits = [0.0, -1.0]
    assert _kept(logits, min_p=0.5) == [0]
    assert _kept(logits, min_p=0.5, temperature=2.0) == [0, 1]


_ROWS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([-INF, -3.0, -1.5, 0.0, 0.25, 2.0, 7.0]), min_size=6, max_size=6)
        .map(lambda row: [1.0, *row]),
        st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        st.integers(0, 9),
        st.sampled_from([0.0, 0.31, 0.77, 0.93, 1.0]),
        st.sampled_from([0.0, 0.07, 0.4]),
        st.integers(-(2**63), 2**63 - 1),
        st.integers(0, 3),
        st.integers(0, 1 << 20),
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip
_Row = tuple[list[float], float, int, float, float, int, int, int]


def _batch(rows: list[_Row]) -> tuple[Tensor, SampleParams]:
    logits, temperature, top_k, top_p, min_p, seeds, index, positions = zip(*rows, strict=True)
    return torch.tensor(logits), SampleParams(
        torch.tensor(temperature),
        torch.tensor(top_k),
        torch.tensor(top_p),
        torch.tensor(min_p),
        torch.tensor(seeds, dtype=torch.int64),
        torch.tensor(index),
        torch.tensor(positions),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows=_ROWS)
def test_filters_agree_with_plain_python(rows: list[_Row]) -> None:
    logits, params = _batch(rows)
    expected = naive.filter_logits(logits, params, SampleWork.SORTED)
    found = filter_logits(logits, params, SampleWork.SORTED)
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-21, atol=1e-6)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=_ROWS)
def test_tokens_agree_with_plain_python(rows: list[_Row]) -> None:
    logits, params = _batch(rows)
    for purpose in (Purpose.SAMPLE, Purpose.BONUS):
        expected = naive.sample_tokens(logits, params, SampleWork.SORTED, purpose=purpose)
        found = sample_tokens(logits, params, SampleWork.SORTED, purpose=purpose)
        assert torch.equal(found, expected)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=_ROWS, data=st.data())
def test_a_row_does_not_depend_on_its_batch(rows: list[_Row], data: st.DataObject) -> None:
    logits, params = _batch(rows)
    order = data.draw(st.permutations(range(len(rows))))
    subset = torch.tensor(order[: data.draw(st.integers(1, len(rows)))])
    shuffled = SampleParams(*(column[subset] for column in params))
    whole = sample_tokens(logits, params, SampleWork.SORTED)
    part = sample_tokens(logits[subset], shuffled, SampleWork.SORTED)
    assert torch.equal(part, whole[subset])


@pytest.mark.parametrize("vocab_size", [7, 1027, 4096])
def test_filtered_bits_do_not_depend_on_the_number_of_rows(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(9, vocab_size, generator=generator) * 4
    params = _params(9, temperature=0.7, top_k=50, top_p=0.9, min_p=0.01)
    whole = filter_logits(logits, params, SampleWork.SORTED)
    for row in (0, 4, 8):
        alone = SampleParams(*(column[row : row + 1] for column in params))
        assert torch.equal(
            filter_logits(logits[row : row + 1], alone, SampleWork.SORTED), whole[row : row + 1]
        )


@pytest.mark.parametrize(
    "controls",
    [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.15}],
    ids=["plain", "temperature", "top_k", "top_p", "min_p"],
)
def test_draws_follow_the_exact_probabilities(controls: dict[str, float]) -> None:
    logits = torch.tensor([1.0, 0.2, -0.5, 2.0, -2.0, 1.4, 0.0, -INF])
    num_draws = 100_000
    params = _params(num_draws, **controls)  # type: ignore[arg-type]
    tokens = sample_tokens(logits.expand(num_draws, -1), params, SampleWork.SORTED)
    one = SampleParams(*(column[:1] for column in params))
    kept = naive.filter_logits(logits.unsqueeze(0), one, SampleWork.SORTED)
    expected = torch.softmax(kept[0], -1) * num_draws
    counts = tokens.bincount(minlength=8).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = ((counts - expected).square() / expected)[possible].sum().item()
    # 1e-6 quantile of chi-square with 7 degrees of freedom, the most that occur here.
    assert statistic < 40.6


def test_consecutive_positions_draw_independently() -> None:
    tokens = sample_tokens(torch.zeros(40_000, 2), _params(40_000), SampleWork.RANDOM)
    agree = (tokens[1:] == tokens[:-1]).double().mean().item()
    assert abs(agree - 0.5) < 0.0125  # five standard deviations


def test_answers_of_one_request_differ_and_repeat() -> None:
    logits = torch.zeros(4, 512)
    params = _params(4)._replace(
        sample_index=torch.arange(4), positions=torch.full((4,), 20, dtype=torch.int64)
    )
    first = sample_tokens(logits, params, SampleWork.RANDOM)
    assert first.unique().numel() == 4
    assert torch.equal(sample_tokens(logits, params, SampleWork.RANDOM), first)


def test_purposes_draw_from_different_streams() -> None:
    logits = torch.zeros(1, 4096)
    tokens = {
        int(sample_tokens(logits, _params(1), SampleWork.RANDOM, purpose=purpose))
        for purpose in Purpose
    }
    assert len(tokens) == len(Purpose)


def test_less_work_draws_the_same_token_where_it_suffices() -> None:
    logits = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    params = _params(16, min_p=0.05)
    assert torch.equal(
        sample_tokens(logits, params, SampleWork.RANDOM),
        sample_tokens(logits, params, SampleWork.SORTED),
    )


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_unusable_rows_give_some_id_and_leave_neighbours_alone(bad: float) -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    whole = sample_tokens(logits, _params(3, top_p=0.9), SampleWork.SORTED)
    logits[1] = bad
    tokens = sample_tokens(logits, _params(3, top_p=0.9), SampleWork.SORTED)
    assert tokens[[0, 2]].tolist() == whole[[0, 2]].tolist()
    assert 0 <= int(tokens[1]) < 8


def test_zero_rows_are_legal() -> None:
    for work in SampleWork:
        assert sample_tokens(torch.empty(0, 5), _params(0), work).shape == (0,)
        assert filter_logits(torch.empty(0, 5), _params(0), work).shape == (0, 5)


def test_finite_rows_refuses_nan_infinity_and_nothing_left() -> None:
    rows = [[0.0, 1.0], [0.0, -INF], [math.nan, 0.0], [INF, 0.0], [-INF, -INF], [math.nan, -INF]]
    expected = [True, True, False, False, False, False]
    assert finite_rows(torch.tensor(rows)).tolist() == expected
    assert naive.finite_rows(torch.tensor(rows)).tolist() == expected
