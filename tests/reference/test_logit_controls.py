"""Masks, bias, penalties, counts and log probabilities, by hand and against plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepinfer.device.ops.sampling import LogitControls, Penalties, SparseBias, SparseIds
from deepinfer_conformance.naive import sampling as naive
from deepinfer_reference.ops.sampling import apply_controls, count_tokens, token_logprobs

INF = math.inf


def _penalties(
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    *,
    slot: int = 0,
    pending: tuple[int, ...] = (),
) -> Penalties:
    """One row; token 0 was in the prompt, token 1 output twice, token 2 both, once."""
    return Penalties(
        repetition=torch.tensor([repetition]),
        presence=torch.tensor([presence]),
        frequency=torch.tensor([frequency]),
        slots=torch.tensor([slot]),
        output_counts=torch.tensor([[0, 2, 1, 0]], dtype=torch.int32),
        prompt_seen=torch.tensor([[True, False, True, False]]),
        pending=torch.tensor([pending], dtype=torch.int64),
    )


def _controlled(logits: list[float], **controls: object) -> list[float]:
    result = apply_controls(torch.tensor([logits]), LogitControls(**controls))  # type: ignore[arg-type]
    values: list[float] = result[0].tolist()
    return values


def test_no_controls_return_the_logits_themselves() -> None:
    logits = torch.ones(2, 3)
    assert apply_controls(logits, LogitControls()) is logits


def test_tokens_that_are_not_allowed_are_removed() -> None:
    allowed = torch.tensor([[True, False, True]])
    assert _controlled([1.0, 2.0, 3.0], allowed=allowed) == [1.0, -INF, 3.0]


def test_banned_pairs_are_removed_and_padding_is_skipped() -> None:
    banned = SparseIds(torch.tensor([0, -1, 0]), torch.tensor([2, 0, 2]))
    assert _controlled([1.0, 2.0, 3.0], banned=banned) == [1.0, 2.0, -INF]


def test_bias_is_added_and_padding_is_skipped() -> None:
    bias = SparseBias(torch.tensor([0, -1]), torch.tensor([1, 0]), torch.tensor([-100.0, 5.0]))
    assert _controlled([1.0, 2.0], bias=bias) == [1.0, -98.0]


def test_bias_does_not_bring_a_removed_token_back() -> None:
    bias = SparseBias(torch.tensor([0]), torch.tensor([1]), torch.tensor([100.0]))
    allowed = torch.tensor([[True, False]])
    assert _controlled([1.0, 2.0], allowed=allowed, bias=bias) == [1.0, -INF]


def test_repetition_covers_prompt_and_output_and_respects_the_sign() -> None:
    penalties = _penalties(repetition=2.0)
    assert _controlled([4.0, -4.0, 1.0, 3.0], penalties=penalties) == [2.0, -8.0, 0.5, 3.0]


def test_drafts_before_a_row_count_as_output() -> None:
    penalties = _penalties(frequency=1.0, presence=0.5, pending=(3, 1, 3, -1))
    assert _controlled([0.0, 0.0, 0.0, 0.0], penalties=penalties) == [0.0, -3.5, -1.5, -2.5]


def test_presence_covers_the_output_once() -> None:
    penalties = _penalties(presence=0.5)
    assert _controlled([1.0, 1.0, 1.0, 1.0], penalties=penalties) == [1.0, 0.5, 0.5, 1.0]


def test_frequency_grows_with_the_output_count() -> None:
    penalties = _penalties(frequency=0.5)
    assert _controlled([1.0, 1.0, 1.0, 1.0], penalties=penalties) == [1.0, 0.0, 0.5, 1.0]


def test_penalties_come_after_the_bias() -> None:
    bias = SparseBias(torch.tensor([0]), torch.tensor([0]), torch.tensor([3.0]))
    penalties = _penalties(repetition=2.0)
    # (1 + 3) / 2, not 1 / 2 + 3.
    assert _controlled([1.0, 0.0, 0.0, 0.0], bias=bias, penalties=penalties)[0] == 2.0


def test_a_row_without_a_slot_has_no_penalties() -> None:
    penalties = _penalties(2.0, 1.0, 1.0, slot=-1)
    assert _controlled([4.0, 4.0, 4.0, 4.0], penalties=penalties) == [4.0] * 4


def _random_controls(generator: torch.Generator) -> tuple[Tensor, LogitControls]:
    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    controls = LogitControls(
        allowed=uniform(5, 11) < 0.8,
        banned=SparseIds(torch.tensor([0, 4, -1]), torch.tensor([10, 0, 3])),
        bias=SparseBias(
            torch.tensor([1, 1, -1]), torch.tensor([2, 3, 4]), torch.tensor([-7.5, 100.0, 1.0])
        ),
        penalties=Penalties(
            repetition=uniform(5) + 0.5,
            presence=uniform(5) * 4 - 2,
            frequency=uniform(5) * 4 - 2,
            slots=torch.tensor([2, -1, 0, 2, 1]),
            output_counts=(uniform(3, 11) * 4).int(),
            prompt_seen=uniform(3, 11) < 0.3,
            pending=(uniform(5, 4) * 6).long() - 1,
        ),
    )
    return torch.randn(5, 11, generator=generator) * 3, controls


def test_all_controls_agree_with_plain_python_and_leave_the_input_alone() -> None:
    logits, controls = _random_controls(torch.Generator().manual_seed(3))
    before = logits.clone()
    expected = naive.apply_controls(logits, controls)
    found = apply_controls(logits, controls)
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-22, atol=1e-6)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("count", [count_tokens, naive.count_tokens])
def test_counts_add_up_and_skip_rows_without_a_slot(count: object) -> None:
    counts = torch.zeros(3, 4, dtype=torch.int32)
    assert callable(count)
    count(torch.tensor([1, 1, 3, -1]), torch.tensor([2, 2, 0, -1]), counts)
    assert counts.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0], [0, 2, 0, 0]]


def test_logprobs_agree_with_plain_python() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 40, generator=generator) * 5
    logits[2, 7] = -INF
    logits[3, 11:14] = logits[3].max() + 1
    ids = torch.tensor([0, 39, 7, 12, 5, 20])
    expected, found = naive.token_logprobs(logits, ids, 5), token_logprobs(logits, ids, 5)
    assert torch.equal(found.rank, expected.rank)
    assert torch.equal(found.top_ids, expected.top_ids)
    torch.testing.assert_close(found.chosen.double(), expected.chosen, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(found.top_values.double(), expected.top_values, rtol=2e-5, atol=1e-6)


def test_equal_logits_are_ranked_by_id() -> None:
    found = token_logprobs(torch.zeros(1, 4), torch.tensor([2]), 3)
    assert found.rank.tolist() == [3]
    assert found.top_ids.tolist() == [[0, 1, 2]]
    assert found.top_values[0].tolist() == pytest.approx([math.log(0.25)] * 3)


def test_chosen_token_alone_needs_no_top_list() -> None:
    found = token_logprobs(torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([1]), 0)
    assert found.chosen.tolist() == pytest.approx([math.log(0.75)])
    assert found.rank.tolist() == [1]
    assert found.top_ids.shape == found.top_values.shape == (1, 0)


def test_an_impossible_token_has_logprob_minus_infinity() -> None:
    assert token_logprobs(torch.tensor([[0.0, -INF]]), torch.tensor([1]), 0).chosen.item() == -INF


@pytest.mark.parametrize("vocab_size", [33, 1027])
def test_logprob_bits_do_not_depend_on_the_number_of_rows(vocab_size: int) -> None:
    logits = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(6)) * 4
    ids = torch.arange(9)
    whole = token_logprobs(logits, ids, 4)
    for row in (0, 5, 8):
        alone = token_logprobs(logits[row : row + 1], ids[row : row + 1], 4)
        assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(alone, whole, strict=True))
