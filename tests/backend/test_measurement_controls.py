"""Measuring controls replace what they say, mark the result, and change nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer import LLM, SamplingParams
from deepinfer.device.backend import Backend
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.registry import load_backend
from deepinfer.model.controls import Controls, EngramRows, Selections
from deepinfer.model.loading import load_model
from deepinfer.model.trace_run import trace_tokens

FOLDER = Path(__file__).parents[1] / "data" / "golden" / "tiny_a"
IDS: list[int] = json.loads((FOLDER / "cases.json").read_text())["cases"][-1]["prompt_ids"]


@pytest.fixture(scope="module", params=["reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    backend = load_backend(BackendConfig(request.param, Numerics.EXACT))
    yield backend
    backend.close()


def _trace(backend: Backend, controls: Controls, chunk: int | None = None) -> dict[str, Tensor]:
    loaded = load_model(FOLDER / "checkpoint", backend, max_positions=256, controls=controls)
    assert loaded.marks == controls.marks
    return trace_tokens(loaded, backend, IDS, chunk=chunk)


def test_without_selections_only_the_window_is_seen(backend: Backend) -> None:
    usual = _trace(backend, Controls())
    without = _trace(backend, Controls(selections=Selections.NONE))
    chosen = [name for name in usual if name.endswith("selected_positions")]
    assert all(bool((without[name] == -1).all()) for name in chosen)
    # The first two layers see their windows only and are the same.
    assert torch.equal(usual["layers.2.streams"], without["layers.2.streams"])
    assert not torch.allclose(usual["logits"][-1], without["logits"][-1], atol=1e-3)


def test_random_selections_are_entries_that_the_row_may_see(backend: Backend) -> None:
    random = Controls(selections=Selections.RANDOM)
    usual, drawn = _trace(backend, Controls()), _trace(backend, random)
    for layer, ratio in ((2, 2), (4, 2), (5, 1), (7, 1)):
        entries = drawn[f"layers.{layer}.selected_positions"]
        other = usual[f"layers.{layer}.selected_positions"]
        assert torch.equal((entries >= 0).sum(1), (other >= 0).sum(1))
        for position, row in enumerate(entries.tolist()):
            chosen = [entry for entry in row if entry >= 0]
            assert chosen == sorted(set(chosen))
            assert all(entry < (position + 1) // ratio for entry in chosen)
        assert not torch.equal(entries, other)
    last = [drawn[f"layers.{layer}.selected_positions"][-1].tolist() for layer in (5, 7)]
    assert last[0] != last[1]


def test_random_selections_do_not_depend_on_chunks(backend: Backend) -> None:
    random = Controls(selections=Selections.RANDOM)
    whole, chunks = _trace(backend, random), _trace(backend, random, chunk=7)
    assert [name for name in whole if not torch.equal(whole[name], chunks[name])] == []


def test_zero_engram_rows_inject_nothing(backend: Backend) -> None:
    usual = _trace(backend, Controls())
    zero = _trace(backend, Controls(engram=EngramRows.ZERO))
    assert torch.equal(usual["layers.1.streams"], zero["layers.1.streams"])
    assert not torch.allclose(usual["layers.2.streams"], zero["layers.2.streams"], atol=1e-3)


def test_results_of_a_controlled_run_are_marked() -> None:
    config: dict[str, Any] = {
        "checkpoint.path": str(FOLDER / "checkpoint"),
        "numerics": "exact",
        "measurement.selections": "none",
        "measurement.engram": "zero",
    }
    with LLM(**config) as llm:
        (result,) = llm.generate([IDS], SamplingParams(max_tokens=1, temperature=0))
    assert result.marks == ("selections_none", "engram_zero")
