"""Engines on the null device: real scheduling, scripted tokens, virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from deepinfer.config import EngineConfig, override
from deepinfer.device.null import CounterScript, NullRuntime, StepCosts, TokenScript
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.null_runner import NullStepRunner
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.timeline import Timeline
from deepinfer.model.config import V41Config
from deepinfer.model.replay import exact_rows
from deepinfer.text.tokenizer import TextTokenizer

CHECKPOINT = Path(__file__).parents[2] / "data/golden/tiny_a/checkpoint"
MAX_STEPS = 3000
# Short, so that sequences of a few dozen tokens begin inside a replay and outside of it.
WINDOW = 2
MANY = 1000
MakeTimeline = Callable[[Callable[[], float], Callable[[float], None]], Timeline]
# Above the special tokens and below the image placeholder; counts up, so gaps and repeats show.
COUNTING = CounterScript(first=20, vocab_size=300)


@dataclass(frozen=True, slots=True)
class NullEngine:
    """An engine, and the null device below it."""

    engine: LLMEngine
    runtime: NullRuntime
    runner: NullStepRunner

    def run(self) -> dict[str, RequestOutput]:
        """Step until nothing is open; the last result of every request, and no leak."""
        results: dict[str, RequestOutput] = {}
        for _ in range(MAX_STEPS):
            if not self.engine.has_unfinished():
                break
            results |= {output.request_id: output for output in self.engine.step()}
        else:
            pytest.fail(f"requests still open after {MAX_STEPS} steps: {self.engine.stats()}")
        self.check_idle()
        return results

    def check_idle(self) -> None:
        """No block, slot or sequence is held once every request has ended."""
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        used = (stats.kv_used_blocks, self.engine._scheduler.slots.num_used)
        assert used == (0, 0), f"memory is left behind: {used[0]} blocks, {used[1]} slots"


def null_engine(
    script: TokenScript = COUNTING,
    overrides: Mapping[str, object] | None = None,
    *,
    max_drafts: int = 0,
    costs: StepCosts | None = None,
    timeline: MakeTimeline | None = None,
) -> NullEngine:
    """An engine on a null device that poisons what is released.

    Args:
        script: tokens and accepted drafts.
        overrides: of the configuration.
        max_drafts: drafts verified with each token.
        costs: device time of the steps.
        timeline: makes a timeline from the virtual clock and what moves it.
    """
    config = override(
        EngineConfig(),
        {
            "checkpoint.path": str(CHECKPOINT),
            "max_model_len": 256,
            "scheduler.max_num_seqs": 8,
            "cache.block_size": 4,
            "cache.num_blocks": 200,
        }
        | dict(overrides or {}),
    )
    runtime = NullRuntime(costs, poisons_released=True)
    model_config = V41Config.from_json(CHECKPOINT).model_copy(update={"sliding_window": WINDOW})
    runner = NullStepRunner(
        runtime,
        script,
        config,
        max_drafts=max_drafts,
        window=WINDOW,
        replay_len=MANY - exact_rows(model_config, MANY, 0).first,
    )
    tokenizer = TextTokenizer.from_directory(CHECKPOINT)
    engine = LLMEngine(
        config,
        runner,
        model_config,
        tokenizer,
        timeline=timeline(runtime.now_us, runtime.clock.advance) if timeline else None,
    )
    return NullEngine(engine, runtime, runner)


@pytest.fixture
def make_null() -> Iterator[Callable[..., NullEngine]]:
    """Builds null engines; closes them, which raises what their device work raised."""
    made: list[NullEngine] = []

    def make(
        script: TokenScript = COUNTING, *, max_drafts: int = 0, **overrides: object
    ) -> NullEngine:
        made.append(null_engine(script, overrides, max_drafts=max_drafts))
        return made[-1]

    yield make
    for null in made:
        null.engine.close()
