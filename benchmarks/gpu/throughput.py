"""Decode tokens per second of the bundled checkpoint by batch, beside its peers.

    python -m benchmarks.gpu.throughput --backend cuda_sm100 --out throughput.json

The engine with decode graphs and with single launches, the reference backend on the CPU, and
transformers' DeepSeek-V4 of equal sizes, eager, on the same GPU. Greedy decoding through the whole
engine: host work, sampling and the copy of tokens to the host are in the figures.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.decode_contenders import Contender, EngineContender, TransformersContender
from benchmarks.decode_turns import Rates, Turns, run_turns

BATCHES = [1, 16, 64, 256]
CONTEXT = 32


def contenders_on(backend: str, device: str) -> dict[str, Contender]:
    """Who decodes; transformers only where it is installed."""
    found: dict[str, Contender] = {}
    if backend == "reference":
        found["deepinfer"] = EngineContender(backend)
    else:
        for kind, graphs in (("graphs", True), ("launches", False)):
            found[f"deepinfer {kind}"] = EngineContender(backend, options=(("graphs", graphs),))
        found["reference on CPU"] = EngineContender("reference")
    if importlib.util.find_spec("transformers") is not None:
        for word, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            found[f"transformers {word}"] = TransformersContender(device, dtype)
    return found


def table_of(found: Mapping[int, Rates], names: list[str]) -> str:
    """Markdown: tokens per second, and the first contender over the best of transformers."""
    lines = [
        f"greedy decoding after {CONTEXT} tokens, tokens/s, median of blocks in turns\n",
        "| batch | " + " | ".join(names) + " | first / best transformers |",
        "|---" * (len(names) + 2) + "|",
    ]
    for batch, rates in found.items():
        peers = [rates[name] for name in names if name.startswith("transformers")]
        ratio = f"{min(peers) / rates[names[0]]:.2f}" if peers else "not installed"
        columns = " | ".join(f"{1e3 / rates[name]:,.0f}" for name in names)
        lines.append(f"| {batch} | {columns} | {ratio} |")
    return "\n".join(lines)


def main() -> int:
    """Measure and write the table; rewritten after each batch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40, help="most steps of a block")
    parser.add_argument("--block-s", type=float, default=0.6, help="most seconds of a block")
    parser.add_argument("--device", default="cuda", help="where transformers runs")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    contenders = contenders_on(arguments.backend, arguments.device)
    found: dict[int, Rates] = {}

    def keep(batch: int, rates: Rates) -> None:
        found[batch] = rates
        table = table_of(found, list(contenders))
        tokens_per_s = {
            size: {name: 1e3 / value for name, value in one.items()} for size, one in found.items()
        }
        result = {"table": table, "tokens_per_s": tokens_per_s}
        arguments.out.write_text(json.dumps(result, indent=1))
        print(table.splitlines()[-1], flush=True)

    turns = Turns(CONTEXT, arguments.rounds, arguments.steps, arguments.block_s)
    run_turns(contenders, arguments.batches, turns, keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
