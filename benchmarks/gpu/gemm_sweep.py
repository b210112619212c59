"""Alternatives for dense products of many rows, timed: what `MANY_ROWS` should say.

    python -m benchmarks.gpu.gemm_sweep [--rows 1024] [--out FILE]
    python -m benchmarks.gpu.gemm_sweep --check

Every candidate differs from `ManyRows()` of `deepinfer_kernels/quant/gemm_triton.py` in the fields
that its name says. Its result is compared with that of 64 rows at a time, bit by bit: whoever
changes how programs share the work must not change a row. The candidates that spell out a default
say how far two times of one thing lie apart. First processes side by side compile all candidates;
then one alone times them, as `kernels.py` does. `--check` compiles for SM90 without a GPU and
prints registers and spills.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.processes import python, run_all
from deepinfer.device import formats
from deepinfer_kernels.compile import compile_case
from deepinfer_kernels.quant import gemm_triton
from deepinfer_kernels.quant.gemm_triton import ManyRows, Operand, Tile, gemm
from deepinfer_kernels.quant.quantize_triton import round_a8

SHAPES = (("wq_a+wkv", 1792, 5120), ("wq_b", 32768, 1280), ("wo_b", 5120, 8192))
FEW_ROWS = 64
TILES = (
    Tile(256, 128, 64, 8, 3),
    Tile(256, 128, 64, 8, 4),
    Tile(128, 256, 64, 8, 3),
    Tile(128, 256, 64, 8, 4),
    Tile(128, 128, 64, 8, 3),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 128, 64, 4, 3),
    Tile(128, 128, 128, 8, 3),
)
DEQUANTISERS = ((32, 4), (64, 4), (64, 8), (128, 4), (128, 8), (256, 8))
"""Groups of a program and its warps."""
ARCHITECTURE = 90
"""Of the device that is there to be measured."""
COMPILE_S = 40.0


class Candidate(NamedTuple):
    """A way to compute one product.

    Attributes:
        shape: one of `SHAPES`.
        change: fields of `ManyRows` that differ from what they are by default.
    """

    shape: tuple[str, int, int]
    change: dict[str, Any]

    @property
    def many(self) -> ManyRows:
        """The choices."""
        return ManyRows()._replace(**self.change)

    @property
    def name(self) -> str:
        """The change in words."""
        return ", ".join(
            f"{key}={'x'.join(map(str, value)) if isinstance(value, Tile) else value}"
            for key, value in self.change.items()
        )


def candidates() -> Iterator[Candidate]:
    """All of them, shape by shape; the first of each shape changes nothing."""
    for shape in SHAPES:
        yield Candidate(shape, {})
        for tile in TILES:
            yield Candidate(shape, {"tile": tile})
        yield Candidate(shape, {"descriptors": False})
        for groups, num_warps in DEQUANTISERS:
            yield Candidate(shape, {"groups": groups, "num_warps": num_warps})


def product(x: Tensor, weight: Operand, many: ManyRows) -> Tensor:
    """The op with these choices: activations rounded, then multiplied."""
    gemm_triton.MANY_ROWS = many
    try:
        return gemm(Operand("plain", round_a8(x), None), weight, torch.bfloat16)
    finally:
        gemm_triton.MANY_ROWS = ManyRows()


def operands(outputs: int, inner: int, rows: int, device: str) -> tuple[Tensor, Operand]:
    """Activations [rows, inner] bf16 and an mxfp8 matrix."""
    x = torch.randn(rows, inner, device=device).bfloat16()
    matrix = torch.randn(outputs, inner, device=device) * inner**-0.5
    codes, scales = formats.quantize_row32(matrix)
    return x, Operand("mxfp8", codes.view(torch.uint8), scales)


def of_few_rows(x: Tensor, weight: Operand) -> Tensor:
    """The op, so many rows at a time that nothing of `ManyRows` applies."""
    parts = [product(part, weight, ManyRows()) for part in x.split(FEW_ROWS)]
    return torch.cat(parts)


def verdict(value: Tensor, expected: Tensor) -> str:
    """Whether the bits are those expected, and if not, whether it is the rounding or a fault."""
    if torch.equal(value, expected):
        return "same"
    error = (value.double() - expected.double()).abs().max() / expected.double().abs().max()
    return f"DIFFER by {float(error):.1e} of the largest value"


def compile_share(index: int, count: int, rows: int) -> None:
    """In a process of its own: run every `count`-th candidate once, on zeros."""
    for candidate in list(candidates())[index::count]:
        _, outputs, inner = candidate.shape
        x = torch.zeros(rows, inner, dtype=torch.bfloat16, device="cuda")
        codes = torch.zeros(outputs, inner, dtype=torch.uint8, device="cuda")
        weight = Operand("mxfp8", codes, codes.new_zeros(outputs, inner // 32))
        if not candidate.change:
            product(x[:FEW_ROWS], weight, ManyRows())
        product(x, weight, candidate.many)
    torch.cuda.synchronize()


def compile_everything(rows: int) -> list[str]:
    """Fill Triton's cache; what the processes that failed said."""
    count = min(len(os.sched_getaffinity(0)), 32)
    module = ("-m", "benchmarks.gpu.gemm_sweep", "--rows", str(rows))
    commands = {
        f"share {index}": python(*module, "--share", str(index), str(count))
        for index in range(count)
    }
    ended = run_all(commands, num_workers=count, each_s=COMPILE_S, total_s=COMPILE_S)
    return [f"{name}: {end.last_line}" for name, end in ended.items() if end.code != 0]


