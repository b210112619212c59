"""The asynchronous scheduler against the plain loop on a real backend, side by side.

For each number of sequences one engine of each depth decodes the same requests; they alternate in
blocks of steps, so that a noisy machine hits both. Printed are tokens per second, the device's idle
share between and inside steps (gaps inside a forward whose kernels are launched one by one are not
seen by the events), and the host's own time in a step. The tokens of all depths must be the same.

    python benchmarks/async_depth.py --backend cuda_sm100 --json async_depth.json --traces traces/
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer.cli.report import write_json
from deepinfer.config import EngineConfig, override
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.timeline import RecordedTimeline


@dataclass(slots=True)
class Run:
    """One engine: its figures so far."""

    engine: LLMEngine
    seconds: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    answers: dict[str, list[int]] = field(default_factory=dict)

    def steps(self, count: int) -> None:
        """Run steps; their time and tokens are kept."""
        before, begin = self.engine.stats().generated_tokens, time.perf_counter()
        for _ in range(count):
            self._step()
        # Otherwise a step in flight would end in the other engine's time.
        self.engine.flush()
        self.seconds.append(time.perf_counter() - begin)
        self.num_tokens.append(self.engine.stats().generated_tokens - before)

    def drain(self) -> None:
        """Run to the end and free the device."""
        while self.engine.has_unfinished():
            self._step()
        self.engine.close()

    def _step(self) -> None:
        for output in self.engine.step():
            self.answers[output.request_id] = output.outputs[0].token_ids

    def figures(self) -> dict[str, float]:
        """Tokens per second (median over blocks), idle share, host time by step."""
        timeline = self.engine.timeline
        assert isinstance(timeline, RecordedTimeline)  # it was asked for
        rates = [n / s for n, s in zip(self.num_tokens, self.seconds, strict=True)]
        totals = timeline.totals
        return {
            "tokens_per_s": statistics.median(rates),
            "idle_share": totals.idle_share,
            "host_us_per_step": totals.host_work_us / totals.num_steps,
            "device_us_per_step": totals.device_busy_us / totals.num_steps,
        }


def begin(config: EngineConfig, num_seqs: int, num_tokens: int, trace: Path | None) -> Run:
    """An engine that decodes `num_seqs` sequences; prompts are computed already."""
    engine = LLMEngine.from_config(config, timeline_file=trace, timed=True)
    params = SamplingParams(
        max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False
    )
    for index in range(num_seqs):
        prompt = [(7 * index + 13 * position) % 4000 + 10 for position in range(16)]
        engine.add_request(f"r{index}", prompt, params, final_only=True)
    run = Run(engine)
    while engine.stats().generated_tokens < 2 * num_seqs:
        engine.step()
    engine.flush()
    return run


def measure(args: argparse.Namespace, num_seqs: int) -> dict[str, dict[str, float]]:
    """Figures of each depth for one number of sequences.

    Raises:
        SystemExit: the depths gave different tokens.
    """
    num_tokens = args.rounds * args.steps + 16
    runs: dict[str, Run] = {}
    for depth in args.depths:
        values: dict[str, Any] = {
            "numerics": args.numerics,
            "backend.name": args.backend,
            "scheduler.async_depth": depth,
            "scheduler.max_num_seqs": num_seqs,
            "scheduler.max_num_tokens": max(512, num_seqs),
            "max_model_len": num_tokens + 32,
        }
        trace = args.traces / f"seqs{num_seqs}_depth{depth}.trace.json" if args.traces else None
        runs[f"depth {depth}"] = begin(
            override(EngineConfig(), values), num_seqs, num_tokens, trace
        )
    for round_number in range(args.rounds):
        print(f"\r  {num_seqs} sequences, round {round_number + 1}/{args.rounds}  ", end="",
              file=sys.stderr, flush=True)  # fmt: skip
        for run in runs.values():
            run.steps(args.steps)
    print(file=sys.stderr)
    for run in runs.values():
        run.drain()
    first, *others = runs.values()
    if any(run.answers != first.answers for run in others):
        sys.exit(f"{num_seqs} sequences: the depths gave different tokens")
    return {name: run.figures() for name, run in runs.items()}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--numerics", default="normative")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rounds", type=int, default=10, help="blocks of steps of each engine")
    parser.add_argument("--steps", type=int, default=20, help="steps in a block")
    parser.add_argument("--traces", type=Path, help="folder for the timelines of all runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.traces:
        args.traces.mkdir(parents=True, exist_ok=True)
    figures = {str(count): measure(args, count) for count in args.sequences}
    print(f"{'sequences':>10}{'':>10}{'tokens/s':>12}{'idle':>9}{'host us':>10}{'device us':>11}")
    for count, by_depth in figures.items():
        for name, row in by_depth.items():
            print(
                f"{count:>10}{name:>10}{row['tokens_per_s']:>12.1f}{100 * row['idle_share']:>8.2f}%"
                f"{row['host_us_per_step']:>10.0f}{row['device_us_per_step']:>11.0f}"
            )
    if args.json:
        settings = {"rounds": args.rounds, "steps": args.steps, "backend": args.backend}
        write_json(args.json, "async_depth", {"runs": figures, "settings": settings})


if __name__ == "__main__":
    main()
