"""Engines on the reference backend: golden checkpoints, and a model that follows a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer.config import EngineConfig, override
from deepinfer.device.backend import Backend
from deepinfer.device.hookspecs import BackendConfig
from deepinfer.device.registry import load_backend
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.worker import Worker
from deepinfer.model.caches import CacheGeometry, ModelCaches
from deepinfer.model.config import V41Config
from deepinfer.model.step_batch import StepBatch
from deepinfer.text.tokenizer import TextTokenizer

GOLDEN = Path(__file__).parents[2] / "data/golden"
MAX_STEPS = 3000
PREFERRED = 20.0

Script = Callable[[list[int]], int | Tensor]
Asked = Mapping[str, tuple[str | list[int], SamplingParams]]


class ScriptedModel:
    """Chooses each next token by a script of the tokens before it; keeps real caches unused."""

    def __init__(self, config: V41Config, backend: Backend, script: Script) -> None:
        self._config, self._backend, self._script = config, backend, script
        self._tokens: dict[int, list[int]] = {}

    def create_caches(self, geometry: CacheGeometry) -> ModelCaches:
        return ModelCaches(self._config, geometry, self._backend)

    def forward(self, batch: StepBatch, caches: ModelCaches) -> Tensor:
        before: list[list[int]] = []
        first = 0
        for slot, context, length in zip(
            batch.seq_slots.tolist(),
            batch.context_lens.tolist(),
            batch.query_lens.tolist(),
            strict=True,
        ):
            known = self._tokens.setdefault(slot, [])
            known[context:] = batch.input_ids[first : first + length].tolist()
            assert len(known) == context + length, "the engine skipped a position"
            before += [known[: context + row + 1] for row in range(length)]
            first += length
        rows = [self._row(before[row]) for row in batch.logits_rows.tolist()]
        return torch.stack(rows) if rows else torch.zeros(0, self._config.vocab_size)

    def _row(self, known: list[int]) -> Tensor:
        wanted = self._script(known)
        if isinstance(wanted, Tensor):
            return wanted
        row = torch.zeros(self._config.vocab_size)
        row[wanted] = PREFERRED
        return row


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


@pytest.fixture
def make_scripted() -> Iterator[Callable[..., LLMEngine]]:
    """Builds an engine whose model follows a script."""
    made: list[LLMEngine] = []

    def make(script: Script, **overrides: object) -> LLMEngine:
        config = engine_config(overrides)
        directory = config.checkpoint.directory
        backend = load_backend(
            BackendConfig(config.backend.name, config.numerics, dict(config.backend.options))
        )
        model_config = V41Config.from_json(directory)
        model = ScriptedModel(model_config, backend, script)
        tokenizer = TextTokenizer.from_directory(directory)
        worker = Worker.for_engine(config, backend, model, model_config)
        made.append(LLMEngine(config, worker, model_config, tokenizer))
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