def measure(rows: int) -> Iterator[dict[str, Any]]:
    """Time and bits of every candidate, and of the parts of each shape."""
    from benchmarks.gpu.kernels import time_us

    known: dict[tuple[str, int, int], tuple[Tensor, Operand, Tensor]] = {}
    for candidate in candidates():
        shape = candidate.shape
        name, outputs, inner = shape
        if shape not in known:
            known.clear()
            x, weight = operands(outputs, inner, rows, "cuda")
            known[shape] = x, weight, of_few_rows(x, weight)
            values = gemm_triton.dequantize(weight)
            rounded = Operand("plain", round_a8(x), None)
            yield {
                "shape": f"{name} {outputs}x{inner}", "part": True,
                "activations rounded": time_us(partial(round_a8, x)),
                "matrix dequantised": time_us(partial(gemm_triton.dequantize, weight)),
                "product": time_us(partial(gemm, rounded, values, torch.bfloat16)),
                "torch's bf16 product": time_us(partial(torch.matmul, x, values.data.T)),
            }  # fmt: skip
        x, weight, expected = known[shape]
        many = candidate.many
        try:
            bits = verdict(product(x, weight, many), expected)
            us = time_us(partial(product, x, weight, many))
        # A candidate that does not fit the device is a result, too.
        except Exception as error:
            yield {
                "shape": f"{name} {outputs}x{inner}", "candidate": candidate.name, "us": None,
                "bits": f"{type(error).__name__}: {error}"[:100],
            }  # fmt: skip
            continue
        yield {
            "shape": f"{name} {outputs}x{inner}", "candidate": candidate.name or "as it is",
            "us": us, "bits": bits,
        }  # fmt: skip


def table(figures: list[dict[str, Any]]) -> str:
    """For each shape its parts, and the candidates from the fastest on."""
    lines: list[str] = []
    for shape in dict.fromkeys(row["shape"] for row in figures):
        rows = [row for row in figures if row["shape"] == shape]
        for row in rows:
            if "part" in row:
                parts = [f"{k} {v:.1f}" for k, v in row.items() if k not in ("shape", "part")]
                lines += ["", f"{shape}, us: {', '.join(parts)}", ""]
        lines += ["| us | bits | change of ManyRows in gemm_triton.py |", "|---|---|---|"]
        timed = [row for row in rows if row.get("us") is not None]
        for row in sorted(timed, key=lambda row: row["us"]):
            lines.append(f"| {row['us']:.1f} | {row['bits']} | {row['candidate']} |")
        failed = [row for row in rows if "candidate" in row and row["us"] is None]
        lines += [f"| - | {row['bits']} | {row['candidate']} |" for row in failed]
    return "\n".join(lines)


def check() -> int:
    """Compile every tile and dequantiser without a GPU; 1 if one has a fault."""
    cases = [
        gemm_triton.many_rows_case(tile, described=described)
        for described in (False, True)
        for tile in TILES
    ]
    cases += [gemm_triton.dequantize_case(*pair) for pair in DEQUANTISERS]
    num_faulty = 0
    for case in cases:
        found = compile_case(gemm_triton, case, ARCHITECTURE)
        num_faulty += bool(found.faults)
        print(
            f"{found.registers:4} registers {found.spill_bytes:5} spilled "
            f"{found.shared_bytes:7} shared, {case.num_warps} warps, {case.num_stages} stages, "
            f"{found.constants}  {'; '.join(found.faults)}",
            flush=True,
        )
    return 1 if num_faulty else 0


def main() -> int:
    """Compile, measure, print; 1 if a result differs in bits or a candidate failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="file for the figures (JSON)")
    parser.add_argument("--check", action="store_true", help="compile only; needs no GPU")
    parser.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not (arguments.check or torch.cuda.is_available()):
        parser.error("no GPU is visible here; --check compiles the candidates without one")
    if arguments.check:
        return check()
    if arguments.share:
        index, count = arguments.share
        compile_share(index, count, arguments.rows)
        return 0
    begun = time.monotonic()
    failed = compile_everything(arguments.rows)
    print("\n".join([*failed, f"compiled in {time.monotonic() - begun:.0f} s"]), flush=True)
    torch.manual_seed(0)
    figures = []
    for row in measure(arguments.rows):
        figures.append(row)
        print(row, flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(figures, indent=1))
    print(table(figures))
    print(f"{time.monotonic() - begun:.0f} s")
    return 1 if any(row.get("bits", "same") != "same" for row in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
