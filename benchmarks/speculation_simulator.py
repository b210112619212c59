"""What dynamic verification gains over a fixed length, where drafts and costs are known exactly.

Confidences are independent, Beta distributed and right on average; a step takes a base time and a
time for each row, fitted to the published decode of one rank with 5 drafts. The planner is the
engine's own. `published` is the gain that was published for the engine that this one follows:
-1.5 % at 16 sequences, +5.4 % at 60 (an estimate), +11.0 % at 96. Nothing here is measured on a
device; the figures say whether planner, costs and scheduling fit together. The second table is
the time that a plan takes on the CPU of this machine.

    python benchmarks/speculation_simulator.py --json FILE.json --svg FILE.svg
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from deepinfer.cli.chart_svg import Panel, draw
from deepinfer.cli.report import write_json
from deepinfer.speculation.cost_tables import CostTables
from deepinfer.speculation.planner import Scheduling, VerifyPlanner
from deepinfer.speculation.simulator import Outcome, Scenario, simulate

PUBLISHED_GAIN = {16: -0.015, 60: 0.054, 96: 0.110}
FIXED = "fixed"
POLICIES = {
    FIXED: (None, True),
    "asynchronous": (Scheduling.ASYNCHRONOUS, True),
    "asynchronous, always planned": (Scheduling.ASYNCHRONOUS, False),
    "synchronous": (Scheduling.SYNCHRONOUS, True),
}


def gain(outcome: Outcome, fixed: Outcome) -> float:
    """Tokens per second above the fixed length, as a share."""
    return outcome.tokens_per_s / fixed.tokens_per_s - 1.0


def plan_us(scenario: Scenario, num_requests: int, scheduling: Scheduling) -> float:
    """Median time of a plan on this machine's CPU; graph tiers at every 8 rows."""
    costs = scenario.costs(6 * num_requests)
    tiers = tuple(range(8, 6 * num_requests + 1, 8)) or (6,)
    steps = CostTables(costs.draft_us, {n: scenario.row_us * n for n in tiers}, tiers)
    planner = VerifyPlanner(
        steps, max_drafts=5, max_num_seqs=num_requests, scheduling=scheduling, falls_back=False
    )
    generator = np.random.default_rng(0)
    times = []
    for _ in range(300):
        confidences = generator.beta(0.26, 0.04, (num_requests, 5)).astype(np.float32)
        survival = confidences.cumprod(axis=1, dtype=np.float32)
        begin = time.perf_counter_ns()
        planner.plan(num_requests, survival)
        times.append((time.perf_counter_ns() - begin) / 1000.0)
    return statistics.median(times)


def main() -> None:
    """Simulate, print the table, draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 16, 32, 60, 96, 256])
    parser.add_argument("--rounds", type=int, default=400_000, help="rounds of one sequence in all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    scenario = Scenario()
    print(f"{'sequences':>10} {'policy':<30}{'verified':>9}{'accepted':>9}{'tokens/s':>10}"
          f"{'gain':>9}{'planned':>9}{'published':>11}")  # fmt: skip
    figures: dict[str, dict[str, dict[str, float]]] = {}
    gains: dict[str, list[tuple[float, float]]] = {name: [] for name in POLICIES}
    verified: dict[str, list[tuple[float, float]]] = {name: [] for name in POLICIES}
    for count in args.sequences:
        print(f"  {count} sequences ...", end="\r", file=sys.stderr, flush=True)
        num_steps = min(12_000, max(1_500, args.rounds // count))
        outcomes = {
            name: simulate(scenario, count, num_steps, scheduling=scheduling, falls_back=falls_back)
            for name, (scheduling, falls_back) in POLICIES.items()
        }
        fixed = outcomes[FIXED]
        figures[str(count)] = {}
        for name, outcome in outcomes.items():
            share = gain(outcome, fixed)
            figures[str(count)][name] = asdict(outcome) | {"gain": share, "num_steps": num_steps}
            verified[name].append((count, outcome.num_verified))
            gains[name].append((count, 100.0 * share))
            published = PUBLISHED_GAIN.get(count) if name == "asynchronous" else None
            print(
                f"{count:>10} {name:<30}{outcome.num_verified:>9.3f}{outcome.num_accepted:>9.3f}"
                f"{outcome.tokens_per_s:>10,.0f}{100 * share:>+8.2f}%"
                f"{100 * outcome.planned_share:>8.1f}%"
                + ("" if published is None else f"{100 * published:>+10.1f}%")
            )
    print(f"\n{'sequences':>10} {'scheduling':<16}{'plan us':>9}")
    own_us: dict[str, dict[str, float]] = {}
    for count in (1, 16, 64, 256, 1024):
        own_us[str(count)] = {s.value: plan_us(scenario, count, s) for s in Scheduling}
        for name, value in own_us[str(count)].items():
            print(f"{count:>10} {name:<16}{value:>9.1f}")
    if args.json:
        results = {"scenario": asdict(scenario), "runs": figures, "plan_us": own_us}
        write_json(args.json, "speculation_simulator", results)
    if args.svg:
        lines = gains | {
            "published": [(n, 100 * share) for n, share in sorted(PUBLISHED_GAIN.items())]
        }
        ticks = args.sequences
        panels = [
            Panel("Tokens per second against 5 drafts always, %", "sequences", lines,
                  x_is_log=True, x_ticks=ticks),
            Panel("Verified drafts of a sequence in a step", "sequences", verified,
                  y_range=(0.0, 5.0), x_is_log=True, x_ticks=ticks),
        ]  # fmt: skip
        caption = (
            f"simulated: step {scenario.base_us / 1000:g} ms + {scenario.row_us:g} us a row, "
            f"{scenario.overhead_us:g} us a planned step; confidences Beta, mean {scenario.mean:g}"
        )
        args.svg.write_text(draw(panels, caption=caption), encoding="utf-8")


if __name__ == "__main__":
    main()
