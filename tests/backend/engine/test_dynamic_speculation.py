"""Planned verification in the engine: the same answers, fewer rows, whatever is in flight."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepinfer.config import EngineConfig, override
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.registry import load_backend
from deepinfer.engine import round_costs
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.round_costs import cost_facts
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.speculation.cost_file import save_costs
from deepinfer.speculation.cost_tables import CostTables
from deepinfer.speculation.planner import VerifyPlanner
from tests.backend.engine.conftest import collect, scripted_engine
from tests.backend.engine.scripted_model import CheckingModel, Script

# Likely drafts pay for their rows, unlikely ones do not.
STEEP = CostTables({1: 1.0}, {1: 350.0, 200: 10300.0})
TIERS = CostTables({1: 1.0}, {4: 100.0, 8: 140.0, 16: 300.0, 64: 900.0}, tiers=(4, 8, 16, 64))
Make = Callable[..., LLMEngine]


def rising(known: list[int]) -> int:
    """A token that depends on all before it, so that a wrong one changes what follows."""
    return 20 + (7 * sum(known) + 3 * len(known)) % 250


def often_wrong(known: list[int]) -> int:
    return rising(known) + (len(known) % 3 == 0)


def knowing(position: int) -> float:
    """Confidence of a head that knows where the drafter is wrong."""
    return 0.05 if position % 3 == 0 else 0.97


def doubtful(position: int) -> float:
    return (position * 37 % 100) / 100.0


@pytest.fixture(params=[0, 1, 2], ids=lambda depth: f"depth{depth}")
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Builds engines of one depth on the adversarial runtime, with checked memory."""
    made: list[LLMEngine] = []

    def build(
        *,
        mode: str = "dynamic",
        propose: Script = often_wrong,
        confidence: Callable[[int], float] = knowing,
        costs: CostTables = STEEP,
        **overrides: object,
    ) -> LLMEngine:
        settings: dict[str, object] = {
            "scheduler.async_depth": request.param,
            "cache.block_size": 4,
            "speculation.mode": mode,
        }
        engine = scripted_engine(
            rising,
            settings | overrides,
            model_class=CheckingModel,
            runtime_seed=len(made),
            propose=propose,
            confidence=confidence,
            costs=costs,
        )
        made.append(engine)
        return engine

    yield build
    for engine in made:
        engine.close()


def answers(engine: LLMEngine, count: int = 5, max_tokens: int = 24) -> list[list[int]]:
    for index in range(count):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens + index)
        engine.add_request(f"r{index}", [5 + index] * (1 + 3 * index), params)
    results = collect(engine)
    return [results[f"r{index}"][-1].outputs[0].token_ids for index in range(count)]


@pytest.mark.parametrize("costs", [STEEP, TIERS], ids=["line", "tiers"])
@pytest.mark.parametrize("confidence", [knowing, doubtful], ids=["knowing", "doubtful"])
def test_tokens_are_those_without_speculation(
    make: Make, confidence: Callable[[int], float], costs: CostTables
) -> None:
    engine = make(confidence=confidence, costs=costs)
    assert answers(engine) == answers(make(mode="off"))
    metrics = engine.speculation
    assert metrics is not None
    # Some steps were cut; otherwise this would say nothing.
    assert metrics.places.verified.sum() < metrics.places.drafted.sum()
    assert any(span.num_planned for span in metrics.spans)


def test_rows_that_do_not_pay_are_saved(make: Make) -> None:
    fixed, dynamic = make(mode="fixed"), make()
    assert answers(fixed) == answers(dynamic)
    was, now = fixed.speculation, dynamic.speculation
    assert was is not None
    assert now is not None
    assert now.places.verified.sum() < 0.8 * was.places.verified.sum()
    if dynamic.config.scheduler.async_depth == 0:
        # With steps in flight K is that of another round, and these rounds differ by turns.
        assert now.places.accepted.sum() > 0.9 * was.places.accepted.sum()


def test_preempted_and_aborted_requests_lose_nothing_of_the_others(make: Make) -> None:
    tight = {"cache.num_blocks": 16, "scheduler.max_num_seqs": 4}
    engine, plain = make(**tight), make(mode="off")
    for index in range(4):
        params = SamplingParams(temperature=0.0, max_tokens=26)
        for each in (engine, plain):
            each.add_request(f"r{index}", [5 + index] * (2 + index), params)
    for _ in range(3):
        engine.step()
    engine.abort("r2")
    ours, theirs = collect(engine), collect(plain)
    assert engine.stats().num_preemptions > 0
    for name in ("r0", "r1", "r3"):
        assert ours[name][-1].outputs[0].token_ids == theirs[name][-1].outputs[0].token_ids


def test_drafts_of_the_bundled_checkpoint_are_planned_with_costs_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibrated confidences of the trained drafter; a steep line cuts many of its drafts."""
    # A run this short would be over before plans are known to pay, and are carried out.
    unwavering = functools.partial(VerifyPlanner, falls_back=False)
    monkeypatch.setattr(round_costs, "VerifyPlanner", unwavering)
    values: dict[str, object] = {"scheduler.max_num_seqs": 3, "max_model_len": 128}
    answers_by_mode = {}
    for mode in ("off", "dynamic"):
        config = override(EngineConfig(), values | {"speculation.mode": mode})
        backend = load_backend(BackendConfig("reference", config.numerics, {}))
        if mode == "dynamic":
            costs = tmp_path / "costs.json"
            save_costs(costs, STEEP, cost_facts(config, backend, max_drafts=5))
            config = override(config, {"speculation.cost_table": costs})
        engine = LLMEngine.from_config(config, backend=backend)
        try:
            params = SamplingParams(temperature=0.0, max_tokens=24)
            # Of tales the drafter is so sure that nothing is worth cutting.
            for index, prompt in enumerate(
                ("Once upon a time there was a farmer", "The ship went on, and", "def read(self")
            ):
                engine.add_request(f"r{index}", prompt, params)
            results = collect(engine)
            metrics = engine.speculation
        finally:
            engine.close()
        answers_by_mode[mode] = {
            name: outputs[-1].outputs[0].token_ids for name, outputs in results.items()
        }
    assert answers_by_mode["off"] == answers_by_mode["dynamic"]
    assert metrics is not None
    assert 0 < metrics.places.accepted.sum() <= metrics.places.verified.sum()
    assert metrics.places.verified.sum() < 0.8 * metrics.places.drafted.sum()
    assert metrics.calibration.error() is not None
