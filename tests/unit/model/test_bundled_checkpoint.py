"""The checkpoint that comes with the project is whole and described by its manifest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from deepinfer.model.config import V41Config
from deepinfer.model.token_map import load_token_map
from deepinfer.model.weights.reader import CheckpointReader

FOLDER = Path(__file__).resolve().parents[3] / "checkpoints" / "tiny-v41"
MAX_FILE_BYTES = 16 * 2**20


def test_every_tensor_is_there() -> None:
    reader = CheckpointReader(FOLDER)
    assert reader.config.num_nextn_predict_layers == 2
    assert reader.config.quantization_config is not None
    assert reader.inventory.problems() == []


def test_tokenizer_gives_the_stated_classes() -> None:
    config = V41Config.from_json(FOLDER)
    assert int(load_token_map(FOLDER, config).max()) + 1 == config.engram_compressed_vocab_size


def test_manifest_describes_every_file() -> None:
    listed = json.loads((FOLDER / "MANIFEST.json").read_text(encoding="utf-8"))["files"]
    found = {file.name for file in FOLDER.iterdir()} - {"MANIFEST.json"}
    assert listed.keys() == found
    for name, entry in listed.items():
        content = (FOLDER / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (
            entry["bytes"],
            entry["sha256"],
        ), name


def test_calibration_fits_the_drafter() -> None:
    config = V41Config.from_json(FOLDER)
    calibrated = json.loads((FOLDER / "sts.json").read_text(encoding="utf-8"))
    temperatures = calibrated["temperatures"]
    assert len(temperatures) == config.dspark_block_size
    assert all(0.0 < value < 100.0 for value in temperatures)


def test_evaluation_judges_every_target() -> None:
    lines = json.loads((FOLDER / "eval.json").read_text(encoding="utf-8"))["acceptance"]
    assert len(lines) == 19
    for line in lines:
        assert line.keys() == {"what", "target", "value", "is_met"}


def test_expert_loads_are_shares_of_every_layer() -> None:
    config = V41Config.from_json(FOLDER)
    loads = json.loads((FOLDER / "expert_load.json").read_text(encoding="utf-8"))
    for domain, layers in loads["share_of_routed_tokens"].items():
        assert len(layers) == config.num_hidden_layers, domain
        for layer in layers:
            assert len(layer) == config.n_routed_experts, domain
            assert sum(layer) == pytest.approx(1.0, abs=1e-3), domain


def test_files_stay_below_the_repository_limit() -> None:
    assert max(file.stat().st_size for file in FOLDER.iterdir()) < MAX_FILE_BYTES


@pytest.mark.parametrize(
    "notice",
    [
        "WordNet 3.0 Copyright 2006",
        "PYTHON SOFTWARE FOUNDATION LICENSE",
        "UNIVERSITY OF CALIFORNIA",
    ],
)
def test_notices_of_the_training_texts_come_with_it(notice: str) -> None:
    assert notice in (FOLDER / "THIRD_PARTY_NOTICES").read_text(encoding="utf-8")
