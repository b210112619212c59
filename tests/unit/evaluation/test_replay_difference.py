"""Distributions after bounded and exact prompts: the figures, and a small run of both."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.config import EngineConfig, override
from deepinfer.device.errors import ConfigError
from deepinfer.evaluation import replay_difference
from deepinfer.evaluation.replay_difference import (
    WindowDifference,
    by_distance,
    compare_logits,
    measure_replay_difference,
)


def test_divergence_and_nats_are_those_of_hand_made_distributions() -> None:
    exact = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log() + 3.0  # a shift changes nothing
    bounded = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    found = compare_logits(exact, bounded, torch.tensor([1, 0]))
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert found.kl.tolist() == pytest.approx([expected, 0.0], abs=1e-6)
    assert found.same_top.tolist() == [False, True]
    assert found.exact_nats == pytest.approx(-math.log(0.5) - math.log(0.9), rel=1e-6)
    assert found.bounded_nats == pytest.approx(-math.log(0.75) - math.log(0.9), rel=1e-6)


def test_distances_take_their_own_tokens_of_the_windows_that_reach_them() -> None:
    def window(kl: list[float]) -> WindowDifference:
        return WindowDifference(torch.tensor(kl), torch.tensor(kl) < 0.5, 0.0, 0.0)

    near, middle = by_distance([window([1.0, 0.2, 0.4]), window([0.0])])
    assert (near.first, near.last, near.num_windows) == (1, 1, 2)
    assert (near.mean_kl, near.max_kl, near.same_top_share) == (0.5, 1.0, 0.5)
    assert (middle.first, middle.last, middle.num_windows) == (2, 8, 1)
    assert middle.mean_kl == pytest.approx(0.3)
    assert middle.kl_error is None


@pytest.fixture
def one_text(monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setattr(replay_difference, "heldout_names", lambda: ("prose_austen",))
    return override(EngineConfig(), {"numerics": "exact"})


def test_a_window_of_kept_tokens_changes_the_distributions_a_little(
    one_text: EngineConfig,
) -> None:
    config = override(one_text, {"replay.keep_tokens": 32})
    found = measure_replay_difference(config, limit=1)
    (text,) = found.texts
    assert 0 < abs(text.bounded_bits_per_byte - text.exact_bits_per_byte) < 0.01
    near, *_, far = found.distances
    assert 0 < near.mean_kl < 0.1
    # The windows of the answer's later tokens hold none of the rows that were left out.
    assert far.mean_kl < 1e-3


def test_a_tail_that_covers_the_decoders_reach_changes_nothing(one_text: EngineConfig) -> None:
    """Three layers with a window of 32 come after the last source: 94 tokens are enough."""
    config = override(one_text, {"replay.keep_tokens": 94})
    assert {entry.max_kl for entry in measure_replay_difference(config, limit=1).distances} == {0.0}


def test_a_tail_shorter_than_the_window_is_refused(one_text: EngineConfig) -> None:
    config = override(one_text, {"replay.keep_tokens": 31})
    with pytest.raises(ConfigError, match=r"replay\.keep_tokens = 31 is less"):
        measure_replay_difference(config, limit=1)
