"""Tokens per second without drafts, with a fixed number of them, and with planned verification.

For each number of sequences one engine of each mode decodes the same prompts greedily: beginnings
of held-out texts of several domains, and of tales. Each has a process of its own, because two
OpenMP teams in one process slow each other down. They take turns in blocks of the same prompts: a
machine has slow spells of a minute, and hits all of them. A block answers one set after another
until answers have 64 tokens in the mean; prefill is not timed. The first block of each engine, in
which graphs are captured and plans watched, is not counted. All must give the same tokens. All of
that is done several times, because a process may be some percent slower than another like it for
as long as it lives.
Printed are tokens per second (median of the blocks), the same per second of the process's CPU time,
per sequence and step the verified and accepted drafts, and dynamic over fixed: all tokens over all
time with the range over the starts (graphs that are captured late and plans that are tried and
given up cost dynamic some blocks, and count), and the median over the rounds, which a slow spell
does not move. Costs are measured once for each number of sequences, before anything is timed.

    python -m benchmarks.speculation --json FILE.json --svg FILE.svg
    python -m benchmarks.speculation --backend cuda_sm100 --block-s 4
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engine_benchmark import as_command, drafting, in_turns, positive
from deepinfer.cli.chart_svg import Panel, draw
from deepinfer.cli.report import write_json
from deepinfer.cli.speculation_svg import draw_metrics
from deepinfer.config import EngineConfig, override
from deepinfer.device.errors import DeepInferError
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.evaluation.heldout import heldout_names, read_heldout
from deepinfer.speculation.metrics import SpeculationMetrics

MODES = ("off", "fixed", "dynamic")
CONTROL = "control"
"""A second engine of mode fixed: what it differs by from the first is noise."""
TALES = (
    "Once upon a time there was a kind farmer named Clara.",
    "Long ago, in a village, there lived a curious clock maker called Mira. One day",
    "Once upon a time there was a little fox who lived near the river.",
    "In a small town by the sea there lived an old baker named Thomas.",
)
PROMPT_TOKENS = 32
ANSWER_TOKENS = 64
"""Tokens that answers have in the mean when others begin: later ones are loops."""
ROOM_TOKENS = 1024
SETTLING_STEPS = 3
"""Steps after the prompts before anything is timed."""


class Block(NamedTuple):
    """What came of a block.

    Attributes:
        rate: tokens per second.
        cpu_rate: tokens per second of the process's CPU time.
        seconds: its length, without prefill.
    """

    rate: float
    cpu_rate: float
    seconds: float


@dataclass(slots=True)
class Run:
    """One engine of a mode.

    Attributes:
        engine: decodes.
        answers: the longest of each request.
    """

    engine: LLMEngine
    answers: dict[str, list[int]] = field(default_factory=dict)

    def block(self, count: int, num_sets: int) -> Block:
        """Answer the first sets of prompts, one set after another; prefill is not timed."""
        tokens, seconds, cpu_s = 0, 0.0, 0.0
        for first in range(0, num_sets * count, count):
            begun = self._begin(first, count)
            before, begin = self.engine.stats().generated_tokens, time.perf_counter()
            cpu_begin = time.process_time()
            while self.engine.stats().generated_tokens < begun + ANSWER_TOKENS * count:
                self.engine.step()
            self.engine.flush()
            seconds += time.perf_counter() - begin
            cpu_s += time.process_time() - cpu_begin
            tokens += self.engine.stats().generated_tokens - before
            self._end(first, count)
        return Block(tokens / seconds, tokens / cpu_s, seconds)

    def _begin(self, first: int, count: int) -> int:
        """Have prompts computed and a few steps made; the tokens generated before them."""
        engine = self.engine
        params = SamplingParams(
            max_tokens=ROOM_TOKENS - PROMPT_TOKENS,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
        )
        before = engine.stats().generated_tokens
        for request_id, prompt in prompts(engine, first, count):
            engine.add_request(request_id, prompt, params, final_only=True)
        while engine.stats().num_waiting or engine.stats().generated_tokens < before + count:
            engine.step()
        for _ in range(SETTLING_STEPS):
            engine.step()
        engine.flush()
        return before

    def _end(self, first: int, count: int) -> None:
        for request_id, _ in prompts(self.engine, first, count):
            self.engine.abort(request_id)
        while self.engine.has_unfinished():
            for output in self.engine.step():
                self._keep(output.request_id, output.outputs[0].token_ids)

    def _keep(self, request_id: str, token_ids: list[int]) -> None:
        known = self.answers.get(request_id, [])
        shared = min(len(known), len(token_ids))
        if known[:shared] != token_ids[:shared]:
            sys.exit(f"{request_id} was answered in two ways by one engine")
        self.answers[request_id] = max(known, token_ids, key=len)

    @property
    def metrics(self) -> SpeculationMetrics | None:
        return self.engine.speculation


def prompts(engine: LLMEngine, first: int, count: int) -> Iterator[tuple[str, list[int]]]:
    """Request ids that begin with a domain, and the first tokens of a text of it.

    Args:
        engine: whose tokenizer is used.
        first: number of the first of them, from 0.
        count: how many.
    """
    domains = [*heldout_names(), "tales"]
    for number in range(first, first + count):
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
    """An engine that has answered a set of prompts already: graphs are captured."""
    values: dict[str, Any] = {
        "numerics": args.numerics,
        "backend.name": args.backend,
        "speculation.mode": "fixed" if mode == CONTROL else mode,
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
    run = Run(engine)
    run.block(count, 1)
    return run


class Ended(NamedTuple):
    """What an engine leaves.

    Attributes:
        answers: the longest of each request.
        metrics: of its drafts; None without.
    """

    answers: dict[str, list[int]]
    metrics: SpeculationMetrics | None


class Contender:
    """An engine in a process of its own."""

    def __init__(self, args: argparse.Namespace, mode: str, count: int, costs: Path) -> None:
        """Start it; returns when it has answered a set of prompts."""
        self._mode = mode
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, args, mode, count, costs), daemon=True
        )
        self._process.start()
        theirs.close()
        self._receive()  # it has begun

    def block(self, num_sets: int) -> Block:
        """Its turn."""
        self._pipe.send(num_sets)
        block = self._receive()
        assert isinstance(block, Block)  # for a number of sets
        return block

    def end(self) -> Ended:
        """Close the engine."""
        self._pipe.send(0)
        ended = self._receive()
        assert isinstance(ended, Ended)  # for 0
        self._process.join()
        return ended

    def _receive(self) -> Block | Ended | None:
        try:
            answer: Block | Ended | DeepInferError | None = self._pipe.recv()
        except EOFError:
            sys.exit(f"the engine of mode {self._mode} has ended; its error stands above")
        if isinstance(answer, DeepInferError):
            raise answer
        return answer


def _serve(pipe: Connection, args: argparse.Namespace, mode: str, count: int, costs: Path) -> None:
    """Child process: a block for every number of sets, what is left for 0."""
    try:
        run = begin(args, mode, count, costs)
        pipe.send(None)
        while num_sets := pipe.recv():
            pipe.send(run.block(count, num_sets))
        run.engine.close()
        pipe.send(Ended(run.answers, run.metrics))
    except DeepInferError as error:
        pipe.send(error)
    except EOFError:
        return  # another engine was refused, and the command has ended


def check_same(ended: dict[str, Ended], count: int) -> None:
    """Every mode's tokens, as far as both got.

    Raises:
        SystemExit: two modes differ.
    """
    first = ended[MODES[0]].answers
    for mode, each in ended.items():
        for name in each.answers.keys() & first.keys():  # a faster one came to more prompts
            tokens = each.answers[name]
            shared = min(len(tokens), len(first[name]))
            if tokens[:shared] != first[name][:shared]:
                sys.exit(f"{count} sequences: {mode} gives other tokens than off for {name}")


class Race(NamedTuple):
    """What engines of all modes, begun together, have done by turns.

    Attributes:
        blocks: of each mode.
        ended: what each one leaves.
    """

    blocks: dict[str, list[Block]]
    ended: dict[str, Ended]

    def metrics(self, mode: str) -> SpeculationMetrics:
        metrics = self.ended[mode].metrics
        assert metrics is not None  # the mode drafts
        return metrics


def over_fixed(mode: str, races: Sequence[Race]) -> float:
    """All tokens of a mode over all its time, over the same of fixed."""

    def rate(mode: str) -> float:
        blocks = [block for each in races for block in each.blocks[mode]]
        return sum(b.rate * b.seconds for b in blocks) / sum(b.seconds for b in blocks)

    return rate(mode) / rate("fixed")


def over_fixed_by_rounds(mode: str, races: Sequence[Race]) -> float:
    """Median over all rounds, which a round with a slow spell in it does not move."""
    return statistics.median(
        other.rate / fixed.rate
        for each in races
        for other, fixed in zip(each.blocks[mode], each.blocks["fixed"], strict=True)
    )


def modes_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Names of the engines that take part."""
    return (*MODES, CONTROL) if args.control else MODES


