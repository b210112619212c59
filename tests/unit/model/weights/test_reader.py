"""Reading StoredTensors: right bytes, only what is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepinfer.device.errors import CheckpointError
from deepinfer.device.weights import WeightFormat
from deepinfer.model.config import V41Config
from deepinfer.model.weights.names import expected_tensors
from deepinfer.model.weights.random_init import random_parameters
from deepinfer.model.weights.reader import CheckpointReader
from deepinfer.model.weights.tensor_spec import TensorGroup
from deepinfer.model.weights.writer import write_checkpoint

EXPERT = "layers.0.ffn.experts.{}.w1.weight"


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_all_bytes_equal_those_of_the_public_reader(golden: Path) -> None:
    reference: dict[str, torch.Tensor] = {}
    for file in (golden / "checkpoint").glob("*.safetensors"):
        reference |= load_file(file)
    reader = CheckpointReader(golden / "checkpoint")
    loaded = reader.parameters(lambda name: True)
    specs = reader.inventory.specs
    seen = set()
    for name, stored in loaded.items():
        assert _bytes(stored.data) == _bytes(reference[name]), name
        seen.add(name)
        scale_name = specs[name].scale_name
        if scale_name is not None:
            assert stored.scale is not None
            assert _bytes(stored.scale) == _bytes(reference[scale_name]), name
            seen.add(scale_name)
    assert seen == reference.keys()


def test_scales_are_reinterpreted_not_converted(golden: Path) -> None:
    stored = CheckpointReader(golden / "checkpoint").read("layers.0.attn.wq_a.weight")
    assert stored.format is WeightFormat.FP8_TILE32
    assert stored.scale is not None
    assert stored.scale.dtype is torch.uint8
    largest = stored.data.float().abs().max() * torch.exp2(stored.scale.float() - 127).max()
    assert stored.dequantize().abs().max() <= largest


def test_packed_experts_have_their_logical_shape(golden: Path) -> None:
    stored = CheckpointReader(golden / "checkpoint").read(EXPERT.format(0))
    assert stored.format is WeightFormat.MXFP4
    assert stored.dequantize().shape == stored.shape
    assert stored.data.shape[1] * 2 == stored.shape[1]


def test_drafter_and_vision_are_not_loaded_by_default(golden: Path) -> None:
    reader = CheckpointReader(golden / "checkpoint")
    groups = {reader.inventory.specs[name].group for name in reader.parameters()}
    assert groups == {TensorGroup.BACKBONE, TensorGroup.ENGRAM}


def test_selection_may_ask_for_the_drafter(golden: Path) -> None:
    loaded = CheckpointReader(golden / "checkpoint").parameters(
        lambda name: name.startswith("mtp.0.main")
    )
    assert list(loaded) == ["mtp.0.main_proj.weight", "mtp.0.main_norm.weight"]


def test_only_owned_experts_are_loaded(golden: Path) -> None:
    loaded = CheckpointReader(golden / "checkpoint").parameters(owned_experts=range(2, 4))
    experts = {name.split(".")[4] for name in loaded if ".experts." in name}
    assert experts == {"2", "3"}
    assert "layers.0.ffn.shared_experts.w1.weight" in loaded
    assert loaded["layers.0.ffn.gate.weight"].shape[0] > 4


def test_engram_tables_are_mapped_not_copied(checkpoint: Path, small: V41Config) -> None:
    name = "layers.1.engram.embed.weight"
    table = CheckpointReader(checkpoint).parameters()[name]
    entry = CheckpointReader(checkpoint).inventory.entries[name]
    before = table.data.view(torch.uint8)[3, 5].item()
    with entry.file.open("r+b") as stream:
        stream.seek(entry.offset + 3 * small.engram_head_dim + 5)
        stream.write(bytes([int(before) ^ 1]))
    assert table.data.view(torch.uint8)[3, 5].item() == int(before) ^ 1


def test_other_tensors_are_copies(checkpoint: Path) -> None:
    reader = CheckpointReader(checkpoint)
    stored = reader.read("embed.weight")
    before = stored.data.clone()
    entry = reader.inventory.entries["embed.weight"]
    with entry.file.open("r+b") as stream:
        stream.seek(entry.offset)
        stream.write(bytes(64))
    assert torch.equal(stored.data, before)


def test_single_file_without_index_is_read(tmp_path: Path, small: V41Config) -> None:
    folder = tmp_path / "single"
    write_checkpoint(folder, small, random_parameters(small, 1), max_shard_bytes=2**30)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    expected = {
        name
        for name, spec in expected_tensors(small).items()
        if spec.group in (TensorGroup.BACKBONE, TensorGroup.ENGRAM)
    }
    assert CheckpointReader(folder).parameters().keys() == expected


def test_fp32_is_accepted_in_plain_storage(
    tmp_path: Path,
    small: V41Config,
    change_header: Callable[
        [Path, Callable[[dict[str, tuple[str, tuple[int, ...]]]], object]], None
    ],
) -> None:
    folder = tmp_path / "plain"
    write_checkpoint(folder, small, random_parameters(small, 1), quantize=False)
    shard = sorted(folder.glob("*.safetensors"))[0]
    name = "layers.0.attn.wq_a.weight"
    change_header(shard, lambda header: header.update({name: ("F32", (64, 64))}))
    assert CheckpointReader(folder).read(name).format is WeightFormat.F32


def test_unknown_name_is_refused(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tensor 'layers.0.nothing'"):
        CheckpointReader(checkpoint).read("layers.0.nothing")


def test_file_cut_after_opening_is_told(checkpoint: Path) -> None:
    reader = CheckpointReader(checkpoint)
    file = reader.inventory.entries["embed.weight"].file
    with file.open("r+b") as stream:
        stream.truncate(100)
    with pytest.raises(CheckpointError, match="changed after it was opened"):
        reader.parameters()
