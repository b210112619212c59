"""Bounded replay and rebuilt windows on interpreted kernels, beside the reference."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.registry import load_backend
from deepinfer.model.loading import load_model
from deepinfer.model.replay import bounded_rows, cold_rows, exact_rows
from tests.backend.replay_bench import Asked, ReplayBench

GOLDEN = Path(__file__).parents[1] / "data/golden/tiny_a"
LENGTH, KEPT, HIT = 14, 8, 12


def run(backend: Backend) -> list[Tensor]:
    """Last logits of a bounded prompt, and after both rebuilds of a hit of most of it."""
    loaded = load_model(GOLDEN / "checkpoint", backend, max_positions=64)
    ids = json.loads((GOLDEN / "cases.json").read_text())["cases"][-1]["prompt_ids"][:LENGTH]
    bench = ReplayBench(loaded, backend, num_slots=3, num_tables=1, length=LENGTH + 2)
    config = loaded.config
    cold = Asked(list(ids), 0, 0, cold_rows(config, LENGTH - KEPT))
    logits = bench.prefill(cold)
    start = LENGTH - KEPT
    hits = [
        Asked(list(ids), 1, 0, bounded_rows(config, HIT, start)),
        Asked(list(ids), 2, 0, exact_rows(config, HIT, start)),
    ]
    found = [*logits, *bench.prefill(*hits)]
    backend.close()
    return found


def test_replay_gives_the_references_logits() -> None:
    interpreted = run(
        load_backend(BackendConfig("cuda_sm100", Numerics.EXACT, {"interpret": True}))
    )
    expected = run(load_backend(BackendConfig("reference", Numerics.EXACT, {"runtime": "inline"})))
    scale = json.loads((GOLDEN / "cases.json").read_text())["logit_scale"]
    for found, wanted in zip(interpreted, expected, strict=True):
        assert (found - wanted).abs().max() <= 1e-4 * scale
    # The exact rebuild is the cold prompt, the bounded one is not.
    cold, bounded, exact = interpreted
    assert torch.equal(exact, cold)
    assert not torch.equal(bounded, cold)
