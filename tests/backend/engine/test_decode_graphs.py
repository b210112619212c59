"""Decode steps replayed by tier give the tokens and logprobs of steps issued one by one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer import LLM, SamplingParams
from deepinfer.config import EngineConfig, override
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.runtime import Graph, MemoryFacts, Runtime
from deepinfer.engine.graph_memory import GraphMemory
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.step_graphs import StepGraphs
from deepinfer.engine.worker import Worker
from deepinfer.speculation.cost_tables import CostTables
from deepinfer_reference.backend import ReferenceBackend
from deepinfer_reference.graph import ReferenceGraph
from deepinfer_reference.streams import InlineStream
from tests.backend.engine.conftest import ReplayingBackend, collect, scripted_engine
from tests.backend.engine.scripted_model import CheckingModel

VOCABULARY = 320
GOLDEN = Path(__file__).parents[2] / "data/golden/tiny_a"


def answers(
    backend: ReferenceBackend,
    numerics: Numerics,
    async_depth: int,
    *,
    max_drafts: int = 0,
    **fields: Any,  # noqa: ANN401 - any field of a request
) -> list[RequestOutput]:
    """Seven requests of different lengths, so that the batch shrinks through several tiers."""
    config = override(
        EngineConfig(),
        {
            "checkpoint.path": str(GOLDEN / "checkpoint"),
            "speculation.mode": "fixed" if max_drafts else "off",
            "speculation.max_drafts": max_drafts or None,
            "numerics": numerics.value,
            "max_model_len": 256,
            "scheduler.max_num_seqs": 8,
            "scheduler.async_depth": async_depth,
            "cache.block_size": 16,
        },
    )
    cases = json.loads((GOLDEN / "cases.json").read_text())["cases"]
    prompts = [case["prompt_ids"] for case in cases[:7]]
    params = [
        SamplingParams.model_validate(
            {
                "max_tokens": 4 + 3 * number, "temperature": 0.8 * (number % 2), "seed": number,
                "ignore_eos": True, "detokenize": False,
            }
            # The longest asks for the most, so that it does so alone in the end.
            | (fields if number == len(prompts) - 1 else {})
        )
        for number in range(len(prompts))
    ]  # fmt: skip
    with LLM(config, backend=backend) as llm:
        return llm.generate(prompts, params)


SPECIAL: dict[str, Any] = {
    "temperature": 0.9,
    "logprobs": 2,
    "min_tokens": 9,
    "presence_penalty": 0.5,
}


@pytest.mark.parametrize(
    ("numerics", "async_depth", "fields"),
    [
        (Numerics.EXACT, 0, {}),
        (Numerics.EXACT, 1, {"top_k": 20, "temperature": 1.0}),
        (Numerics.EXACT, 2, SPECIAL),
        (Numerics.NORMATIVE, 1, {}),
    ],
    ids=["exact0", "sorted1", "special2", "normative1"],
)
def test_replayed_steps_change_no_token(
    numerics: Numerics, async_depth: int, fields: dict[str, Any]
) -> None:
    config = BackendConfig("reference", numerics, {"runtime": "inline"})
    plain = answers(ReferenceBackend(config), numerics, 0, **fields)
    replayed = answers(ReplayingBackend(config), numerics, async_depth, **fields)
    for own, expected in zip(replayed, plain, strict=True):
        assert own.outputs[0].token_ids == expected.outputs[0].token_ids
        assert own.outputs[0].logprobs == expected.outputs[0].logprobs


@pytest.mark.parametrize("numerics", Numerics)
def test_replayed_verifications_and_drafts_change_no_token(numerics: Numerics) -> None:
    """Seeded answers, too: their drafts are drawn and judged by the same random numbers."""
    config = BackendConfig("reference", numerics, {"runtime": "inline"})
    plain = answers(ReferenceBackend(config), numerics, 1, max_drafts=3)
    replayed = answers(ReplayingBackend(config), numerics, 1, max_drafts=3)
    for own, expected in zip(replayed, plain, strict=True):
        assert own.outputs[0].token_ids == expected.outputs[0].token_ids
        assert own.outputs[0].logprobs == expected.outputs[0].logprobs


def liked(known: list[int]) -> torch.Tensor:
    """Logits of a few tokens that depend on all before them; the first is a likely one."""
    row = torch.zeros(VOCABULARY)
    first = 20 + (7 * sum(known) + 3 * len(known)) % 200
    row[first : first + 4] = torch.tensor([9.0, 8.5, 8.0, 7.0])
    return row


def half_liked(known: list[int]) -> torch.Tensor:
    return liked(known) if len(known) % 3 else liked([*known, 1])


SPECULATING: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 45},
    {"temperature": 0.8, "max_tokens": 17},
    {"temperature": 1.1, "max_tokens": 23, "top_k": 3},
    {"temperature": 0.0, "max_tokens": 12, "logprobs": 1},
    {"temperature": 0.6, "max_tokens": 2},
]
COSTS = CostTables({1: 1.0}, {1: 350.0, 200: 10300.0})


def life(
    mode: str, depth: int, *, replays: bool, reserved_bytes: int | None = None
) -> tuple[dict[str, list[int]], LLMEngine]:
    """Greedy, drawn and filtered drafts; requests that come late, end early and are preempted."""
    engine = scripted_engine(
        liked,
        {
            "speculation.mode": mode,
            "scheduler.async_depth": depth,
            "cache.block_size": 4,
            "cache.num_blocks": 16,
        },
        model_class=CheckingModel,
        runtime_seed=depth,
        propose=half_liked,
        confidence=lambda position: 0.3 + 0.6 * (position % 3 > 0),
        costs=COSTS,
        replays=replays,
    )
    if reserved_bytes is not None:
        shrinking = cast("Runtime", Shrinking(worker_of(engine)._runtime))
        graphs_of(engine)._memory = GraphMemory(shrinking, reserved_bytes)
    for number, fields in enumerate(SPECULATING):
        params = SamplingParams.model_validate({"seed": number, "ignore_eos": True} | fields)
        engine.add_request(f"r{number}", [5 + number] * (1 + 3 * number), params)
        engine.step()
    found = {name: outputs[-1].outputs[0].token_ids for name, outputs in collect(engine).items()}
    engine.close()
    return found, engine


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("mode", ["off", "fixed", "dynamic"])
def test_replayed_rounds_change_no_token(mode: str, depth: int) -> None:
    expected, eager = life(mode, depth, replays=False)
    found, replaying = life(mode, depth, replays=True)
    assert found == expected
    # Steps, preemptions and what came of drafts: a lost draft costs no token, but a round.
    assert replaying.stats() == eager.stats()
    assert replaying.stats().num_preemptions > 0
    tiers = graphs_of(replaying)._tiers.values()
    assert len({work for tier in tiers for work in tier.finish}) > 1


class Shrinking:
    """A runtime of which every capture takes a million bytes."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._num_captured = 0

    def memory(self) -> MemoryFacts:
        return MemoryFacts(10**9, 10**9 - 10**6 * self._num_captured)

    def capture(self, work: Callable[[], None]) -> Graph:
        self._num_captured += 1
        return self._runtime.capture(work)


