"""Decode time per token: the reference backend against transformers' DeepSeek-V4, same run.

The checkpoint is the bundled one, transformers has equal sizes and random weights, all in fp32 but
`deepinfer normative`. It measures, it asserts nothing. On a GPU: `benchmarks/gpu/throughput.py`.

    pip install transformers
    python -m benchmarks.decode_vs_transformers --json decode_vs_transformers.json
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.decode_contenders import Contender, EngineContender, TransformersContender
from benchmarks.decode_turns import Turns, run_turns
from deepinfer.cli.report import write_json

PEER = "transformers fp32"
CONTENDERS: Mapping[str, Contender] = {
    "deepinfer exact": EngineContender("reference", "exact"),
    "deepinfer normative": EngineContender("reference", "normative"),
    PEER: TransformersContender(),
}


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    turns = Turns(args.context, args.rounds, args.steps, block_s=60.0)
    per_token = run_turns(CONTENDERS, [args.batch], turns)[args.batch]
    peer = per_token[PEER]
    print(f"{'':22}{'ms/token':>10}{'ratio':>8}   (batch {args.batch}, median of {args.rounds})")
    for name, value in per_token.items():
        print(f"{name:22}{value:10.3f}{value / peer:8.2f}")
    if args.json:
        figures = {
            "ms_per_token": per_token,
            "ratio_to_transformers": {name: value / peer for name, value in per_token.items()},
            "batch": args.batch,
            "context": args.context,
            "threads": torch.get_num_threads(),
        }
        write_json(args.json, "decode_vs_transformers", figures)


if __name__ == "__main__":
    main()
