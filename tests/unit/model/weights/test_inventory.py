"""Faults of a checkpoint, each reported by name and count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from deepinfer.device.errors import CheckpointError
from deepinfer.model.weights.inventory import take_inventory
from deepinfer.model.weights.safetensors_file import read_header
from deepinfer.model.weights.shard_index import INDEX_FILE

Header = dict[str, tuple[str, tuple[int, ...]]]
ChangeIndex: TypeAlias = Callable[[Path, Callable[[dict[str, str]], object]], None]
ChangeHeader: TypeAlias = Callable[[Path, Callable[[Header], object]], None]

SINK = "layers.0.attn.attn_sink"


def _shard_of(folder: Path, name: str) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    return next(file for file in files if name in read_header(file).entries)


def _refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        take_inventory(folder).require_complete()
    return str(caught.value)


def test_golden_checkpoints_are_complete(golden: Path) -> None:
    inventory = take_inventory(golden / "checkpoint")
    assert inventory.problems() == []
    inventory.require_complete()


def test_written_checkpoint_is_complete(checkpoint: Path) -> None:
    assert take_inventory(checkpoint).num_files > 1
    take_inventory(checkpoint).require_complete()


def test_absent_shard_is_named_with_its_number_of_tensors(checkpoint: Path) -> None:
    shard = sorted(checkpoint.glob("*.safetensors"))[1]
    lost = len(read_header(shard).entries)
    shard.unlink()
    message = _refusal(checkpoint)
    assert f"missing shards, {lost} tensors lost: 1: {shard.name} ({lost} tensors)" in message
    assert "missing tensors" not in message


def test_absent_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        take_inventory(tmp_path / "nowhere")


def test_folder_without_weights_is_an_error(checkpoint: Path) -> None:
    (checkpoint / INDEX_FILE).unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        take_inventory(checkpoint)


def test_truncated_shard_is_named(checkpoint: Path) -> None:
    shard = sorted(checkpoint.glob("*.safetensors"))[0]
    with shard.open("r+b") as stream:
        stream.truncate(shard.stat().st_size - 1)
    assert f"truncated shards: 1: {shard.name}" in _refusal(checkpoint)
    assert take_inventory(checkpoint).without_data().problems() == []


def test_missing_tensor_is_named(
    checkpoint: Path, change_index: ChangeIndex, change_header: ChangeHeader
) -> None:
    change_header(_shard_of(checkpoint, SINK), lambda header: header.pop(SINK))
    change_index(checkpoint, lambda weight_map: weight_map.pop(SINK))
    assert f"missing tensors: 1: {SINK}" in _refusal(checkpoint)


def test_missing_scale_is_named(
    checkpoint: Path, change_index: ChangeIndex, change_header: ChangeHeader
) -> None:
    scale = "layers.0.attn.wq_a.scale"
    change_header(_shard_of(checkpoint, scale), lambda header: header.pop(scale))
    change_index(checkpoint, lambda weight_map: weight_map.pop(scale))
    assert f"missing tensors: 1: {scale}" in _refusal(checkpoint)


def test_unexpected_tensors_are_listed_up_to_ten(
    checkpoint: Path, change_index: ChangeIndex, change_header: ChangeHeader
) -> None:
    shard = _shard_of(checkpoint, SINK)
    names = [f"layers.0.extra{number:02d}" for number in range(12)]
    change_header(shard, lambda header: header.update(dict.fromkeys(names, ("F32", (1,)))))
    change_index(checkpoint, lambda weight_map: weight_map.update(dict.fromkeys(names, shard.name)))
    message = _refusal(checkpoint)
    assert f"unexpected tensors: 12: {', '.join(names[:10])}, and 2 more" in message


def test_zero_element_tensor_is_refused_by_name(
    checkpoint: Path, change_index: ChangeIndex, change_header: ChangeHeader
) -> None:
    shard = _shard_of(checkpoint, SINK)
    change_header(shard, lambda header: header.update({"empty": ("F32", (0, 4))}))
    change_index(checkpoint, lambda weight_map: weight_map.update({"empty": shard.name}))
    assert "unexpected tensors: 1: empty" in _refusal(checkpoint)


def test_wrong_shape_is_named(checkpoint: Path, change_header: ChangeHeader) -> None:
    shard = _shard_of(checkpoint, SINK)
    change_header(shard, lambda header: header.update({SINK: ("F32", (0,))}))
    assert f"wrong shapes: 1: {SINK} is [0], expected [4]" in _refusal(checkpoint)


def test_wrong_dtype_is_named(checkpoint: Path, change_header: ChangeHeader) -> None:
    change_header(_shard_of(checkpoint, SINK), lambda header: header.update({SINK: ("BF16", (4,))}))
    assert f"wrong dtypes: 1: {SINK} is BF16, expected F32" in _refusal(checkpoint)


def test_index_that_names_another_shard_is_told(
    checkpoint: Path, change_index: ChangeIndex
) -> None:
    shard = _shard_of(checkpoint, SINK)
    other = next(file for file in sorted(checkpoint.glob("*.safetensors")) if file != shard)
    change_index(checkpoint, lambda weight_map: weight_map.update({SINK: other.name}))
    message = _refusal(checkpoint)
    assert f"{SINK} is in {shard.name}, the index says {other.name}" in message
    assert f"{SINK} is not in {other.name}, where the index puts it" in message


def test_tensor_outside_the_index_is_told(checkpoint: Path, change_index: ChangeIndex) -> None:
    change_index(checkpoint, lambda weight_map: weight_map.pop(SINK))
    assert f"{SINK} is in {_shard_of(checkpoint, SINK).name} but not in the index" in _refusal(
        checkpoint
    )


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", 7])
def test_index_must_name_files_beside_it(
    checkpoint: Path, change_index: ChangeIndex, file: str
) -> None:
    change_index(checkpoint, lambda weight_map: weight_map.update({SINK: file}))
    with pytest.raises(CheckpointError, match="expected the name of a file beside it"):
        take_inventory(checkpoint)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_damaged_index_is_told(checkpoint: Path, text: str) -> None:
    (checkpoint / INDEX_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"index.json (is not valid JSON|has no weight_map)"):
        take_inventory(checkpoint)
