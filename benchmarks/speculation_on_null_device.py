"""Speculation where the host is the limit: real host work beside a device that is made up.

Everything of the engine is real but the device: a step takes what it is said to take by its rows,
and the host's own CPU time passes on the device's clock. So one can see on any machine what a
planner does where steps are nearly flat in rows and no longer than the host's work, as those of a
tiny model on a large GPU are. Drafts are those of the simulator: confidences from a Beta
distribution, right on average. Off, fixed and dynamic take turns in blocks.

    python -m benchmarks.speculation_on_null_device --step-us 1200 --row-us 0
    python -m benchmarks.speculation_on_null_device --step-us 12350 --row-us 17.9
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine_benchmark import as_command, drafting, in_turns, positive
from deepinfer.cli.report import write_json
from deepinfer.config import EngineConfig, override
from deepinfer.device.null import NullRuntime, RandomScript, StepCosts, VirtualClock
from deepinfer.device.runtime import StepKind
from deepinfer.engine.batch_builder import BuiltStep
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.null_runner import NullStepRunner
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.state_copies import save_windows
from deepinfer.engine.step_runner import PreSamplerSync
from deepinfer.engine.step_state import SamplerOutput, SchedulerOutputs, WorkerStepState
from deepinfer.engine.step_tiers import row_tier
from deepinfer.model.config import V41Config
from deepinfer.speculation.budget import admitted
from deepinfer.speculation.cost_tables import CostTables
from deepinfer.speculation.planner import Scheduling, VerifyPlanner
from deepinfer.text.tokenizer import TextTokenizer

MODES = ("off", "fixed", "dynamic")
CONCENTRATION = 0.3
PROMPT = [10, 20, 30, 40]
BLOCK_SIZE = 64


class HostPacedClock(VirtualClock):
    """A virtual clock on which this thread's CPU time passes, but not that of made-up work."""

    def __init__(self) -> None:
        super().__init__()
        self._mark_ns = time.thread_time_ns()

    @property
    def now_us(self) -> float:
        """The time, the host's work until now counted."""
        self._catch_up()
        return self._now_us

    def read_us(self) -> float:
        """The time as the engine's own clock would tell it: at little cost, and nothing happens."""
        return self._now_us + (time.thread_time_ns() - self._mark_ns) / 1000.0

    def advance(self, duration_us: float) -> None:
        """Let the host work for so long, after what it has worked until now."""
        self._catch_up()
        super().advance(duration_us)

    def advance_to(self, time_us: float) -> None:
        """Move to a time, or to now if that is later."""
        self._catch_up()
        super().advance_to(time_us)
        self._mark_ns = time.thread_time_ns()

    def _catch_up(self) -> None:
        if self._is_moving:
            return  # inside made-up work
        elapsed_us = (time.thread_time_ns() - self._mark_ns) / 1000.0
        super().advance_to(self._now_us + elapsed_us)
        self._mark_ns = time.thread_time_ns()


