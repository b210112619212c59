"""Host tensors made through typed arrays."""

from __future__ import annotations

import pytest
import torch

from deepinfer.engine.host_tensor import float32_tensor, int64_tensor


@pytest.mark.parametrize("values", [[], [3], [-(2**63), 2**63 - 1, 0]])
def test_integers_are_kept(values: list[int]) -> None:
    tensor = int64_tensor(iter(values))
    assert (tensor.tolist(), tensor.dtype) == (values, torch.int64)


def test_reals_are_rounded_as_torch_rounds_them() -> None:
    values = [0.1, 1e-45, 3.4028234663852886e38, -0.0, 1 / 3]
    tensor = float32_tensor(values)
    assert tensor.dtype is torch.float32
    assert torch.equal(tensor, torch.tensor(values, dtype=torch.float32))
    assert float32_tensor([]).shape == (0,)


def test_each_tensor_has_memory_of_its_own() -> None:
    first, second = int64_tensor([1, 2]), int64_tensor([1, 2])
    first[0] = 9
    assert second.tolist() == [1, 2]