def race(args: argparse.Namespace, count: int, costs: Path, number: int) -> Race:
    """Begin an engine of each mode, another one first each time, and let them take turns."""
    label = f"{count} sequences, start {number + 1}/{args.starts}"
    print(f"  {label}: costs and prompts", file=sys.stderr, flush=True)
    modes = modes_of(args)
    first = number % len(modes)
    order = (*modes[first:], *modes[:first])
    runs = {mode: Contender(args, mode, count, costs) for mode in order}
    # As many as the slowest mode answers in that time; the block does not count, nor those of the
    # others in which plans are watched.
    num_sets = max(1, round(args.block_s / runs["off"].block(1).seconds))
    blocks: dict[str, list[Block]] = {mode: [] for mode in modes}
    for mode in modes:
        runs[mode].block(num_sets)
    for mode in in_turns(modes, args.rounds, label):
        blocks[mode].append(runs[mode].block(num_sets))
    ended = {mode: run.end() for mode, run in runs.items()}
    check_same(ended, count)
    return Race(blocks, ended)


def measure(args: argparse.Namespace, count: int) -> tuple[dict[str, Any], SpeculationMetrics]:
    """Figures of each mode for one number of sequences, and the newest metrics of dynamic."""
    with tempfile.TemporaryDirectory() as folder:
        costs = Path(folder) / "costs.json"
        races = [race(args, count, costs, number) for number in range(args.starts)]
    figures: dict[str, Any] = {}
    for mode in modes_of(args):
        found = [block for each in races for block in each.blocks[mode]]
        figures[mode] = {
            "tokens_per_s": statistics.median(block.rate for block in found),
            "tokens_per_cpu_s": statistics.median(block.cpu_rate for block in found),
            "blocks": [[block.rate for block in each.blocks[mode]] for each in races],
        }
        if mode != "off":
            drafted = [drafting(each.metrics(mode)) for each in races]
            figures[mode]["speculation"] = drafted[-1]
            figures[mode]["starts"] = [
                {**each["all"]["per_round"], "planned_share": each["planned_share"]}
                for each in drafted
            ]
        if mode not in ("off", "fixed"):
            by_start = [over_fixed(mode, [each]) for each in races]
            figures[mode]["over_fixed"] = over_fixed(mode, races)
            figures[mode]["over_fixed_by_start"] = by_start
            figures[mode]["over_fixed_by_rounds"] = over_fixed_by_rounds(mode, races)
    return figures, races[-1].metrics("dynamic")


