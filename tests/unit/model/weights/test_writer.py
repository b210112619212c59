"""Writing checkpoints: what comes back, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepinfer.device.errors import CheckpointError, ConfigError
from deepinfer.device.weights import WeightFormat
from deepinfer.model.config import V41Config
from deepinfer.model.weights.random_init import ALL_GROUPS, random_parameters, random_stored
from deepinfer.model.weights.reader import CheckpointReader
from deepinfer.model.weights.writer import quantise, storage_config, write_checkpoint


@pytest.fixture(scope="module")
def logical(small: V41Config) -> dict[str, torch.Tensor]:
    """All tensors of the small model."""
    return random_parameters(small, 3)


def test_quantised_values_come_back(
    tmp_path: Path, small: V41Config, logical: dict[str, torch.Tensor]
) -> None:
    write_checkpoint(tmp_path, small, logical, max_shard_bytes=2**20)
    loaded = CheckpointReader(tmp_path).parameters(lambda name: True)
    expected = quantise(small, logical)
    assert loaded.keys() == expected.keys() == logical.keys()
    for name, stored in loaded.items():
        assert stored.format is expected[name].format
        assert torch.equal(stored.dequantize(), expected[name].dequantize()), name


def test_stored_values_quantise_to_themselves(golden: Path) -> None:
    reader = CheckpointReader(golden / "checkpoint")
    loaded = reader.parameters(lambda name: True)
    again = quantise(reader.config, {name: item.dequantize() for name, item in loaded.items()})
    for name, stored in loaded.items():
        assert torch.equal(stored.dequantize(), again[name].dequantize()), name


def test_plain_storage_rounds_to_bf16(
    tmp_path: Path, small: V41Config, logical: dict[str, torch.Tensor]
) -> None:
    config = write_checkpoint(tmp_path, small, logical, quantize=False)
    assert config.quantization_config is None
    loaded = CheckpointReader(tmp_path).parameters(lambda name: True)
    name = "layers.0.ffn.experts.1.w2.weight"
    assert torch.equal(loaded[name].data, logical[name].bfloat16())
    assert loaded["layers.0.attn.attn_sink"].format is WeightFormat.F32


def test_config_comes_back(
    tmp_path: Path, small: V41Config, logical: dict[str, torch.Tensor]
) -> None:
    written = write_checkpoint(tmp_path, small, logical)
    read = V41Config.from_json(tmp_path)
    assert read.model_dump(exclude={"unused_keys"}) == written.model_dump(exclude={"unused_keys"})


def test_shards_stay_below_the_limit_and_public_reader_opens_them(
    tmp_path: Path, small: V41Config, logical: dict[str, torch.Tensor]
) -> None:
    write_checkpoint(tmp_path, small, logical, max_shard_bytes=300_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    for file in files:
        tensors = load_file(file)
        assert sum(item.numel() * item.element_size() for item in tensors.values()) <= 300_000


@pytest.mark.parametrize("variant", ["engram_layer_ids", "candidate_source_layer_id", "windows"])
def test_every_variant_is_written_and_read(tmp_path: Path, small: V41Config, variant: str) -> None:
    changes: dict[str, dict[str, object]] = {
        "engram_layer_ids": {"engram_layer_ids": ()},
        "candidate_source_layer_id": {"candidate_source_layer_id": -1},
        "windows": {
            "compress_ratios": (0,) * 12,
            "kv_source_layer_ids": (),
            "index_source_layer_ids": (),
            "candidate_source_layer_id": -1,
        },
    }
    config = small.model_copy(update={**changes[variant], "vision_config": None})
    write_checkpoint(tmp_path, config, random_parameters(config, 0))
    assert CheckpointReader(tmp_path).parameters().keys() == random_stored(config, 0).keys()


def test_random_stored_equals_what_is_written(tmp_path: Path, small: V41Config) -> None:
    write_checkpoint(tmp_path, small, random_parameters(small, 5))
    loaded = CheckpointReader(tmp_path).parameters(lambda name: True)
    for name, stored in random_stored(small, 5, groups=ALL_GROUPS).items():
        assert torch.equal(stored.dequantize(), loaded[name].dequantize()), name


def test_missing_and_unknown_tensors_are_named(
    tmp_path: Path, small: V41Config, logical: dict[str, torch.Tensor]
) -> None:
    changed = {**logical, "surplus": torch.zeros(1)}
    del changed["norm.weight"]
    with pytest.raises(CheckpointError, match=r"1 missing \['norm.weight'\], 1 unknown"):
        write_checkpoint(tmp_path / "new", small, changed)
    assert not (tmp_path / "new").exists()


def test_wrong_shape_is_named(
    tmp_path: Path, small: V41Config, logical: dict[str, torch.Tensor]
) -> None:
    changed = {**logical, "norm.weight": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"norm.weight has shape \[3\], expected \[64\]"):
        write_checkpoint(tmp_path, small, changed)


def test_not_finite_values_are_refused(
    tmp_path: Path, small: V41Config, logical: dict[str, torch.Tensor]
) -> None:
    changed = {**logical, "norm.weight": torch.full((64,), float("nan"))}
    with pytest.raises(CheckpointError, match=r"norm.weight holds NaN"):
        write_checkpoint(tmp_path, small, changed)


def test_existing_checkpoint_is_not_overwritten(
    tmp_path: Path, small: V41Config, logical: dict[str, torch.Tensor]
) -> None:
    write_checkpoint(tmp_path, small, logical)
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        write_checkpoint(tmp_path, small, logical)


def test_widths_that_cannot_be_quantised_are_refused(small: V41Config) -> None:
    plain = storage_config(small, quantize=False)
    narrow = plain.model_copy(update={"moe_intermediate_size": 40})
    with pytest.raises(ConfigError, match="moe_intermediate_size=40"):
        storage_config(narrow, quantize=True)
