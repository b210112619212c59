"""Rotation tables: plain RoPE for window-only layers, YaRN for layers with a compressed cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.model.config import V41Config
from deepinfer.model.rope_scaling import RopeScaling


def _yarn(frequencies: Tensor, scaling: RopeScaling, *, theta: float, width: int) -> Tensor:
    original = scaling.original_max_position_embeddings

    def dimension_of(num_rotations: float) -> float:
        return width * math.log(original / (2 * math.pi * num_rotations)) / (2 * math.log(theta))

    low = max(math.floor(dimension_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension_of(scaling.beta_slow)), width - 1)
    index = torch.arange(width // 2, dtype=torch.float32)
    ramp = ((index - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    return frequencies / scaling.factor * ramp + frequencies * (1.0 - ramp)


def rope_frequencies(config: V41Config, ratio: int) -> Tensor:
    """Angular frequency of every pair, [R / 2] fp32.

    Args:
        config: the model.
        ratio: compression ratio of the layer; the table of ratio > 0 serves everything in it.
    """
    width = config.qk_rope_head_dim
    theta = config.rope_theta
    if ratio > 0:
        theta = config.compress_rope_theta or theta
    exponent = -2.0 * torch.arange(width // 2, dtype=torch.float32) / width
    frequencies = torch.pow(torch.tensor(theta, dtype=torch.float32), exponent)
    if ratio > 0 and config.rope_scaling is not None:
        frequencies = _yarn(frequencies, config.rope_scaling, theta=theta, width=width)
    return frequencies


def rope_table(config: V41Config, ratio: int, num_positions: int) -> Tensor:
    """cos then sin of every position's angles, [num_positions, R] fp32 on the CPU.

    Angles are an fp32 outer product; a more precise one would differ from every engine at long
    positions.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, rope_frequencies(config, ratio))
    return torch.cat((angles.cos(), angles.sin()), dim=1)
