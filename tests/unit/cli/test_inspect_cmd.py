"""`deepinfer inspect`: the report, its exit codes, and a checkpoint of the released size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from deepinfer.cli import main
from deepinfer.model.config import V41Config
from deepinfer.model.weights.names import disk_tensors, expected_tensors
from deepinfer.model.weights.safetensors_file import encode_header
from deepinfer.model.weights.shard_index import INDEX_FILE

DATA = Path(__file__).resolve().parents[2] / "data"
GOLDEN = DATA / "golden" / "tiny_a" / "checkpoint"
NUM_SHARDS = 48


@pytest.fixture(scope="module")
def flash_headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The released checkpoint's config, index and 48 headers, without any data."""
    folder = tmp_path_factory.mktemp("flash")
    shutil.copy(DATA / "flash" / "config.json", folder)
    disk = disk_tensors(expected_tensors(V41Config.from_json(folder)))
    names = list(disk)
    weight_map: dict[str, str] = {}
    for number in range(NUM_SHARDS):
        shard = f"model-{number + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        held = names[number::NUM_SHARDS]
        header = encode_header([(name, disk[name].dtype.value, disk[name].shape) for name in held])
        (folder / shard).write_bytes(header)
        weight_map |= dict.fromkeys(held, shard)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return folder


def _figures(file: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    figures: dict[str, Any] = report["figures"]
    return figures


def test_released_size_is_inspected_from_headers(flash_headers: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["inspect", str(flash_headers), "--headers-only", "--json", str(report)]
    assert main(arguments) == 0
    figures = _figures(report)
    assert figures["complete"]
    assert figures["num_tensors"] == figures["num_expected"] == 96_085
    assert figures["num_parameters"] == 763_205_315_794
    assert figures["num_files"] == NUM_SHARDS
    assert figures["caches"]["normative"]["per_token"] == 890
    groups = {group["name"]: group for group in figures["cache_groups"]["normative"]}
    assert sum(group["bytes_per_token"] for group in groups.values()) == 890
    assert groups["window"]["bytes_per_request"] == 40 * 128 * 528
    assert groups["compressor ring"]["layers"] == [2, 8, 14]
    assert [name for name, group in groups.items() if group["is_cacheable"]] == [
        "main compressed",
        "index keys",
    ]
    assert len(figures["layers"]) == 40


def test_missing_data_is_a_fault_unless_headers_are_all(
    flash_headers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(flash_headers)]) == 1
    assert f"truncated shards: {NUM_SHARDS}" in capsys.readouterr().out


def test_complete_checkpoint_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(GOLDEN)]) == 0
    shown = capsys.readouterr().out
    assert "complete" in shown
    assert "reindex" in shown
    assert "engram tables" in shown
    assert "cache groups" in shown


def test_faulty_checkpoint_exits_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(GOLDEN, folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert main(["inspect", str(folder)]) == 1
    assert "missing shards" in capsys.readouterr().out


def test_absent_folder_exits_with_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist" in " ".join(capsys.readouterr().err.split())


def test_default_is_the_configured_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--checkpoint", str(GOLDEN)]) == 0
    assert "9 / 64 / 320" in capsys.readouterr().out
