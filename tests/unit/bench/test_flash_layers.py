"""Some of Flash's layers as a model of their own."""

from __future__ import annotations

import pytest
import torch

from deepinfer.bench.flash_layers import DEFAULT_LAYERS, flash_layers
from deepinfer.config.presets import load_model_preset
from deepinfer.device.errors import ConfigError
from deepinfer.device.weights import WeightFormat
from deepinfer.model.config import V41Config
from deepinfer.model.prefill_work import row_work
from deepinfer.model.weights.random_init import LazyRandom


def test_layers_keep_their_roles_and_their_work() -> None:
    whole = V41Config.from_json(load_model_preset("v41_flash"))
    some = flash_layers(DEFAULT_LAYERS)
    assert some.num_hidden_layers == 4
    assert some.last_kv_source == 2
    for index, layer in enumerate(DEFAULT_LAYERS):
        assert some.ratio(index) == whole.ratio(layer)
        assert some.mode(index) == whole.mode(layer)
        assert row_work(some, index) == row_work(whole, layer)


def test_fewer_experts_leave_the_work_of_a_row_but_for_the_gate() -> None:
    all_experts, few = flash_layers(DEFAULT_LAYERS), flash_layers(DEFAULT_LAYERS, num_experts=48)
    difference = row_work(all_experts, 1).rest - row_work(few, 1).rest
    assert difference == (384 - 48) * few.hidden_size


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((2, 40), "expected ascending ids from 0 to 39"),
        ((3, 2), "expected ascending ids"),
        ((2, 9), "layer 9 reads what layer 8 wrote; add 8"),
        ((20, 25), "layer 25 reads what layer 24 wrote; add 24"),
    ],
)
def test_a_stack_that_cannot_run_is_refused(layers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flash_layers(layers)


def test_lazy_weights_are_the_same_every_time_and_in_the_published_formats(
    small: V41Config,
) -> None:
    weights = LazyRandom(small, 3, torch.device("cpu"))
    name = "layers.0.ffn.experts.1.w1.weight"
    first, again = weights[name], weights[name]
    assert torch.equal(first.data, again.data)
    assert first.format is WeightFormat.MXFP4
    assert len(list(weights)) == len(weights)
    assert not torch.equal(first.data, weights["layers.0.ffn.experts.0.w1.weight"].data)
