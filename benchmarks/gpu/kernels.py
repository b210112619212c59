"""Hot kernels at V4.1 shapes: time, share of the counted floor, plain torch beside it.

The floor is the bytes that have to move once over the copy bandwidth measured on the same device,
or the operations over the measured bf16 rate, whichever is longer. Times are medians of replayed
graphs. The composition is the same work in plain torch ops, from the same stored codes and records
to the same result. Where a single torch call could do the product if weights or rows were already
kept as bf16, in two to four times the memory, its time stands beside it. Figures of public kernels
at the same shapes come from `peers.json`; they were measured on another day, and none of them
computes quite the same.

Every kernel is batch invariant, always. A second table shows what that costs where it costs: the
split of K of dense products depends on the matrix alone, beside the fastest split for each number
of rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu.kernel_cases import DEVICE, ROWS, cases, normal
from deepinfer.device import formats
from deepinfer_kernels.quant.gemm_triton import Operand, gemm

PEERS = Path(__file__).parent / "peers.json"
SPLITS = (1, 2, 4, 8)
INVARIANT = (
    ("wq_a+wkv", 1792, 5120), ("wq_b", 32768, 1280), ("wo_b", 5120, 8192), ("w2", 5120, 2304),
)  # fmt: skip


def invariance() -> Iterator[dict[str, Any]]:
    """Times of dense products with the split that does not know the rows, and with the best."""
    for name, outputs, inner in INVARIANT:
        codes, scales = formats.quantize_row32(normal(outputs, inner).float())
        weight = Operand("mxfp8", codes.view(torch.uint8), scales)
        for rows in ROWS:
            x = Operand("plain", normal(rows, inner), None)
            fixed = time_us(partial(gemm, x, weight, torch.bfloat16))
            free = {
                splits: time_us(partial(gemm, x, weight, torch.bfloat16, splits=splits))
                for splits in SPLITS
            }
            best = min(free, key=lambda splits: free[splits])
            yield {
                "matrix": f"{name} {outputs}x{inner}", "rows": rows, "fixed_us": fixed,
                "best_us": min(fixed, free[best]), "best_splits": best,
            }  # fmt: skip


def time_us(work: Callable[[], object]) -> float:
    """Median time of a replayed graph; of plain launches where a graph cannot be captured."""
    work()
    # The graph has a stream of its own, which does not wait for what made the inputs.
    torch.cuda.synchronize()
    try:
        return float(triton.testing.do_bench_cudagraph(work, rep=15, return_mode="median")) * 1e3
    except RuntimeError:
        torch.cuda.synchronize()
        return float(triton.testing.do_bench(work, warmup=5, rep=20, return_mode="median")) * 1e3


def ceilings() -> tuple[float, float]:
    """Bytes per second of a copy (read and write) and operations per second of a bf16 product."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copy_us = time_us(lambda: target.copy_(source))
    a, b = normal(8192, 8192), normal(8192, 8192)
    product_us = time_us(lambda: a @ b)
    return 2 * source.numel() / copy_us * 1e6, 2.0 * 8192**3 / product_us * 1e6


def main() -> int:
    """Measure every case; the table is rewritten after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", required=True, help="ignored: these are its kernels")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bandwidth, rate = ceilings()
    peers = json.loads(PEERS.read_text())
    public = {(row["kernel"], row["rows"]): row for row in peers["figures"]}
    lines = [
        f"copy {bandwidth / 1e12:.2f} TB/s, bf16 product {rate / 1e12:.0f} TFLOP/s; "
        f"public kernels: {peers['source']}, {peers['machine']}\n",
        "| kernel | rows | us | share of floor | composition us | ratio | bf16 product us "
        "| public kernel us |",
        "|---|---|---|---|---|---|---|---|",
    ]
    figures = []
    for case in cases():
        own, composed = time_us(case.own), time_us(case.composed)
        dense_us = None if case.dequantised is None else time_us(case.dequantised)
        other = public.pop((case.name, case.rows), None)
        floor = max(case.num_bytes / bandwidth, case.operations / rate) * 1e6
        lines.append(
            f"| {case.name} | {case.rows} | {own:.1f} | {floor / own:.0%} | {composed:.1f} | "
            f"{composed / own:.1f} | "
            + ("- | " if dense_us is None else f"{dense_us:.1f} | ")
            + (f"{other['us']} ({other['peer']}) |" if other else "- |")
        )
        print(lines[-1], flush=True)
        figures.append(
            {
                "kernel": case.name, "rows": case.rows, "us": own, "floor_us": floor,
                "composition_us": composed, "bf16_product_us": dense_us,
            }
        )  # fmt: skip
        result = {"table": "\n".join(lines), "figures": figures}
        arguments.out.write_text(json.dumps(result, indent=1))
    lines += ["", "| matrix | rows | us, split by the matrix | us, best split | cost |",
              "|---|---|---|---|---|"]  # fmt: skip
    costs = []
    for cost in invariance():
        costs.append(cost)
        lines.append(
            f"| {cost['matrix']} | {cost['rows']} | {cost['fixed_us']:.1f} | "
            f"{cost['best_us']:.1f} ({cost['best_splits']}) | "
            f"{cost['fixed_us'] / cost['best_us'] - 1:.0%} |"
        )
        print(lines[-1], flush=True)
    result = {"table": "\n".join(lines), "figures": figures, "batch_invariance": costs}
    arguments.out.write_text(json.dumps(result, indent=1))
    if public:
        print(f"{PEERS.name} names cases that do not exist: {list(public)}")
    return 1 if public else 0


if __name__ == "__main__":
    sys.exit(main())
