"""Tokens per second without drafts, with a fixed number of them, and with planned verification.

For each number of sequences one engine of each mode decodes the same prompts greedily: beginnings
of held-out texts of several domains, and of tales. The engines take turns in blocks of the same
time, so that a noisy machine hits all of them; a block decodes the prompts from their ends on, and
the first of each engine, in which graphs are captured, is not counted. All of them must give the
same tokens. Printed
are tokens per second (median of the blocks), the same per second of this process's CPU time, which
other processes disturb less where the model runs on the CPU, and per sequence and step the
verified and accepted drafts. Costs are measured once for each number of sequences, before
anything is timed.

    python -m benchmarks.speculation --json FILE.json --svg FILE.svg
    python -m benchmarks.speculation --backend cuda_sm100 --block-s 4
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine_benchmark import as_command, drafting, in_turns, positive
from deepinfer.cli.chart_svg import Panel, draw
from deepinfer.cli.report import write_json
from deepinfer.cli.speculation_svg import draw_metrics
from deepinfer.config import EngineConfig, override
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.evaluation.heldout import heldout_names, read_heldout
from deepinfer.speculation.metrics import SpeculationMetrics

MODES = ("off", "fixed", "dynamic")
TALES = (
    "Once upon a time there was a kind farmer named Clara.",
    "Long ago, in a village, there lived a curious clock maker called Mira. One day",
    "Once upon a time there was a little fox who lived near the river.",
    "In a small town by the sea there lived an old baker named Thomas.",
)
PROMPT_TOKENS = 32
ROOM_TOKENS = 4096
WATCHED_STEPS = 60
"""Steps of the first block: the planner only watches its first plans."""
SETTLING_STEPS = 10
"""Steps of a block before anything is timed."""


@dataclass(slots=True)
class Run:
    """One engine of a mode: its blocks so far.

    Attributes:
        engine: decodes.
        max_steps: steps in which no answer can come to its end.
        rates: tokens per second of each block.
        cpu_rates: the same per second of this process's CPU time.
        answers: the longest of each request.
    """

    engine: LLMEngine
    max_steps: int
    rates: list[float] = field(default_factory=list)
    cpu_rates: list[float] = field(default_factory=list)
    answers: dict[str, list[int]] = field(default_factory=dict)

    def block(self, count: int, block_s: float) -> tuple[float, float]:
        """Decode the prompts anew for some time; the steps in flight are finished inside it.

        Returns:
            Tokens per second, and per second of CPU time.
        """
        engine = self.engine
        params = SamplingParams(
            max_tokens=ROOM_TOKENS - PROMPT_TOKENS,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
        )
        before = engine.stats().generated_tokens
        for request_id, prompt in prompts(engine, count):
            engine.add_request(request_id, prompt, params, final_only=True)
        while engine.stats().generated_tokens < before + count:
            engine.step()
        for _ in range(SETTLING_STEPS if self.answers else WATCHED_STEPS):
            engine.step()
        engine.flush()
        before, begin = engine.stats().generated_tokens, time.perf_counter()
        cpu_begin, num_steps = time.process_time(), 0
        while time.perf_counter() - begin < block_s and num_steps < self.max_steps:
            engine.step()
            num_steps += 1
        engine.flush()
        seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
        num_tokens = engine.stats().generated_tokens - before
        for request_id, _ in prompts(engine, count):
            engine.abort(request_id)
        while engine.has_unfinished():
            for output in engine.step():
                self._keep(output.request_id, output.outputs[0].token_ids)
        return num_tokens / seconds, num_tokens / cpu_s

    def _keep(self, request_id: str, token_ids: list[int]) -> None:
        known = self.answers.get(request_id, [])
        shared = min(len(known), len(token_ids))
        if known[:shared] != token_ids[:shared]:
            sys.exit(f"{request_id} was answered in two ways by one engine")
        self.answers[request_id] = max(known, token_ids, key=len)

    @property
    def metrics(self) -> SpeculationMetrics | None:
        return self.engine.speculation


def prompts(engine: LLMEngine, count: int) -> Iterator[tuple[str, list[int]]]:
    """Request ids that begin with a domain, and the first tokens of a text of it."""
    domains = [*heldout_names(), "tales"]
    for number in range(count):
        domain, turn = domains[number % len(domains)], number // len(domains)
        if domain == "tales":
            text = TALES[turn % len(TALES)]
        else:
            # From the beginning of a line further and further into the text.
            whole = read_heldout(domain)
            start = 700 * turn % max(1, len(whole) - 800)
            text = whole[whole.find("\n", start) + 1 :][:400]
        yield f"{domain}-{number}", engine.tokenizer.encode(text)[:PROMPT_TOKENS]


def begin(args: argparse.Namespace, mode: str, count: int, costs: Path) -> Run:
    """An engine that has decoded a block already: graphs are captured, and first plans made."""
    values: dict[str, Any] = {
        "numerics": args.numerics,
        "backend.name": args.backend,
        "speculation.mode": mode,
        "scheduler.async_depth": args.depth,
        "scheduler.max_num_seqs": count,
        "scheduler.max_num_tokens": max(512, 6 * count),
        "max_model_len": ROOM_TOKENS,
        # Sized by default, the first engine would leave little to the others.
        "cache.num_blocks": count * (ROOM_TOKENS // EngineConfig().cache.block_size + 1),
    }
    if mode != "off":
        values["speculation.max_drafts"] = args.drafts
        values["speculation.cost_table"] = costs
    engine = LLMEngine.from_config(
        override(EngineConfig(), values), domain_of=lambda request_id: request_id.rpartition("-")[0]
    )
    num_drafts = 0 if mode == "off" else args.drafts
    run = Run(engine, (ROOM_TOKENS - PROMPT_TOKENS) // (1 + num_drafts) - WATCHED_STEPS - 2)
    run.block(count, args.block_s)
    return run


def check_same(runs: dict[str, Run], count: int) -> None:
    """Every mode's tokens, as far as both got.

    Raises:
        SystemExit: two modes differ.
    """
    first = runs[MODES[0]].answers
    for mode, run in runs.items():
        for name, tokens in run.answers.items():
            shared = min(len(tokens), len(first[name]))
            if tokens[:shared] != first[name][:shared]:
                sys.exit(f"{count} sequences: {mode} gives other tokens than off for {name}")


def measure(args: argparse.Namespace, count: int) -> tuple[dict[str, Any], SpeculationMetrics]:
    """Figures of each mode for one number of sequences, and the metrics of dynamic."""
    with tempfile.TemporaryDirectory() as folder:
        print(f"  {count} sequences: costs and prompts", file=sys.stderr, flush=True)
        costs = Path(folder) / "costs.json"
        runs = {mode: begin(args, mode, count, costs) for mode in MODES}
    for each in in_turns(list(runs.values()), args.rounds, f"{count} sequences"):
        rate, cpu_rate = each.block(count, args.block_s)
        each.rates.append(rate)
        each.cpu_rates.append(cpu_rate)
    figures: dict[str, Any] = {}
    for mode, run in runs.items():
        figures[mode] = {
            "tokens_per_s": statistics.median(run.rates),
            "tokens_per_cpu_s": statistics.median(run.cpu_rates),
            "blocks": run.rates,
        }
        if run.metrics is not None:
            figures[mode]["speculation"] = drafting(run.metrics)
        run.engine.close()
    check_same(runs, count)
    metrics = runs["dynamic"].metrics
    assert metrics is not None  # the mode drafts
    return figures, metrics


def main() -> None:
    """Measure, print the table, draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--numerics", default="normative")
    parser.add_argument("--sequences", type=positive, nargs="+", default=[1, 8, 16, 60, 96])
    parser.add_argument("--drafts", type=positive, default=5)
    parser.add_argument("--depth", type=int, default=1, help="scheduler.async_depth")
    parser.add_argument("--rounds", type=positive, default=5, help="blocks of each engine")
    parser.add_argument("--block-s", type=float, default=6.0, help="seconds of a block")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path, help="picture of the rates")
    parser.add_argument("--metrics-svg", type=Path, help="picture of the largest dynamic run")
    args = parser.parse_args()
    settings = {name: getattr(args, name) for name in
                ("backend", "numerics", "drafts", "depth", "rounds", "block_s")}  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    lines: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES[1:]}
    print(f"{'sequences':>10} {'mode':<9}{'tokens/s':>10}{'x off':>8}{'/CPU s':>9}{'verified':>10}"
          f"{'accepted':>10}{'planned':>9}")  # fmt: skip
    for count in args.sequences:
        figures, metrics = measure(args, count)
        found[str(count)] = figures
        for mode in MODES:
            row = figures[mode]
            ratio = row["tokens_per_s"] / figures["off"]["tokens_per_s"]
            cells = f"{count:>10} {mode:<9}{row['tokens_per_s']:>10.1f}{ratio:>8.3f}"
            cells += f"{row['tokens_per_cpu_s']:>9.1f}"
            if mode != "off":
                lines[mode].append((count, ratio))
                means = row["speculation"]["all"]["per_round"]
                planned = row["speculation"]["planned_share"]
                cells += f"{means['verified']:>10.2f}{means['accepted']:>10.2f}"
                cells += f"{100 * planned:>8.0f}%"
            print(cells, flush=True)
        if args.json:  # after each count, so that a run that is cut short leaves what it has
            write_json(args.json, "speculation", {"runs": found, "settings": settings})
    caption = f"{args.backend}, {args.numerics}, {args.drafts} drafts, depth {args.depth}"
    if args.svg:
        panel = Panel("Tokens per second against no drafts", "sequences", lines, x_is_log=True,
                      x_ticks=args.sequences)  # fmt: skip
        args.svg.write_text(draw([panel], caption=caption), encoding="utf-8")
    if args.metrics_svg:
        picture = draw_metrics(metrics, caption=f"{caption}, {count} sequences")
        args.metrics_svg.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    as_command(main)
