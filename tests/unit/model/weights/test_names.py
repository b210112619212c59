"""The catalogue against published totals and the golden checkpoints."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from deepinfer.device.errors import ConfigError
from deepinfer.device.weights import WeightFormat
from deepinfer.model.config import V41Config
from deepinfer.model.weights.names import DiskTensor, disk_tensors, expected_tensors
from deepinfer.model.weights.tensor_spec import DiskDtype, TensorGroup, TensorSpec
from deepinfer.model.weights.writer import storage_config


@pytest.fixture(scope="module")
def flash_specs(flash: V41Config) -> dict[str, TensorSpec]:
    """The catalogue of the released configuration."""
    return expected_tensors(flash)


@pytest.fixture(scope="module")
def flash_disk(flash_specs: dict[str, TensorSpec]) -> dict[str, DiskTensor]:
    """The names on disk of the released configuration."""
    return disk_tensors(flash_specs)


def test_flash_has_the_published_number_of_tensors(flash_disk: dict[str, DiskTensor]) -> None:
    groups = Counter(tensor.spec.group for tensor in flash_disk.values())
    assert len(flash_disk) == 96_085
    assert groups[TensorGroup.BACKBONE] + groups[TensorGroup.ENGRAM] == 93_418
    assert groups[TensorGroup.DSPARK] == 2_401
    assert groups[TensorGroup.VISION] == 266


def test_flash_has_the_published_number_of_parameters(
    flash_specs: dict[str, TensorSpec],
) -> None:
    sums: Counter[TensorGroup] = Counter()
    for spec in flash_specs.values():
        sums[spec.group] += math.prod(spec.shape)
    assert sums.total() == 763_205_315_794
    assert sums[TensorGroup.DSPARK] == 14_225_362_530
    assert sums[TensorGroup.VISION] == 485_268_480


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.7.attn.wq_b.weight", "F8_E4M3", (32768, 1280)),
        ("layers.7.attn.wq_b.scale", "F8_E8M0", (1024, 40)),
        ("layers.39.ffn.experts.383.w1.weight", "I8", (2304, 2560)),
        ("layers.39.ffn.experts.383.w1.scale", "F8_E8M0", (2304, 160)),
        ("layers.0.ffn.experts.0.w2.weight", "I8", (5120, 1152)),
        ("layers.0.ffn.shared_experts.w2.scale", "F8_E8M0", (160, 72)),
        ("layers.14.engram.embed.weight", "F8_E4M3", (384016682, 256)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8)),
        ("layers.1.engram.wkv.scale", "F8_E8M0", (800, 192)),
        ("layers.20.attn.indexer.wk.weight", "BF16", (128, 512)),
        ("layers.0.hc_attn_fn", "F32", (24, 20480)),
        ("layers.0.ffn.gate.bias_vl", "F32", (384,)),
        ("mtp.0.main_proj.scale", "F8_E8M0", (160, 480)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("vision.blocks.31.mlp.w1.weight", "BF16", (5632, 1024)),
        ("aligner.w1.weight", "BF16", (5120, 9216)),
    ],
)
def test_flash_tensor(
    flash_disk: dict[str, DiskTensor], name: str, dtype: str, shape: tuple[int, ...]
) -> None:
    assert (flash_disk[name].dtype.value, flash_disk[name].shape) == (dtype, shape)


@pytest.mark.parametrize(
    "name",
    [
        "layers.20.attn.compressor.wgate.weight",
        "layers.24.attn.indexer.wk.weight",
        "layers.3.attn.indexer.wq_b.weight",
        "mtp.1.main_proj.weight",
        "mtp.0.norm.weight",
    ],
)
def test_flash_has_no_such_tensor(flash_disk: dict[str, DiskTensor], name: str) -> None:
    assert name not in flash_disk


def test_plain_storage_has_no_scales(small: V41Config) -> None:
    disk = disk_tensors(expected_tensors(storage_config(small, quantize=False)))
    assert {tensor.dtype for tensor in disk.values()} == {DiskDtype.BF16, DiskDtype.F32}
    assert disk["layers.0.attn.wq_a.weight"].accepted == (DiskDtype.BF16, DiskDtype.F32)
    assert disk["layers.0.hc_attn_fn"].accepted == (DiskDtype.F32,)


@pytest.mark.parametrize(
    ("expert_dtype", "fmt"),
    [("fp4", WeightFormat.MXFP4), ("fp8", WeightFormat.FP8_TILE32), ("bf16", WeightFormat.BF16)],
)
def test_expert_dtype_decides_the_experts_alone(
    golden: Path, expert_dtype: str, fmt: WeightFormat
) -> None:
    raw = V41Config.from_json(golden / "checkpoint").to_json()
    scheme = raw["quantization_config"]
    assert isinstance(scheme, dict)
    specs = expected_tensors(
        V41Config.from_json(
            {**raw, "quantization_config": {**scheme, "expert_dtype": expert_dtype}}
        )
    )
    assert specs["layers.0.ffn.experts.0.w1.weight"].format is fmt
    assert specs["layers.0.ffn.shared_experts.w1.weight"].format is WeightFormat.FP8_TILE32


def test_image_bias_is_demanded_with_a_vision_tower_only(small: V41Config) -> None:
    text_only = small.model_copy(update={"vision_config": None})
    name = "layers.0.ffn.gate.bias_vl"
    assert expected_tensors(small)[name].required
    assert not expected_tensors(text_only)[name].required


def test_vision_sizes_are_checked(small: V41Config) -> None:
    config = small.model_copy(update={"vision_config": {"hidden_size": 32}})
    with pytest.raises(ConfigError, match=r"vision_config.intermediate_size is None"):
        expected_tensors(config)
