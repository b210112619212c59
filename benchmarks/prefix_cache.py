"""Time to the first token of a prompt whose beginning is known, by how its windows come back.

Prompts share a beginning and go on with 16 tokens of their own. For every length of the beginning:

    cold                nothing is kept
    rebuilt             blocks are known; windows are rebuilt exactly, by computing rows again
    rebuilt, bounded    the same with the last window's rows only: an approximation
    windows from host   blocks are known; windows come from host memory
    all from host       other prompts took the blocks; both come from host memory

The ways alternate, so that a noisy machine hits all of them. All exact ways must give equal tokens.

    python -m benchmarks.prefix_cache --out prefix_cache.json --svg prefix_cache.svg
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from deepinfer.cli.chart_svg import Panel, draw
from deepinfer.cli.report import write_json
from deepinfer.config import EngineConfig, override
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.sampling_params import SamplingParams

NUM_OWN = 16
WAYS: dict[str, dict[str, object]] = {
    "cold": {},
    "rebuilt": {"cache.prefix": True},
    "rebuilt, bounded": {"cache.prefix": True, "replay.rebuild": "bounded"},
    "windows from host": {"cache.prefix": True, "cache.host_memory": "1GiB"},
    "all from host": {"cache.prefix": True, "cache.host_memory": "1GiB"},
}
EVICTS, APPROXIMATE = "all from host", "rebuilt, bounded"


def text(family: int, length: int) -> list[int]:
    """Token ids of the bundled vocabulary; two families differ from the first token on."""
    return [
        (7 * family + 13 * position + position * position) % 3000 + 10 for position in range(length)
    ]


class Way:
    """An engine that keeps what its way says, and the times of its prompts."""

    def __init__(self, name: str, args: argparse.Namespace, length: int) -> None:
        """Make the beginning known; two prompts, because the second saves its windows."""
        self.name, self._length, self._num_asked = name, length, 0
        size = args.block_size
        # One prompt with its answer and a little more: the next one takes all of it.
        num_blocks = -(-(length + NUM_OWN + 1) // size) + 1
        values: dict[str, Any] = {
            "numerics": args.numerics,
            "backend.name": args.backend,
            "cache.block_size": size,
            "max_model_len": length + NUM_OWN + 8,
            **({"cache.num_blocks": num_blocks} if name == EVICTS else {}),
            **WAYS[name],
        }
        self.engine = LLMEngine.from_config(override(EngineConfig(), values))
        self.milliseconds: list[float] = []
        self.num_computed: list[int] = []
        self.answers: list[list[int]] = []
        for own in (1, 2):
            self._first_token([*text(0, length), *text(own, NUM_OWN)])

    def measure(self, own: int) -> None:
        """One prompt; its time and its answer are kept."""
        if self.name == EVICTS:
            self._first_token(text(50 + own, self._length + NUM_OWN))
        prompt = [*text(0, self._length), *text(own, NUM_OWN)]
        begin = time.perf_counter()
        num_cached, answer = self._first_token(prompt)
        self.milliseconds.append(1000 * (time.perf_counter() - begin))
        self.num_computed.append(len(prompt) - num_cached)
        self.answers.append(answer)

    def _first_token(self, prompt: list[int]) -> tuple[int, list[int]]:
        self._num_asked += 1
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        self.engine.add_request(f"r{self._num_asked}", prompt, params, final_only=True)
        outputs = []
        while self.engine.has_unfinished():
            outputs += self.engine.step()
        (output,) = outputs
        return output.num_cached_tokens, output.outputs[0].token_ids

    def figures(self) -> dict[str, float]:
        """Median time, its least, and the rows that were computed."""
        return {
            "ms": statistics.median(self.milliseconds),
            "least_ms": min(self.milliseconds),
            "computed_tokens": statistics.median(self.num_computed),
        }


def measure(args: argparse.Namespace, length: int) -> dict[str, dict[str, float]]:
    """Figures of each way for one length.

    Raises:
        SystemExit: an exact way gave another token than the cold one.
    """
    ways = [Way(name, args, length) for name in WAYS]
    for round_number in range(args.rounds):
        print(f"\r  {length} tokens, round {round_number + 1}/{args.rounds}  ", end="",
              file=sys.stderr, flush=True)  # fmt: skip
        for way in ways:
            way.measure(10 + round_number)
    print(file=sys.stderr)
    for way in ways:
        if way.name != APPROXIMATE and way.answers != ways[0].answers:
            sys.exit(f"{length} tokens: {way.name} gave other tokens than {ways[0].name}")
        way.engine.close()
    return {way.name: way.figures() for way in ways}


def table_of(figures: dict[int, dict[str, dict[str, float]]]) -> str:
    """Markdown: milliseconds to the first token, and the tokens computed for it."""
    lines = [f"| beginning | {' | '.join(WAYS)} |", "|---" * (1 + len(WAYS)) + "|"]
    for length, by_way in figures.items():
        cells = [f"{row['ms']:.0f} ms, {row['computed_tokens']:.0f}" for row in by_way.values()]
        lines.append(f"| {length:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--numerics", default="normative")
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    figures = {length: measure(args, length) for length in args.lengths}
    print(table_of(figures))
    if args.out:
        shown = {str(length): rows for length, rows in figures.items()}
        arguments = {name: str(value) for name, value in vars(args).items()}
        write_json(args.out, "prefix_cache", {"arguments": arguments, "ways": shown})
    if args.svg:
        panel = Panel(
            "milliseconds to the first token",
            "tokens of the known beginning (and 16 more)",
            {name: [(n, rows[name]["ms"]) for n, rows in figures.items()] for name in WAYS},
            x_is_log=True,
            x_ticks=args.lengths,
        )
        caption = f"{args.backend}, {args.numerics}, blocks of {args.block_size}"
        args.svg.write_text(draw([panel], caption=caption), encoding="utf-8")


if __name__ == "__main__":
    main()
