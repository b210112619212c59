"""The asynchronous scheduler without a device: idle share, and what a step costs the host.

Three tables. The first is on virtual time: host work of a given share of the device's step, the
device's idle share at each depth. The second, on virtual time as well, is a file of requests
through a full batch: what it costs to admit each as soon as it fits, where a prefill step is dear.
The third is CPU time of this machine: the host's own time in a decode step by phase, for a number
of running sequences, median over the steps. No math is run; everything else of the engine is real
(scheduling, building, launching, committing, results).

    python benchmarks/scheduler_on_null_device.py --json scheduler_on_null_device.json
    python benchmarks/scheduler_on_null_device.py --traces traces
    deepinfer timeline plot traces/null_depth1.trace.json --steps 6
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from deepinfer.cli.report import write_json
from deepinfer.config import EngineConfig, override
from deepinfer.device.null import NullRuntime, RandomScript, StepCosts
from deepinfer.device.runtime import StepKind
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.null_runner import NullStepRunner
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.timeline import (
    DeviceSpan,
    HostSpan,
    Phase,
    RecordedTimeline,
    ScriptedHost,
    Timeline,
)
from deepinfer.engine.trace_file import TraceFile
from deepinfer.model.config import V41Config
from deepinfer.text.tokenizer import TextTokenizer

DEVICE_STEP_US = 1000.0
# About what the bundled model takes on an H200, whose prefill steps are issued op by op.
FILE_COSTS = StepCosts(
    {StepKind.PREFILL: 30_000.0, StepKind.DECODE: 1_700.0, StepKind.EMPTY: 0.0}, row_us=0.0
)
WORK: list[Phase] = [phase for phase in Phase if phase is not Phase.WAIT]


def make_engine(
    runtime: NullRuntime,
    timeline: Timeline,
    num_seqs: int,
    depth: int,
    num_tokens: int,
    options: Mapping[str, object] | None = None,
) -> LLMEngine:
    """An engine on the null device with `num_seqs` requests of `num_tokens` tokens to make."""
    config = override(
        EngineConfig(),
        {
            "scheduler.async_depth": depth,
            "scheduler.max_num_seqs": num_seqs,
            "scheduler.max_num_tokens": max(512, num_seqs),
            "cache.num_blocks": num_seqs * (num_tokens // 64 + 4),
        }
        | dict(options or {}),
    )
    directory = config.checkpoint.directory
    model = V41Config.from_json(directory)
    script = RandomScript(0, model.vocab_size - 1)
    runner = NullStepRunner(runtime, script, config, checks_memory=False)
    tokenizer = TextTokenizer.from_directory(directory)
    engine = LLMEngine(config, runner, model, tokenizer, timeline=timeline)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for index in range(num_seqs):
        prompt = [10 + index % 100, 20, 30, 40]
        engine.add_request(f"r{index}", prompt, params, final_only=True)
    return engine


def idle_share(host_share: float, depth: int, num_tokens: int, trace: Path | None = None) -> float:
    """The device's idle share when the host's work takes `host_share` of a device step."""
    runtime = NullRuntime(StepCosts(dict.fromkeys(StepKind, DEVICE_STEP_US), row_us=0.0))
    costs_us = dict.fromkeys(WORK, host_share * DEVICE_STEP_US / len(WORK))
    sink = TraceFile(trace) if trace else None
    host = ScriptedHost(runtime.now_us, runtime.clock.advance, costs_us, sink)
    engine = make_engine(runtime, host, 4, depth, num_tokens)
    while engine.has_unfinished():
        engine.step()
    engine.close()
    return host.totals.idle_share


class Sink:
    """Span sink that keeps nothing."""

    def host(self, span: HostSpan) -> None:
        pass

    def device(self, span: DeviceSpan) -> None:
        pass

    def idle(self, begin_us: float, end_us: float) -> None:
        pass

    def mark(self, text: str, time_us: float) -> None:
        pass

    def close(self) -> None:
        pass


class StepKinds(Sink):
    """Counts the steps on the device by kind."""

    def __init__(self) -> None:
        self.counts: Counter[StepKind] = Counter()
        self._last = -1

    def device(self, span: DeviceSpan) -> None:
        if span.scheduled.step != self._last:
            self._last = span.scheduled.step
            self.counts[span.scheduled.kind] += 1


def full_batch(wait_steps: int) -> dict[str, float]:
    """Steps and virtual time of 4,096 requests through 256 places, 32 to 95 tokens each."""
    runtime = NullRuntime(FILE_COSTS)
    kinds = StepKinds()
    options = {
        "scheduler.max_num_seqs": 256, "scheduler.max_num_tokens": 8192,
        "scheduler.prefill_wait_steps": wait_steps, "cache.num_blocks": 2048,
    }  # fmt: skip
    engine = make_engine(runtime, RecordedTimeline(runtime.now_us, kinds), 0, 1, 64, options)
    tokens = 0
    for index in range(4096):
        length = 32 + index * 37 % 64
        tokens += length
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        engine.add_request(f"r{index}", [10 + index % 100] * 64, params, final_only=True)
    while engine.has_unfinished():
        engine.step()
    seconds = runtime.now_us() / 1e6
    engine.close()
    return {
        "prefill_steps": kinds.counts[StepKind.PREFILL],
        "decode_steps": kinds.counts[StepKind.DECODE],
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
    }


class PhaseTimes(Sink):
    """Keeps the host's own time of each phase, one entry a step."""

    def __init__(self) -> None:
        self.own_us: dict[Phase, list[float]] = {phase: [] for phase in Phase}
        self._inner_us = 0.0

    def host(self, span: HostSpan) -> None:
        # Spans come when they end, so those inside a launch come before it.
        own_us = span.end_us - span.begin_us
        if span.phase is Phase.LAUNCH:
            own_us, self._inner_us = own_us - self._inner_us, 0.0
        elif span.phase in (Phase.WAIT, Phase.COMMIT, Phase.CONTROLS):
            self._inner_us += own_us
        self.own_us[span.phase].append(own_us)


