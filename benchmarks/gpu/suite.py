"""Everything that has to be seen on a GPU, in one run, into one folder.

    python -m benchmarks.gpu.suite OUT [--backend cuda_sm100] [--parts golden kernels ...]

Checks run side by side in processes of their own, then the parts that want the machine for
themselves, one after the other: planted faults and the sanitizer, which fill all cores, and the
measurements. A part that fails or runs out of time leaves what it has, and the others go on. OUT
gets `conformance.json` (the reports of all conformance parts), `figures.json` (what the others
found), `machine.json`, `log.txt`, `summary.md`, which is printed, too, and the timelines of
`async-depth` for the picture. Needs no network and no installation beyond the packages of the
project.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.processes import ROOT, environment, python

# Limits in seconds; checks run together, the others alone.
CHECKS = {
    "ops-exact": 160, "ops-normative": 160, "linear-block-scaled": 160,
    "experts-block-scaled": 160, "real-shapes": 160, "features": 160, "scenarios": 160,
    "golden": 160, "golden-drafts": 160,
}  # fmt: skip
ALONE = {"mutations": 125, "sanitizer": 200, "throughput": 130, "kernels": 100, "async-depth": 95}
MODULES = {
    "mutations": "benchmarks.gpu.mutations",
    "sanitizer": "benchmarks.gpu.sanitizer",
    "throughput": "benchmarks.gpu.throughput",
    "kernels": "benchmarks.gpu.kernels",
    "async-depth": "benchmarks.async_depth",
}
GOLDEN = {
    "golden": "tests/backend/test_golden.py",
    "golden-drafts": "tests/backend/test_golden_drafts.py",
}
PICTURED = "seqs64_"
"""Timelines that are kept, one for each depth."""
NOT_AVAILABLE = 3
"""Exit status of a part whose tool does not work on the machine."""
QUERIES = {
    "ops-exact": ["ops/*:exact,*"],
    "ops-normative": ["ops/*:normative,*"],
    "linear-block-scaled": ["ops/quant/linear:*", "--set", "backend.options.block_scaled=true"],
    "experts-block-scaled": ["ops/moe/moe_experts:*", "--set", "backend.options.block_scaled=true"],
    "real-shapes": ["ops/*,flash*", "--full"],
    "features": ["features/"],
    "scenarios": ["scenarios/"],
}


def machine() -> dict[str, Any]:
    """What ran here."""
    import triton

    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cpu": platform.machine(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = properties.name
        facts["compute_capability"] = f"{properties.major}.{properties.minor}"
        facts["memory_gib"] = round(properties.total_memory / 2**30, 1)
    return facts


def command_of(part: str, out: Path, backend: str) -> list[str]:
    """The process that computes a part."""
    if part in GOLDEN:
        return python(
            "-m", "pytest", GOLDEN[part], "--backend", backend,
            "-v", "--no-header", "-W", "default", "-p", "no:cacheprovider", "--tb=short",
            "--durations=5",
        )  # fmt: skip
    if part in QUERIES:
        code = "import sys; from deepinfer.cli import main; sys.exit(main(sys.argv[1:]))"
        return python(
            "-c", code, "conformance", *QUERIES[part], "--backend", backend,
            "--report", str(out / part),
        )  # fmt: skip
    command = python("-m", MODULES[part], "--backend", backend, "--out", str(out / f"{part}.json"))
    if part == "async-depth":
        command += ["--limit", "50", "--traces", str(out / part)]
    return command


def start(part: str, out: Path, backend: str) -> subprocess.Popen[bytes]:
    """Start a part; what it prints goes to OUT/part.log."""
    log = (out / f"{part}.log").open("wb")
    command = command_of(part, out, backend)
    env = {**os.environ, "PYTHONPATH": environment()["PYTHONPATH"]}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)


def wait(part: str, process: subprocess.Popen[bytes], deadline: float) -> str:
    """Wait until a part has ended or its time is up; a word for the summary."""
    try:
        code = process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "out of time"
    words = {0: "ok", NOT_AVAILABLE: "not available on this machine"}
    return words.get(code, f"exit {code}")


def run(parts: Sequence[str], out: Path, backend: str) -> dict[str, str]:
    """Run the parts; the word of each by name."""
    words: dict[str, str] = {}
    begun = time.monotonic()
    checks = {part: start(part, out, backend) for part in CHECKS if part in parts}
    for part, process in checks.items():
        words[part] = wait(part, process, begun + CHECKS[part])
        print(f"{time.monotonic() - begun:6.1f} s  {part}: {words[part]}", flush=True)
    for part, limit in ALONE.items():
        if part in parts:
            process = start(part, out, backend)
            words[part] = wait(part, process, time.monotonic() + limit)
            print(f"{time.monotonic() - begun:6.1f} s  {part}: {words[part]}", flush=True)
    return words


def tail(path: Path, lines: int) -> str:
    """Last lines of a log."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def summary(words: dict[str, str], out: Path, facts: dict[str, Any]) -> str:
    """A page: the state of every part, its table, or the end of its log."""
    pieces = [
        f"# {facts.get('gpu', 'no GPU')}, {facts['date']}, torch {facts['torch']}, "
        f"triton {facts['triton']}"
    ]
    for part, word in words.items():
        pieces.append(f"\n## {part}: {word}\n")
        result, report = out / f"{part}.json", out / part / "report.json"
        if result.exists():
            pieces.append(figures_in(result)["table"])
        if report.exists():
            pieces.append(outcomes(json.loads(report.read_text())))
        if word != "ok" or part in GOLDEN:
            pieces.append(f"```\n{tail(out / f'{part}.log', 25)}\n```")
    return "\n".join(pieces) + "\n"


