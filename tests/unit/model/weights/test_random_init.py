"""Random parameters: reproducible, and of the scales that keep activations in range."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.model.config import V41Config
from deepinfer.model.weights.random_init import random_parameters, random_stored
from deepinfer.model.weights.tensor_spec import TensorGroup


def test_seed_decides_everything(small: V41Config) -> None:
    first, again, other = (random_parameters(small, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_tensor_depends_on_its_own_name_only(small: V41Config) -> None:
    without = small.model_copy(update={"engram_layer_ids": ()})
    full, part = random_parameters(small, 1), random_parameters(without, 1)
    assert part.keys() < full.keys()
    assert all(torch.equal(part[name], full[name]) for name in part)


def test_groups_are_left_out(small: V41Config) -> None:
    names = random_stored(small, 1, groups={TensorGroup.DSPARK})
    assert names
    assert all(name.startswith("mtp.") for name in names)


@pytest.mark.parametrize(
    ("name", "mean", "deviation"),
    [
        ("layers.0.attn.wq_b.weight", 0.0, 1 / 8),
        ("layers.0.hc_attn_fn", 0.0, 1 / 16),
        ("layers.1.engram.q_weight", 1.0, 0.1),
        ("layers.1.engram.embed.weight", 0.0, 1.0),
        ("embed.weight", 0.0, 1.0),
        ("head.weight", 0.0, 1 / 8),
    ],
)
def test_scale(small: V41Config, name: str, mean: float, deviation: float) -> None:
    tensor = random_parameters(small, 1)[name]
    tolerance = 5 * deviation / math.sqrt(tensor.numel())
    assert abs(tensor.mean().item() - mean) < tolerance
    assert abs(tensor.std().item() / deviation - 1) < 5 / math.sqrt(2 * tensor.numel())