class DraftingRunner(NullStepRunner):
    """A null runner whose drafts have confidences, and which deals budgets out."""

    def __init__(
        self,
        runtime: NullRuntime,
        config: EngineConfig,
        costs: CostTables,
        *,
        max_drafts: int,
        mean: float,
        launch_us: float,
        seed: int,
    ) -> None:
        script = RandomScript(seed, 256)
        super().__init__(runtime, script, config, max_drafts=max_drafts, checks_memory=False)
        self._null, self._costs, self._launch_us = runtime, costs, launch_us
        self._alpha = mean * CONCENTRATION
        self._generator = np.random.default_rng(seed)
        shape = (config.scheduler.max_num_seqs, max(1, max_drafts))
        self._confidences = np.ones(shape, dtype=np.float32)

    def launch(
        self,
        scheduled: SchedulerOutputs,
        built: BuiltStep,
        pre_sampler_sync: PreSamplerSync,
        *,
        timed: bool = False,
    ) -> WorkerStepState:
        """Issue a step, after made-up work of the host; it takes what its tier costs."""
        stream, num_rows = self._null.compute_stream, scheduled.num_rows
        self._null.costs = StepCosts(
            dict.fromkeys(StepKind, self._step_us(scheduled.kind, num_rows)), row_us=0.0
        )
        width = 1 + self.max_drafts
        count = built.num_samples
        output = SamplerOutput(
            token_ids=torch.full((count, width), 7),
            num_accepted=torch.zeros(count, dtype=torch.int64),
            num_verified=torch.zeros(count, dtype=torch.int64),
            finite=torch.ones((count, width), dtype=torch.bool),
            draft_ids=torch.full((count, self.max_drafts), 7),
            survival=torch.ones((count, self.max_drafts), dtype=torch.float64),
            logprobs=None,
            prompt_logprobs=None,
        )
        self._null.clock.advance(self._launch_us)
        with self._null.step(scheduled.kind, num_rows):
            stream.enqueue(lambda: self._verify_and_draft(scheduled, built, output))
        forwarded = stream.record_event()
        pre_sampler_sync()
        saved = save_windows(scheduled, self.copies)
        return WorkerStepState(scheduled, output, forwarded, stream.record_event(), saved)

    def _step_us(self, kind: StepKind, num_rows: int) -> float:
        if kind is not StepKind.DECODE:
            return 1000.0
        draft_us = next(iter(self._costs.draft_us.values())) if self.max_drafts else 0.0
        return self._costs.verify_us[row_tier(num_rows)] + draft_us

    def _verify_and_draft(
        self, scheduled: SchedulerOutputs, built: BuiltStep, output: SamplerOutput
    ) -> None:
        if self.max_drafts == 0:
            return
        slots = [metadata.slot for metadata in scheduled.sequences if metadata.samples]
        if scheduled.kind is StepKind.DECODE:
            known = self._confidences[slots]
            lengths = built.batch.query_lens.numpy() - 1
            if built.draft_budget.shape[0]:
                budget = int(built.draft_budget[0])
                lengths = np.minimum(lengths, admitted(known.cumprod(axis=1), budget))
            luck = self._generator.random(known.shape, dtype=np.float32)
            right = (luck < known).cumprod(axis=1).sum(axis=1)
            output.num_verified.copy_(torch.from_numpy(lengths))
            output.num_accepted.copy_(torch.from_numpy(np.minimum(right, lengths)))
        shape = (len(slots), self.max_drafts)
        drawn = self._generator.beta(self._alpha, CONCENTRATION - self._alpha, shape)
        self._confidences[slots] = drawn.astype(np.float32)
        survival = self._confidences[slots].cumprod(axis=1).astype(np.float64)
        output.survival.copy_(torch.from_numpy(survival))


@dataclass(slots=True)
class Run:
    """One engine of a mode on a clock of its own."""

    engine: LLMEngine
    now_us: Callable[[], float]
    rates: list[float] = field(default_factory=list)
    step_us: list[float] = field(default_factory=list)

    def block(self, num_steps: int) -> None:
        """Decode so many steps, or until all answers have ended."""
        before, begin_us = self.engine.stats(), self.now_us()
        for _ in range(num_steps):
            self.engine.step()
        self.engine.flush()
        after, passed_us = self.engine.stats(), self.now_us() - begin_us
        self.rates.append((after.generated_tokens - before.generated_tokens) / passed_us * 1e6)
        self.step_us.append(passed_us / (after.num_steps - before.num_steps))


def made_up_costs(args: argparse.Namespace, count: int) -> CostTables:
    """Times of each tier: a line in rows."""
    tiers = sorted({row_tier(rows) for rows in range(1, count * (1 + args.drafts) + 1)})
    verify_us = {tier: args.step_us + args.row_us * tier for tier in tiers}
    return CostTables({1: args.draft_us}, verify_us, tuple(tiers), relative_noise=0.005)


