"""The asynchronous scheduler against the plain loop on a real backend, side by side.

For each number of sequences one engine of each depth decodes the same requests; they alternate in
blocks of steps, so that a noisy machine hits both. Printed are tokens per second, the device's idle
share between and inside steps (gaps inside a forward whose kernels are launched one by one are not
seen by the events), and the host's own time in a step. The tokens of all depths must be the same.
After `--limit` seconds no further block begins; what is left of the answers is not decoded.
Timelines are of one more block of each depth, because writing them takes the host's time.

    python -m benchmarks.async_depth --backend cuda_sm100 --out async_depth.json --traces traces/
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine_benchmark import as_command, positive
from deepinfer.cli.report import write_json
from deepinfer.config import EngineConfig, override
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.timeline import RecordedTimeline, TimelineTotals
from deepinfer.engine.trace_file import TraceFile


@dataclass(slots=True)
class Run:
    """One engine: its figures so far."""

    engine: LLMEngine
    request_ids: list[str]
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

    def end(self) -> None:
        """End all answers where they are and free the device."""
        for request_id in self.request_ids:
            self.engine.abort(request_id)
        while self.engine.has_unfinished():
            self._step()
        self.engine.close()

    def _step(self) -> None:
        for output in self.engine.step():
            self.answers[output.request_id] = output.outputs[0].token_ids

    @property
    def timeline(self) -> RecordedTimeline:
        """The engine's timeline, which was asked for."""
        timeline = self.engine.timeline
        assert isinstance(timeline, RecordedTimeline)
        return timeline

    def figures(self) -> dict[str, float]:
        """Tokens per second (median over blocks), idle share, host time by step."""
        rates = [n / s for n, s in zip(self.num_tokens, self.seconds, strict=True)]
        totals = self.timeline.totals
        return {
            "tokens_per_s": statistics.median(rates),
            "idle_share": totals.idle_share,
            "host_us_per_step": totals.host_work_us / totals.num_steps,
            "device_us_per_step": totals.device_busy_us / totals.num_steps,
        }


def begin(config: EngineConfig, num_seqs: int, num_tokens: int) -> Run:
    """An engine that decodes `num_seqs` sequences; prompts are computed already."""
    engine = LLMEngine.from_config(config, timed=True)
    params = SamplingParams(
        max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False
    )
    request_ids = [f"r{index}" for index in range(num_seqs)]
    for index, request_id in enumerate(request_ids):
        prompt = [(7 * index + 13 * position) % 4000 + 10 for position in range(16)]
        engine.add_request(request_id, prompt, params, final_only=True)
    run = Run(engine, request_ids)
    while engine.stats().generated_tokens < 2 * num_seqs:
        engine.step()
    engine.flush()
    # What came before the first block, such as capturing graphs, is not measured.
    run.timeline.totals = TimelineTotals()
    return run


def measure(args: argparse.Namespace, num_seqs: int) -> dict[str, dict[str, float]]:
    """Figures of each depth for one number of sequences.

    Raises:
        SystemExit: the depths gave different tokens.
    """
    num_tokens = (args.rounds + 1) * args.steps + 16
    runs: dict[str, Run] = {}
    for depth in args.depths:
        values: dict[str, Any] = {
            "numerics": args.numerics,
            "backend.name": args.backend,
            "scheduler.async_depth": depth,
            "scheduler.max_num_seqs": num_seqs,
            "scheduler.max_num_tokens": max(512, num_seqs),
            "max_model_len": num_tokens + 32,
            # Sized by default, the first engine would leave little to the others.
            "cache.num_blocks": num_seqs * (num_tokens // EngineConfig().cache.block_size + 2),
        }
        runs[f"depth {depth}"] = begin(override(EngineConfig(), values), num_seqs, num_tokens)
    limit = time.perf_counter() + args.limit / len(args.sequences)
    for round_number in range(args.rounds):
        # Two blocks at least, as the first still warms up.
        if round_number >= 2 and time.perf_counter() > limit:
            break
        print(f"\r  {num_seqs} sequences, round {round_number + 1}/{args.rounds}  ", end="",
              file=sys.stderr, flush=True)  # fmt: skip
        for run in runs.values():
            run.steps(args.steps)
    print(file=sys.stderr)
    found = {name: run.figures() for name, run in runs.items()}
    if args.traces:
        for depth, run in zip(args.depths, runs.values(), strict=True):
            run.timeline.write_to(
                TraceFile(args.traces / f"seqs{num_seqs}_depth{depth}.trace.json")
            )
            run.steps(args.steps)
    for run in runs.values():
        run.end()
    least = 2 * args.steps  # what every answer has, whatever was in flight at its end
    for run in runs.values():
        for request_id, other in next(iter(runs.values())).answers.items():
            own = run.answers[request_id]
            length = min(len(own), len(other))
            if length < least or own[:length] != other[:length]:
                sys.exit(f"{num_seqs} sequences: the depths gave different tokens")
    return found


def table_of(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    """Markdown, a row for each number of sequences and depth."""
    lines = ["| sequences | depth | tokens/s | device idle | host us | device us |"]
    lines.append("|---" * 6 + "|")
    for count, by_depth in figures.items():
        lines += [
            f"| {count} | {name.removeprefix('depth ')} | {row['tokens_per_s']:,.1f} | "
            f"{row['idle_share']:.2%} | {row['host_us_per_step']:.0f} | "
            f"{row['device_us_per_step']:.0f} |"
            for name, row in by_depth.items()
        ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--numerics", default="normative")
    parser.add_argument("--sequences", type=positive, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 1])
    parser.add_argument(
        "--rounds", type=positive, default=10, help="blocks of steps of each engine"
    )
    parser.add_argument("--steps", type=positive, default=20, help="steps in a block")
    parser.add_argument("--traces", type=Path, help="folder for the timelines of all runs")
    parser.add_argument("--limit", type=float, default=600, help="seconds for all blocks")
    parser.add_argument("--out", type=Path, help="file of the figures")
    args = parser.parse_args()
    if args.traces:
        args.traces.mkdir(parents=True, exist_ok=True)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for count in args.sequences:
        figures[str(count)] = measure(args, count)
        if args.out:  # after each count, so that a run that is cut short leaves what it has
            settings = {"rounds": args.rounds, "steps": args.steps, "backend": args.backend}
            result = {"runs": figures, "settings": settings, "table": table_of(figures)}
            write_json(args.out, "async_depth", result)
    print(table_of(figures))


if __name__ == "__main__":
    as_command(main)
