"""Every kernel once under compute-sanitizer: memcheck and racecheck.

    python -m benchmarks.gpu.sanitizer --backend cuda_sm100 --out sanitizer.json

The cases are those of `tests/kernels/every_kernel.py`, in groups of a process each. They run
without the tool first, so that everything is compiled and known to pass. torch's caching of device
memory is off, so that an access beyond a tensor is one beyond its allocation. Two CUDA kernels with
a planted fault show that the tools see faults on this machine. Where the tool refuses the machine
the table says so, and the exit status is 3.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.gpu.processes import Ended, environment, python, run_all
from benchmarks.gpu.sanitizer_report import Findings, read_report
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.registry import load_backend
from deepinfer_conformance.run import run_case
from tests.kernels.every_kernel import every_kernel_cases

TOOLS = ("memcheck", "racecheck")
CONTROL = "planted fault"
NOT_AVAILABLE = 3
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")
_PLANTED = {
    "memcheck": """
extern "C" __global__ void planted(int* cells) { cells[(1 << 20) + threadIdx.x] = 1; }
""",
    "racecheck": """
extern "C" __global__ void planted(int* cells) {
    __shared__ int shared[64];
    shared[threadIdx.x] = cells[threadIdx.x];
    cells[threadIdx.x] = shared[(threadIdx.x + 33) % 64];
}
""",
}


def run_group(backend_name: str, group: str) -> int:
    """In a process of its own: cases `index` of `count`, each against the reference."""
    index, count = (int(word) for word in group.split("/"))
    cases = every_kernel_cases()[index::count]
    backends, references = {}, {}
    for numerics in Numerics:
        backends[numerics] = load_backend(BackendConfig(backend_name, numerics))
        references[numerics] = load_backend(
            BackendConfig("reference", numerics, {"runtime": "inline"})
        )
    wrong = 0
    for case in cases:
        result = run_case(backends[case.numerics], case, references[case.numerics])
        if not result.passed:
            wrong += 1
            print(result.explain())
    print(f"{len(cases) - wrong} of {len(cases)} cases passed", flush=True)
    return 1 if wrong else 0


def run_planted(tool: str) -> int:
    """In a process of its own: a kernel with the fault that the tool is for."""
    kernel = torch.cuda._compile_kernel(_PLANTED[tool], "planted")
    cells = torch.zeros(64, dtype=torch.int32, device="cuda")
    kernel(grid=(1, 1, 1), block=(64, 1, 1), args=[cells])
    torch.cuda.synchronize()
    return 0


def find_tool() -> str | None:
    """compute-sanitizer, on PATH or where CUDA installs it."""
    path = os.pathsep.join((os.environ.get("PATH", ""), *_PLACES))
    return shutil.which("compute-sanitizer", path=path)


def options_of(program: str) -> list[str]:
    """Options for either tool.

    Each process under the tool takes a connection, and by default there are ten; the option is
    given where this version of the tool lists it.
    """
    help_text = subprocess.run(
        [program, "--help"], capture_output=True, text=True, check=False
    ).stdout
    options = ["--target-processes", "application-only", "--print-limit", "100"]
    return [*options, "--max-connections", "64"] if "--max-connections" in help_text else options


def under(program: str, options: list[str], tool: str, *arguments: str) -> list[str]:
    """A command under a tool.

    Failed calls of the CUDA API are not asked for: torch raises those that matter, and probes with
    some that are meant to fail.
    """
    options = ["--tool", tool, *options]
    if tool == "memcheck":
        options += ["--report-api-errors", "no"]
    return [program, *options, *python("-m", "benchmarks.gpu.sanitizer", *arguments)]


def table_of(found: Mapping[tuple[str, str], Findings], ended: Mapping[str, Ended]) -> str:
    """Markdown: a row for each tool and group, then the distinct reports."""
    lines = [
        "| tool | group | ran | errors | warnings | cases | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    notes = []
    for (tool, group), what in found.items():
        how = ended[f"{tool} {group}"]
        cases = [line for line in how.output.splitlines() if line.endswith("cases passed")]
        word = "yes" if what.ran else ("out of time" if how.code is None else "no")
        lines.append(
            f"| {tool} | {group} | {word} | {what.errors} | {what.warnings} | "
            f"{cases[-1] if cases else '-'} | {how.seconds:.0f} |"
        )
        if not what.ran:
            notes.append(f"- {tool} {group}: {what.refusal}")
        notes += [f"- {tool} {group}, {n} times: {text}" for text, n in what.reports.items()]
    return "\n".join([*lines, "", *notes])


def verdict(found: Mapping[tuple[str, str], Findings], ended: Mapping[str, Ended]) -> int:
    """0: clean, and every planted fault seen; 3: the tools do not work here; 1: anything else."""
    if not any(what.ran for what in found.values()):
        return NOT_AVAILABLE
    for (tool, group), what in found.items():
        expected = group == CONTROL
        if not what.ran or bool(what.errors) is not expected:
            return 1
        if not expected and ended[f"{tool} {group}"].code != 0:
            return 1
    return 0


def measure(backend: str, num_groups: int, num_workers: int, limit_s: float) -> tuple[str, int]:
    """Warm up, run all groups under both tools side by side; table and exit status."""
    program = find_tool()
    if program is None:
        return "compute-sanitizer is not on this machine.", NOT_AVAILABLE
    groups = [f"{index}/{num_groups}" for index in range(num_groups)]

    def tell(name: str, how: Ended) -> None:
        print(f"{how.seconds:6.1f} s  {name}: exit {how.code}", flush=True)

    warm = run_all(
        {
            group: python("-m", "benchmarks.gpu.sanitizer", "--backend", backend, "--group", group)
            for group in groups
        },
        num_workers=num_workers, each_s=90, total_s=limit_s, on_end=tell,
    )  # fmt: skip
    spent = max(how.seconds for how in warm.values())
    bad = {group: how.last_line for group, how in warm.items() if how.code != 0}
    if bad:
        return f"The cases fail without the tool already: {bad}", 1
    options = options_of(program)
    commands = {}
    for tool in TOOLS:
        commands[f"{tool} {CONTROL}"] = under(program, options, tool, "--planted", tool)
        for group in groups:
            commands[f"{tool} {group}"] = under(
                program, options, tool, "--backend", backend, "--group", group
            )
    ended = run_all(
        commands,
        num_workers=num_workers, each_s=limit_s, total_s=limit_s - spent, on_end=tell,
        env=environment(PYTORCH_NO_CUDA_MEMORY_CACHING="1"),
    )  # fmt: skip
    found = {
        (tool, group): read_report(ended[f"{tool} {group}"].output)
        for tool in TOOLS
        for group in (CONTROL, *groups)
    }
    status = verdict(found, ended)
    table = table_of(found, ended)
    if status == NOT_AVAILABLE:
        table = f"compute-sanitizer does not work on this machine.\n\n{table}"
    return table, status


def main() -> int:
    """Run, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="cuda_sm100")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--groups", type=int, default=7, help="processes for each tool")
    parser.add_argument("--workers", type=int, default=16, help="processes at a time")
    parser.add_argument("--limit", type=float, default=190, help="seconds for all")
    parser.add_argument("--group", help="run this one, I/N, in this process")
    parser.add_argument("--planted", choices=TOOLS, help="run the planted fault in this process")
    arguments = parser.parse_args()
    if arguments.planted:
        return run_planted(arguments.planted)
    if arguments.group:
        return run_group(arguments.backend, arguments.group)
    table, status = measure(arguments.backend, arguments.groups, arguments.workers, arguments.limit)
    print(table)
    if arguments.out:
        arguments.out.write_text(json.dumps({"table": table, "status": status}, indent=1))
    return status


if __name__ == "__main__":
    sys.exit(main())
