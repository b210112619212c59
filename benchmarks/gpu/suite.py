"""Everything that has to be seen on a GPU, in one run, into one folder.

    python benchmarks/gpu/suite.py OUT [--backend cuda_sm100] [--parts golden kernels ...]

Checks run side by side in processes of their own, then the measurements one after the other. A
part that fails or runs out of time leaves what it has, and the others go on. OUT gets
`conformance.json` (the reports of all conformance parts), `throughput.json`, `kernels.json`,
`machine.json`, `log.txt` and `summary.md`, which is printed, too. Needs no network and no
installation beyond the packages of the project.
"""

from __future__ import annotations

import argparse
import json
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

ROOT = Path(__file__).parents[2]
# Limits in seconds; checks run together, measurements alone.
CHECKS = {
    "ops-exact": 160, "ops-normative": 160, "linear-block-scaled": 160,
    "experts-block-scaled": 160, "real-shapes": 160, "features": 160, "scenarios": 160,
    "golden": 160,
}  # fmt: skip
MEASUREMENTS = {"throughput": 100, "kernels": 100}
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
    if part == "golden":
        return [
            sys.executable, "-m", "pytest", "tests/backend/test_golden.py", "--backend", backend,
            "-v", "--no-header", "-W", "default", "-p", "no:cacheprovider", "--tb=short",
            "--durations=5",
        ]  # fmt: skip
    if part in QUERIES:
        code = "import sys; from deepinfer.cli import main; sys.exit(main(sys.argv[1:]))"
        return [
            sys.executable, "-c", code, "conformance", *QUERIES[part], "--backend", backend,
            "--report", str(out / part),
        ]  # fmt: skip
    return [
        sys.executable, str(Path(__file__).parent / f"{part}.py"), "--backend", backend,
        "--out", str(out / f"{part}.json"),
    ]  # fmt: skip


def start(part: str, out: Path, backend: str) -> subprocess.Popen[bytes]:
    """Start a part; what it prints goes to OUT/part.log."""
    log = (out / f"{part}.log").open("wb")
    command = command_of(part, out, backend)
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def wait(part: str, process: subprocess.Popen[bytes], deadline: float) -> str:
    """Wait until a part has ended or its time is up; a word for the summary."""
    try:
        code = process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "out of time"
    return "ok" if code == 0 else f"exit {code}"


def run(parts: Sequence[str], out: Path, backend: str) -> dict[str, str]:
    """Run the parts; the word of each by name."""
    words: dict[str, str] = {}
    begun = time.monotonic()
    checks = {part: start(part, out, backend) for part in CHECKS if part in parts}
    for part, process in checks.items():
        words[part] = wait(part, process, begun + CHECKS[part])
        print(f"{time.monotonic() - begun:6.1f} s  {part}: {words[part]}", flush=True)
    for part, limit in MEASUREMENTS.items():
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
            pieces.append(json.loads(result.read_text())["table"])
        if report.exists():
            pieces.append(outcomes(json.loads(report.read_text())))
        if word != "ok" or part == "golden":
            pieces.append(f"```\n{tail(out / f'{part}.log', 25)}\n```")
    return "\n".join(pieces) + "\n"


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
    whole = [f"===== {part}\n{tail(out / f'{part}.log', 400)}\n" for part in words]
    (out / "log.txt").write_text("\n".join(whole))
    for part in words:
        (out / f"{part}.log").unlink()


def main() -> int:
    """Run, print the summary, and return 1 if any part was not ok."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--backend", default="cuda_sm100")
    known = [*CHECKS, *MEASUREMENTS]
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
