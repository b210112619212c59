"""Engines on the reference backend: golden checkpoints, and a model that follows a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from deepinfer.config import EngineConfig, override
from deepinfer.config.speculation import SpeculationMode
from deepinfer.device.backend import DECODE_GRAPHS, Backend
from deepinfer.device.hookspecs import BackendConfig
from deepinfer.device.overlay import checked
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.worker import Worker
from deepinfer.model.config import V41Config
from deepinfer.speculation.cost_tables import CostTables
from deepinfer.speculation.planner import Scheduling, VerifyPlanner
from deepinfer.text.tokenizer import TextTokenizer
from deepinfer_reference.backend import ReferenceBackend
from deepinfer_reference.runtime import ReferenceRuntime, RuntimeMode
from tests.backend.engine.any_budget import AnyBudget
from tests.backend.engine.scripted_model import Script, ScriptedDrafter, ScriptedModel

GOLDEN = Path(__file__).parents[2] / "data/golden"
MAX_STEPS = 3000

Asked = Mapping[str, tuple[str | list[int], SamplingParams]]


def engine_config(overrides: Mapping[str, object]) -> EngineConfig:
    """Exact numerics on tiny_a, inline, with a few dotted paths replaced."""
    return override(
        EngineConfig(),
        {
            "checkpoint.path": str(GOLDEN / "tiny_a/checkpoint"),
            "numerics": "exact",
            "backend.options": {"runtime": "inline"},
            "max_model_len": 256,
            "scheduler.max_num_seqs": 16,
            "cache.block_size": 16,
        }
        | dict(overrides),
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are faster without helpers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def make_config() -> Callable[..., EngineConfig]:
    """Builds the configuration that `make_engine` takes for the same overrides."""
    return lambda **overrides: engine_config(overrides)


@pytest.fixture(scope="module")
def make_engine() -> Iterator[Callable[..., LLMEngine]]:
    """Builds an engine from overrides; the same overrides give the same engine in a module."""
    made: dict[str, LLMEngine] = {}

    def make(**overrides: object) -> LLMEngine:
        key = repr(sorted(overrides.items()))
        if key not in made:
            made[key] = LLMEngine.from_config(engine_config(overrides))
        return made[key]

    yield make
    for engine in made.values():
        engine.close()


class ReplayingBackend(ReferenceBackend):
    """The reference, with decode steps padded to tiers and replayed."""

    features = ReferenceBackend.features | {DECODE_GRAPHS}


def scripted_engine(
    script: Script,
    overrides: Mapping[str, object],
    *,
    model_class: type[ScriptedModel] = ScriptedModel,
    runtime_seed: int | None = None,
    propose: Script | None = None,
    budget_seed: int | None = None,
    block_size: int | None = None,
    max_positions: int | None = None,
    confidence: Callable[[int], float] = lambda position: 0.9,
    costs: CostTables | None = None,
    replays: bool = False,
    backend: Backend | None = None,
) -> LLMEngine:
    """An engine whose model follows a script.

    Args:
        script: next token, or its logits, from the tokens so far.
        overrides: of `engine_config`.
        model_class: how the model remembers the tokens.
        runtime_seed: of an adversarial runtime; None takes the runtime of the configuration.
        propose: next draft from the tokens so far; None: the target's own script. Counts if the
            configuration speculates.
        budget_seed: of a planner that chooses any budget, if the configuration speculates; None:
            all drafts are verified, or what the costs say.
        block_size: of the drafter; None: that of the checkpoint.
        max_positions: of the model; None: that of the checkpoint.
        confidence: of the draft at a position.
        costs: what the planner of `speculation.mode=dynamic` reckons with; it never rests.
        replays: decode steps are replayed as graphs, on the reference backend.
        backend: another one; None: the reference.
    """
    config = engine_config(overrides)
    directory = config.checkpoint.directory
    if backend is None:
        backend = reference = (ReplayingBackend if replays else ReferenceBackend)(
            BackendConfig(config.backend.name, config.numerics, dict(config.backend.options))
        )
        if runtime_seed is not None:
            reference.close()
            reference.runtime = ReferenceRuntime(RuntimeMode.ADVERSARIAL, seed=runtime_seed)
    model_config = V41Config.from_json(directory)
    changes = {"dspark_block_size": block_size, "max_position_embeddings": max_positions}
    model_config = model_config.model_copy(
        update={name: value for name, value in changes.items() if value is not None}
    )
    model = model_class(model_config, backend, script)
    # The worker's own calls of ops are checked, too.
    drafter = None
    if config.speculation.is_on:
        drafter = ScriptedDrafter(model, propose or script, confidence=confidence)
    worker = Worker.for_engine(config, checked(backend), model, model_config, drafter=drafter)
    tokenizer = TextTokenizer.from_directory(directory)
    planner: VerifyPlanner | None = None
    if worker.max_drafts and budget_seed is not None:
        max_num_seqs = config.scheduler.max_num_seqs
        planner = AnyBudget(budget_seed, max_drafts=worker.max_drafts, max_num_seqs=max_num_seqs)
    elif config.speculation.mode is SpeculationMode.DYNAMIC:
        assert costs is not None, "dynamic speculation wants costs"
        lags = config.scheduler.async_depth > 0
        planner = VerifyPlanner(
            costs,
            max_drafts=worker.max_drafts,
            max_num_seqs=config.scheduler.max_num_seqs,
            scheduling=Scheduling.ASYNCHRONOUS if lags else Scheduling.SYNCHRONOUS,
            falls_back=False,
            overhead_us=0.0,
        )
    return LLMEngine(config, worker, model_config, tokenizer, planner=planner)


@pytest.fixture
def make_scripted() -> Iterator[Callable[..., LLMEngine]]:
    """Builds an engine whose model follows a script."""
    made: list[LLMEngine] = []

    def make(script: Script, **overrides: object) -> LLMEngine:
        made.append(scripted_engine(script, overrides))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def check_no_leak(engine: LLMEngine) -> None:
    """No block, slot or sequence is held once every request has ended."""
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_used_blocks) == (0, 0, 0)
    assert engine._scheduler.slots.num_used == 0
    assert not engine.has_unfinished()


def collect(engine: LLMEngine, max_running: int | None = None) -> dict[str, list[RequestOutput]]:
    """Step until nothing is open; every result of every request, and no leak."""
    results: dict[str, list[RequestOutput]] = {}
    for _ in range(MAX_STEPS):
        if not engine.has_unfinished():
            break
        for output in engine.step():
            results.setdefault(output.request_id, []).append(output)
        assert max_running is None or engine.stats().num_running <= max_running
    else:
        pytest.fail(f"requests still open after {MAX_STEPS} steps: {engine.stats()}")
    check_no_leak(engine)
    return results


@pytest.fixture(scope="module")
def drain() -> Callable[..., dict[str, list[RequestOutput]]]:
    """Steps an engine to its end and returns all results of each request in order."""
    return collect


@pytest.fixture(scope="module")
def ask() -> Callable[[LLMEngine, Asked], dict[str, RequestOutput]]:
    """Asks an engine a few requests at once and returns the last result of each."""

    def ask_all(engine: LLMEngine, asked: Asked) -> dict[str, RequestOutput]:
        for request_id, (prompt, params) in asked.items():
            engine.add_request(request_id, prompt, params)
        return {request_id: outputs[-1] for request_id, outputs in collect(engine).items()}

    return ask_all


@pytest.fixture(scope="module")
def prompts() -> Sequence[list[int]]:
    """Sixteen prompts of 1 to 46 tokens, all different from the first token on."""
    return [[(17 * i + 7 * j + i * j) % 311 + 5 for j in range(1 + 3 * i)] for i in range(16)]
