"""Decode steps replayed with interpreted kernels around a scripted model: padding and all."""

from __future__ import annotations

import pytest

from deepinfer.device.backend import DECODE_GRAPHS
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer_cuda_sm100.backend import CudaBackend
from deepinfer_cuda_sm100.options import CudaOptions
from tests.backend.engine.conftest import collect, scripted_engine
from tests.backend.engine.scripted_model import CheckingModel
from tests.backend.engine.test_decode_graphs import half_liked, liked

OPTIONS = {"interpret": True}
OVERRIDES: dict[str, object] = {
    "scheduler.async_depth": 1,
    "scheduler.max_num_seqs": 4,
    "speculation.mode": "fixed",
    "speculation.max_drafts": 2,
}
ASKED: list[dict[str, object]] = [{"temperature": 0.0}, {}, {"top_k": 3}]


class Replaying(CudaBackend):
    """Interpreted kernels, and decode steps replayed all the same."""

    @property
    def features(self) -> frozenset[str]:
        return super().features | {DECODE_GRAPHS}


def engine_on(replaying: Replaying | None, budget_seed: int | None) -> LLMEngine:
    return scripted_engine(
        liked,
        OVERRIDES,
        model_class=CheckingModel,
        propose=half_liked,
        budget_seed=budget_seed,
        confidence=lambda position: 0.3 + 0.6 * (position % 3 > 0),
        backend=replaying,
    )


@pytest.mark.parametrize("budget_seed", [None, 3], ids=["all", "budgets"])
def test_interpreted_rounds_are_those_of_the_reference(budget_seed: int | None) -> None:
    """Three requests in a tier of four: greedy, drawn, and filtered ones."""

    def answers(engine: LLMEngine) -> dict[str, list[int]]:
        for number, fields in enumerate(ASKED):
            params = SamplingParams.model_validate(
                {"seed": number, "max_tokens": 4 + 2 * number, "ignore_eos": True} | fields
            )
            engine.add_request(f"r{number}", [5 + number] * (1 + number), params)
        results = collect(engine)
        engine.close()
        return {name: outputs[-1].outputs[0].token_ids for name, outputs in results.items()}

    backend = Replaying(
        BackendConfig("cuda_sm100", Numerics.EXACT, OPTIONS), CudaOptions.from_mapping(OPTIONS)
    )
    assert answers(engine_on(backend, budget_seed)) == answers(engine_on(None, budget_seed))
