"""The figures of `inspect`."""

from __future__ import annotations

import json
from pathlib import Path

from deepinfer.device.numerics import Numerics
from deepinfer.model.config import V41Config
from deepinfer.model.weights.inspection import cache_rows, inspection_figures, layer_rows
from deepinfer.model.weights.inventory import take_inventory


def test_figures_are_plain_json(checkpoint: Path) -> None:
    figures = inspection_figures(take_inventory(checkpoint))
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_totals_cover_every_tensor_and_byte(checkpoint: Path) -> None:
    figures = inspection_figures(take_inventory(checkpoint))
    inventory = take_inventory(checkpoint)
    rows = figures["tensors"]
    assert isinstance(rows, list)
    assert sum(row["tensors"] for row in rows) == figures["num_tensors"] == len(inventory.entries)
    assert sum(row["bytes"] for row in rows) == figures["num_bytes"]
    assert figures["num_bytes"] == sum(entry.num_bytes for entry in inventory.entries.values())
    assert sum(sum(row["dtypes"].values()) for row in rows) == figures["num_expected"]


def test_faults_are_counted(checkpoint: Path) -> None:
    shard = sorted(checkpoint.glob("*.safetensors"))[0]
    shard.unlink()
    figures = inspection_figures(take_inventory(checkpoint))
    assert figures["complete"] is False
    assert list(figures["missing_files"]) == [shard.name]  # type: ignore[call-overload]


def test_layer_rows_name_the_mode(flash: V41Config) -> None:
    assert layer_rows(flash)[24] == {
        "layer": 24,
        "ratio": 1,
        "mode": "reindex",
        "kv_source": 20,
        "index_source": 24,
        "has_engram": False,
        "is_candidate_source": False,
    }


def test_flash_cache_rows(flash: V41Config) -> None:
    rows = cache_rows(flash, Numerics.NORMATIVE)
    assert (rows["per_token"], rows["window_per_request"]) == (890, 2_703_360)


def test_half_rows_stay_fractions(small: V41Config) -> None:
    rows = cache_rows(small, Numerics.NORMATIVE)
    assert rows["compressed_per_token"] == 2 * (32 + 4)
    config = small.model_copy(update={"kv_source_layer_ids": (2,), "index_head_dim": 34})
    assert cache_rows(config, Numerics.NORMATIVE)["index_per_token"] == 19 / 2
