"""Compile every kernel for its architectures, without a GPU, and report what each one needs.

    python -m deepinfer_kernels.compile [--arch 90 100] [--only WORD] [--out FILE]

Compiling proves that Triton accepts a kernel and what registers, shared memory and tensor-core
instructions it gets; it runs nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import deepinfer_kernels
from deepinfer_kernels.compile_case import ARCHITECTURES, CompileCase

_MAX_SHARED_BYTES = 227 * 1024
_MAX_TENSOR_MEMORY_COLUMNS = 512
_RECORD_FILE = "records_triton.py"


@dataclass(frozen=True, slots=True)
class CompileResult:
    """What one kernel needs on one architecture.

    Attributes:
        kernel: family, file and function.
        constants: constexpr arguments in words.
        arch: compute capability times ten.
        registers: per thread.
        spill_bytes: local memory per thread.
        shared_bytes: shared memory per program.
        tensor_memory_columns: tensor memory per program (SM100).
        faults: limits or required instructions that were missed; empty when it is fine.
    """

    kernel: str
    constants: str
    arch: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_memory_columns: int
    faults: tuple[str, ...]


def kernel_files() -> Iterator[ModuleType]:
    """Every module that says how its kernels are compiled."""
    prefix = f"{deepinfer_kernels.__name__}."
    for info in pkgutil.walk_packages(deepinfer_kernels.__path__, prefix):
        if info.name.endswith("_triton"):
            module = importlib.import_module(info.name)
            if hasattr(module, "COMPILE_CASES"):
                yield module


def compile_case(module: ModuleType, case: CompileCase, arch: int) -> CompileResult:
    """Compile one case; what Triton raises passes through."""
    kernel = getattr(module, case.kernel)
    signature = {**case.signature, **dict.fromkeys(case.constants, "constexpr")}
    ordered = {name: signature[name] for name in kernel.arg_names}
    # Pointers and sizes of real models are multiples of 16, and launches specialise on it.
    varying = set(kernel.do_not_specialize)
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, (name, kind) in enumerate(ordered.items())
        if kind.startswith("*") or (kind == "i32" and not varying & {name, at})
    }
    source = ASTSource(kernel, ordered, constexprs=dict(case.constants), attrs=aligned)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )
    registers, spills = _resources(compiled.asm["cubin"])
    shared = compiled.metadata.shared
    columns = getattr(compiled.metadata, "tmem_size", 0) or 0
    faults = [
        f"no {word} in the PTX"
        for word in case.required.get(arch, ())
        if word not in compiled.asm["ptx"]
    ]
    faults += misaligned_loads(compiled.asm["ptx"], case.record_bytes)
    if spills > case.max_spill_bytes:
        faults.append(f"{spills} bytes spilled, at most {case.max_spill_bytes} accepted")
    if shared > _MAX_SHARED_BYTES:
        faults.append(f"{shared} bytes of shared memory, {_MAX_SHARED_BYTES} exist")
    if columns > _MAX_TENSOR_MEMORY_COLUMNS:
        faults.append(f"{columns} tensor memory columns, {_MAX_TENSOR_MEMORY_COLUMNS} exist")
    name = module.__name__.removeprefix("deepinfer_kernels.")
    words = ", ".join(f"{key}={value}" for key, value in case.constants.items())
    return CompileResult(
        f"{name}.{case.kernel}", words, arch, registers, spills, shared, columns, tuple(faults)
    )


def misaligned_loads(ptx: str, record_bytes: Iterable[int]) -> list[str]:
    """Loads of cache records that are wider than records are aligned.

    The compiler decides how many bytes a thread loads at once from what it believes about
    alignment; the interpreter never loads misaligned, so that only the PTX shows a wrong belief.

    Args:
        ptx: compiled from code whose record loads are in `kv/records_triton.py`.
        record_bytes: lengths of the records that the kernel reads.

    Returns:
        A sentence for each line of source with such a load.
    """
    aligned = min((length & -length for length in record_bytes), default=None)
    if aligned is None:
        return []
    widest: dict[str, int] = {}
    line = ""
    for text in ptx.splitlines():
        if located := re.match(r"\s*\.loc\s.*//\s*(\S+?:\d+)", text):
            line = located[1]
        elif loaded := re.search(r"\bld\.global\S*?(?:\.v(\d))?\.b(\d+)\b", text):
            width = int(loaded[1] or 1) * int(loaded[2]) // 8
            widest[line] = max(widest.get(line, 0), width)
        elif copied := re.search(r"\bcp\.async\.c[ag]\..*\], (0x[0-9a-f]+)", text):
            widest[line] = max(widest.get(line, 0), int(copied[1], 16))
    records = {line: width for line, width in widest.items() if _RECORD_FILE in line}
    if not records:
        return [f"no loads of {_RECORD_FILE} in the PTX, so their alignment is not known"]
    return [
        f"{line} loads {width} bytes at once, records are aligned to {aligned}"
        for line, width in records.items()
        if width > aligned
    ]


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and bytes of local memory, as the disassembler reports them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {text!r}")
    return int(found[1]), int(found[2])


def compile_all(architectures: tuple[int, ...], only: str = "") -> list[CompileResult]:
    """Compile the cases whose kernel name contains `only`, with progress on stderr."""
    work = [
        (module, case, arch)
        for module in kernel_files()
        for case in module.COMPILE_CASES
        for arch in case.architectures
        if arch in architectures and only in f"{module.__name__}.{case.kernel}"
    ]
    results = []
    for number, (module, case, arch) in enumerate(work, 1):
        print(f"[{number}/{len(work)}] {case.kernel} sm_{arch}", file=sys.stderr)
        results.append(compile_case(module, case, arch))
    return results


def main() -> int:
    """Print a table, write JSON if asked, and return 1 if anything is at fault."""
    parser = argparse.ArgumentParser(prog="python -m deepinfer_kernels.compile")
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--only", default="", help="part of a kernel's dotted name")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    results = compile_all(tuple(arguments.arch), arguments.only)
    print(f"{'kernel':58} {'sm':>4} {'regs':>5} {'spill':>6} {'shared':>7} {'tmem':>5}  faults")
    for result in results:
        print(
            f"{result.kernel:58} {result.arch:4} {result.registers:5} {result.spill_bytes:6} "
            f"{result.shared_bytes:7} {result.tensor_memory_columns:5}  "
            f"{'; '.join(result.faults) or '-'}"
        )
    if arguments.out:
        arguments.out.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")
    return 1 if any(result.faults for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