def main() -> None:
    """Measure, print the table, draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--numerics", default="normative")
    parser.add_argument("--sequences", type=positive, nargs="+", default=[1, 8, 16, 60, 96])
    parser.add_argument("--drafts", type=positive, default=5)
    parser.add_argument("--depth", type=int, default=1, help="scheduler.async_depth")
    parser.add_argument("--rounds", type=positive, default=6, help="blocks of each engine")
    parser.add_argument("--starts", type=positive, default=4, help="times that engines begin")
    parser.add_argument(
        "--block-s", type=float, default=3.0, help="seconds of a block of the slowest mode"
    )
    parser.add_argument(
        "--control", action="store_true", help="a second engine of mode fixed, to see the noise"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path, help="picture of the rates")
    parser.add_argument("--metrics-svg", type=Path, help="picture of the largest dynamic run")
    args = parser.parse_args()
    names = ("backend", "numerics", "drafts", "depth", "starts", "rounds", "block_s")
    settings = {name: getattr(args, name) for name in names}
    found: dict[str, dict[str, Any]] = {}
    lines: dict[str, list[tuple[float, float]]] = {}
    print(
        f"{'sequences':>10} {'mode':<9}{'tokens/s':>10}{'x off':>8}{'/CPU s':>9}{'verified':>10}"
        f"{'accepted':>10}{'planned':>9}{'x fixed':>9}{'from':>7}{'to':>7}{'rounds':>8}"
    )
    for count in args.sequences:
        figures, metrics = measure(args, count)
        found[str(count)] = figures
        for mode in modes_of(args):
            row = figures[mode]
            ratio = row["tokens_per_s"] / figures["off"]["tokens_per_s"]
            cells = f"{count:>10} {mode:<9}{row['tokens_per_s']:>10.1f}{ratio:>8.3f}"
            cells += f"{row['tokens_per_cpu_s']:>9.1f}"
            if mode != "off":
                lines.setdefault(mode, []).append((count, ratio))
                verified, accepted, planned = (
                    statistics.mean(each[name] for each in row["starts"])
                    for name in ("verified", "accepted", "planned_share")
                )
                cells += f"{verified:>10.2f}{accepted:>10.2f}{100 * planned:>8.0f}%"
            if "over_fixed" in row:
                ratios = row["over_fixed_by_start"]
                cells += f"{row['over_fixed']:>9.3f}{min(ratios):>7.3f}{max(ratios):>7.3f}"
                cells += f"{row['over_fixed_by_rounds']:>8.3f}"
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