def begin(args: argparse.Namespace, mode: str, count: int) -> Run:
    """An engine whose prompts are computed already."""
    most_tokens = args.steps * args.rounds * (1 + args.drafts) + 1000
    config = override(
        EngineConfig(),
        {
            "scheduler.async_depth": args.depth,
            "scheduler.max_num_seqs": count,
            "scheduler.max_num_tokens": max(512, (1 + args.drafts) * count),
            "cache.num_blocks": count * (most_tokens // BLOCK_SIZE + 4),
            "cache.block_size": BLOCK_SIZE,
        },
    )
    directory = config.checkpoint.directory
    model = V41Config.from_json(directory)
    model = model.model_copy(update={"max_position_embeddings": most_tokens + 100})
    costs = made_up_costs(args, count)
    runtime = NullRuntime()
    runtime.clock = clock = HostPacedClock()
    runner = DraftingRunner(
        runtime, config, costs, max_drafts=0 if mode == "off" else args.drafts,
        mean=args.mean, launch_us=args.launch_us, seed=count,
    )  # fmt: skip
    planner = None
    if mode == "dynamic":
        planner = VerifyPlanner(
            costs,
            max_drafts=args.drafts,
            max_num_seqs=count,
            max_rows=config.scheduler.max_num_tokens,
            scheduling=Scheduling.ASYNCHRONOUS if args.depth else Scheduling.SYNCHRONOUS,
            clock_us=clock.read_us,
        )
    tokenizer = TextTokenizer.from_directory(directory)
    engine = LLMEngine(config, runner, model, tokenizer, planner=planner)
    params = SamplingParams(
        temperature=0.0, max_tokens=most_tokens, ignore_eos=True, detokenize=False
    )
    for index in range(count):
        engine.add_request(f"r{index}", PROMPT, params, final_only=True)
    while engine.stats().generated_tokens < count:
        engine.step()
    engine.flush()
    return Run(engine, runtime.now_us)


def measure(args: argparse.Namespace, count: int) -> dict[str, dict[str, Any]]:
    """Figures of each mode for one number of sequences."""
    runs = {mode: begin(args, mode, count) for mode in MODES}
    for each in in_turns(list(runs.values()), args.rounds, f"{count} sequences"):
        each.block(args.steps)
    figures: dict[str, dict[str, Any]] = {}
    for mode, run in runs.items():
        metrics = run.engine.speculation
        figures[mode] = {
            "tokens_per_s": statistics.median(run.rates),
            "step_us": statistics.median(run.step_us),
            "blocks": run.rates,
            "speculation": None if metrics is None else drafting(metrics),
        }
        run.engine.close()
    return figures


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=positive, nargs="+", default=[1, 16, 96, 256])
    parser.add_argument("--drafts", type=positive, default=5)
    parser.add_argument("--mean", type=float, default=0.865, help="mean confidence")
    parser.add_argument("--step-us", type=float, default=1200.0, help="a step without rows")
    parser.add_argument("--row-us", type=float, default=0.0, help="a row")
    parser.add_argument("--draft-us", type=float, default=100.0, help="a draft pass")
    parser.add_argument(
        "--launch-us", type=float, default=0.0, help="made-up host work of a launch"
    )
    parser.add_argument("--depth", type=int, default=1, help="scheduler.async_depth")
    parser.add_argument("--rounds", type=positive, default=6, help="blocks of each engine")
    parser.add_argument("--steps", type=positive, default=150, help="steps of a block")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{'sequences':>10} {'mode':<9}{'tokens/s':>10}{'/ fixed':>9}{'us/step':>9}"
          f"{'verified':>10}{'accepted':>10}{'planned':>9}")  # fmt: skip
    found = {}
    for count in args.sequences:
        figures = found[str(count)] = measure(args, count)
        for mode in MODES:
            row = figures[mode]
            ratio = row["tokens_per_s"] / figures["fixed"]["tokens_per_s"]
            cells = f"{count:>10} {mode:<9}{row['tokens_per_s']:>10.0f}{ratio:>9.3f}"
            cells += f"{row['step_us']:>9.0f}"
            if row["speculation"] is not None:
                means = row["speculation"]["all"]["per_round"]
                planned = row["speculation"]["planned_share"]
                cells += f"{means['verified']:>10.2f}{means['accepted']:>10.2f}{planned:>9.0%}"
            print(cells, flush=True)
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        write_json(args.json, "speculation_on_null_device", {"runs": found, "settings": settings})


if __name__ == "__main__":
    as_command(main)