def host_cost_us(num_seqs: int, depth: int, num_steps: int) -> dict[str, float]:
    """Median own time of each phase in a decode step of `num_seqs` sequences, and their sum."""
    times = PhaseTimes()
    timeline = RecordedTimeline(lambda: time.thread_time_ns() / 1000, times)
    engine = make_engine(NullRuntime(), timeline, num_seqs, depth, num_steps + 40)
    while engine.stats().num_waiting or engine.stats().generated_tokens < 4 * num_seqs:
        engine.step()
    for each in times.own_us.values():
        each.clear()
    for _ in range(num_steps):
        engine.step()
    engine.close()
    medians = {
        phase.value: statistics.median(times.own_us[phase])
        for phase in Phase
        if phase is not Phase.WAIT
    }
    return medians | {"all": sum(medians.values())}


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=200, help="steps measured for each row")
    parser.add_argument("--traces", type=Path, help="folder for traces of host work of 80 %%; end")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.traces:
        args.traces.mkdir(parents=True, exist_ok=True)
        for depth in (0, 1):
            idle_share(0.8, depth, 40, args.traces / f"null_depth{depth}.trace.json")
        return

    shares = (0.2, 0.5, 0.8, 1.0, 1.25, 1.5, 2.0)
    idle = {
        f"depth {depth}": {str(share): idle_share(share, depth, args.steps) for share in shares}
        for depth in (0, 1, 2)
    }
    print("device idle share; host work as a share of the device's step")
    print(f"{'':10}" + "".join(f"{share:>9}" for share in shares))
    for name, row in idle.items():
        print(f"{name:10}" + "".join(f"{100 * value:>8.2f}%" for value in row.values()))

    print("\n4,096 requests through 256 places; virtual time, a prefill step 30 ms, decode 1.7 ms")
    print(f"{'prefill_wait_steps':>18}{'prefill':>9}{'decode':>8}{'seconds':>9}{'tokens/s':>10}")
    files = {}
    for wait in (0, 4, 16, 64):
        row = files[str(wait)] = full_batch(wait)
        print(f"{wait:>18}{row['prefill_steps']:>9.0f}{row['decode_steps']:>8.0f}"
              f"{row['seconds']:>9.2f}{row['tokens_per_s']:>10,.0f}")  # fmt: skip

    print("\nhost's own time in a decode step, us, median; depth 1")
    cost = {}
    for num_seqs in args.sequences:
        print(f"  {num_seqs} sequences ...", file=sys.stderr)
        cost[str(num_seqs)] = host_cost_us(num_seqs, 1, args.steps)
    columns = list(next(iter(cost.values())))
    print(f"{'sequences':>10}" + "".join(f"{column:>10}" for column in columns) + "  us/sequence")
    for name, row in cost.items():
        per_sequence = row["all"] / int(name)
        cells = "".join(f"{row[column]:>10.0f}" for column in columns)
        print(f"{name:>10}{cells}{per_sequence:>13.2f}")
    if args.json:
        figures = {"idle_share": idle, "full_batch": files, "host_us_per_step": cost,
                   "num_steps": args.steps}  # fmt: skip
        write_json(args.json, "scheduler_on_null_device", figures)


if __name__ == "__main__":
    main()
