"""Greedy answers of the bundled checkpoint on a device against the reference on the CPU.

Tokens have to agree up to the first place where the reference's best two logits lie within the
stated margin of each other; after such a place the texts may part.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from deepinfer import LLM, SamplingParams
from deepinfer.config import EngineConfig, override

_EXAMPLES = Path(__file__).parents[2] / "examples/demo.jsonl"
_PLAIN = ("The", "def add(a, b):\n    return", "The miller and his cat went to the river. " * 12)
# Largest difference of a log probability that the numerics of two backends explain.
MARGINS = {"exact": 1e-3, "normative": 0.25}


def prompts() -> list[str]:
    """The demonstration's prompts, and plain ones of several lengths."""
    lines = _EXAMPLES.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["body"]["prompt"] for line in lines] + list(_PLAIN)


def answers(backend: str, numerics: str, max_tokens: int) -> tuple[list[Any], float]:
    """Greedy completions with the two most likely tokens of each place, and seconds."""
    config = override(
        EngineConfig(), {"backend.name": backend, "numerics": numerics, "max_model_len": 512}
    )
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=2, ignore_eos=True)
    with LLM(config) as llm:
        begun = time.monotonic()
        results = llm.generate(prompts(), params)
        return [result.outputs[0] for result in results], time.monotonic() - begun


def first_difference(own: list[int], expected: list[int]) -> int | None:
    """First place where two answers differ."""
    for place, (left, right) in enumerate(zip(own, expected, strict=True)):
        if left != right:
            return place
    return None


def main() -> int:
    """Compare in both numerics; return 1 if an answer parts where the margin is large."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    lines = ["| numerics | prompt | equal tokens | margin where they part | verdict |"]
    lines.append("|---|---|---|---|---|")
    wrong = 0
    for numerics, margin in MARGINS.items():
        own, seconds = answers(arguments.backend, numerics, arguments.max_tokens)
        expected, _ = answers("reference", numerics, arguments.max_tokens)
        for number, (left, right) in enumerate(zip(own, expected, strict=True)):
            place = first_difference(list(left.token_ids), list(right.token_ids))
            gap, verdict = "", "equal"
            if place is not None:
                (_, best), (_, second) = right.logprobs[place].top
                gap = f"{best - second:.4f}"
                verdict = "within margin" if best - second <= margin else "WRONG"
                wrong += verdict == "WRONG"
            equal = arguments.max_tokens if place is None else place
            lines.append(f"| {numerics} | {number} | {equal} | {gap} | {verdict} |")
        lines.append(f"| {numerics} | first answers took {seconds:.1f} s, compiling included ||||")
    arguments.out.write_text(json.dumps({"table": "\n".join(lines), "wrong": wrong}, indent=1))
    print("\n".join(lines))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
