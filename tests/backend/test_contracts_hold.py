"""The model calls every op as its contract says."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.overlay import checked
from deepinfer.device.registry import load_backend
from deepinfer.device.runtime import StepKind
from deepinfer.model.loading import load_model
from deepinfer.model.trace_run import trace_tokens

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "tiny_a" / "checkpoint"


@pytest.mark.parametrize("numerics", Numerics)
@pytest.mark.parametrize("kind", [StepKind.PREFILL, StepKind.DECODE])
def test_no_call_of_the_model_is_refused(numerics: Numerics, kind: StepKind) -> None:
    backend = checked(load_backend(BackendConfig("reference", numerics, {"runtime": "inline"})))
    loaded = load_model(GOLDEN, backend, max_positions=128, with_drafter=True)
    ids = [3 + 5 * i % 90 for i in range(34)]
    tensors = trace_tokens(loaded, backend, ids, kind=kind, chunk=16, last=4, max_len=128)
    assert tensors["logits"].isfinite().all()