@pytest.mark.parametrize("num_graphs", [0, 1, 4])
@pytest.mark.parametrize("mode", ["off", "fixed"])
def test_steps_without_memory_for_their_graph_change_no_token(
    mode: str, num_graphs: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is replayed; or the first half of some steps; or some steps and not others."""
    expected, eager = life(mode, 1, replays=False)
    reserved_bytes = max(0, num_graphs * 10**6 - 1)
    found, replaying = life(mode, 1, replays=True, reserved_bytes=reserved_bytes)
    assert found == expected
    assert replaying.stats() == eager.stats()
    assert graphs_of(replaying).num_graphs == num_graphs
    assert graphs_of(replaying)._memory.taken_bytes == num_graphs * 10**6
    warnings = [r.message for r in caplog.records if "are issued op by op" in r.message]
    assert len(warnings) == 1


def graphs_of(engine: LLMEngine) -> StepGraphs:
    graphs = worker_of(engine)._graphs
    assert graphs is not None
    return graphs


def worker_of(engine: LLMEngine) -> Worker:
    worker = engine._runner
    assert isinstance(worker, Worker)
    return worker


class Issued(TorchDispatchMode):
    """Counts what is issued to the compute stream; a replayed graph counts as one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self._is_replaying = False
        enqueue, replay = InlineStream.enqueue, ReferenceGraph.replay

        def counted_enqueue(stream: InlineStream, work: Callable[[], None]) -> None:
            with self:
                enqueue(stream, work)

        def counted_replay(graph: ReferenceGraph) -> None:
            self._is_replaying = True
            replay(graph)
            self._is_replaying = False
            self.counts["replay"] += 1

        patch.setattr(InlineStream, "enqueue", counted_enqueue)
        patch.setattr(ReferenceGraph, "replay", counted_replay)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if not self._is_replaying and not func.is_view:
            self.counts[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["off", "fixed", "dynamic"])
def test_a_plain_decode_step_is_two_copies_and_two_graphs(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = scripted_engine(
        liked,
        {"speculation.mode": mode, "scheduler.async_depth": 1},
        model_class=CheckingModel,
        propose=half_liked,
        costs=COSTS,
        replays=True,
    )
    for number in range(3):
        params = SamplingParams(max_tokens=60, seed=number, ignore_eos=True)
        engine.add_request(f"r{number}", [5 + number] * 4, params)
    for _ in range(5):
        engine.step()  # prompts, graphs, parameters
    issued = Issued(monkeypatch)
    for _ in range(4):
        engine.step()
    assert issued.counts == {"copy_": 8, "replay": 8}
    engine.close()
