"""Random parameters of any small configuration, for tests and explicitly asked-for runs.

Scales keep activations of order one: linears N(0, 1/in), norms near 1, mixers of unit variance.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterator, Mapping

import torch

from deepinfer.device.weights import StoredTensor, stored_from_float
from deepinfer.model.config import V41Config
from deepinfer.model.weights.names import expected_tensors
from deepinfer.model.weights.tensor_spec import (
    BACKBONE_GROUPS,
    TensorGroup,
    TensorKind,
    TensorSpec,
)

ALL_GROUPS: frozenset[TensorGroup] = frozenset(TensorGroup)


def random_parameters(
    config: V41Config, seed: int, *, groups: Collection[TensorGroup] = ALL_GROUPS
) -> dict[str, torch.Tensor]:
    """Return fp32 tensors in logical shapes, in model order.

    A tensor depends on `seed` and its own name only, so models that differ in one part agree in
    the others.

    Args:
        config: the model configuration.
        seed: any whole number.
        groups: parts of the model to make; all, so that the result can be written.
    Source: initialisation of the tiny configurations.
    """
    return {
        name: _random_tensor(spec, seed)
        for name, spec in expected_tensors(config).items()
        if spec.group in groups
    }


def random_stored(
    config: V41Config, seed: int, *, groups: Collection[TensorGroup] = BACKBONE_GROUPS
) -> dict[str, StoredTensor]:
    """Return random tensors in the storage formats that `config` states, without a disk.

    Args:
        config: the model configuration; its quantization_config decides the formats.
        seed: any whole number.
        groups: parts of the model to make; by default what `CheckpointReader` loads.
    """
    return {
        name: stored_from_float(_random_tensor(spec, seed), spec.format)
        for name, spec in expected_tensors(config).items()
        if spec.group in groups
    }


class LazyRandom(Mapping[str, StoredTensor]):
    """Random tensors in their storage formats, each drawn on a device whenever it is asked for.

    For models whose tensors would not all fit into memory, or take long to draw on a CPU. Devices
    draw other values from the same seed.
    """

    def __init__(self, config: V41Config, seed: int, device: torch.device) -> None:
        """Draw nothing yet.

        Args:
            config: the model configuration.
            seed: any whole number.
            device: where tensors are drawn and quantised, and where they are.
        """
        self._specs = expected_tensors(config)
        self._seed, self._device = seed, device

    def __getitem__(self, name: str) -> StoredTensor:
        spec = self._specs[name]
        return stored_from_float(_random_tensor(spec, self._seed, self._device), spec.format)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


def _random_tensor(spec: TensorSpec, seed: int, device: torch.device | None = None) -> torch.Tensor:
    generator = torch.Generator(device or "cpu").manual_seed(
        (seed * 0x9E3779B1 + zlib.crc32(spec.name.encode())) % 2**63
    )
    noise = torch.randn(spec.shape, generator=generator, device=device)
    mean, deviation = _distribution(spec)
    return noise * deviation + mean


def _distribution(spec: TensorSpec) -> tuple[float, float]:
    """Mean and standard deviation of one tensor."""
    leaf = spec.name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf.endswith(("norm", "norm1", "norm2")) or leaf in ("q_weight", "k_weight"):
        return 1.0, 0.1
    if leaf.endswith("_scale"):
        return 1.0, 0.1
    if leaf.endswith("_base"):
        return 0.0, 0.5
    if leaf in ("bias", "bias_vl"):
        return 0.0, 0.1
    if leaf == "embed" or leaf == "attn_sink" or len(spec.shape) == 1:
        return 0.0, 1.0
    if spec.kind is TensorKind.ENGRAM_TABLE:
        return 0.0, 1.0
    return 0.0, 1.0 / math.sqrt(spec.shape[-1])