def figures_in(result: Path) -> dict[str, Any]:
    """What a part found; reports of the command line keep it under `figures`."""
    data: dict[str, Any] = json.loads(result.read_text())
    figures: dict[str, Any] = data.get("figures", data) if "table" not in data else data
    return figures


def outcomes(report: dict[str, Any]) -> str:
    """Counts of a conformance report by status, and what failed."""
    counts = Counter(outcome["status"] for outcome in report["outcomes"])
    words = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    bad = [o for o in report["outcomes"] if o["status"] not in ("passed", "absent")]
    lines = [f"{words} in {report['seconds']:.0f} s"]
    lines += [f"- {outcome['case_id']}: {outcome['message'][:300]}" for outcome in bad[:40]]
    return "\n".join(lines)


def merge(words: dict[str, str], out: Path) -> None:
    """One log and one report instead of many, so that few files have to travel."""
    reports = {}
    for part in QUERIES:
        if (out / part / "report.json").exists():
            reports[part] = json.loads((out / part / "report.json").read_text())
        shutil.rmtree(out / part, ignore_errors=True)
    if reports:
        (out / "conformance.json").write_text(json.dumps(reports))
    figures = {}
    for part in ALONE:
        result = out / f"{part}.json"
        if result.exists():
            figures[part] = figures_in(result)
            result.unlink()
    if figures:
        (out / "figures.json").write_text(json.dumps(figures, indent=1))
    for trace in (out / "async-depth").glob(f"{PICTURED}*"):
        trace.rename(out / trace.name)
    shutil.rmtree(out / "async-depth", ignore_errors=True)
    whole = [f"===== {part}\n{tail(out / f'{part}.log', 400)}\n" for part in words]
    (out / "log.txt").write_text("\n".join(whole))
    for part in words:
        (out / f"{part}.log").unlink()


def main() -> int:
    """Run, print the summary, and return 1 if any part was not ok."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--backend", default="cuda_sm100")
    known = [*CHECKS, *ALONE]
    parser.add_argument("--parts", nargs="+", choices=known, default=known)
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    facts = machine()
    (out / "machine.json").write_text(json.dumps(facts, indent=1) + "\n")
    words = run(arguments.parts, out, arguments.backend)
    page = summary(words, out, facts)
    (out / "summary.md").write_text(page)
    merge(words, out)
    print(page)
    return 0 if all(word == "ok" for word in words.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
