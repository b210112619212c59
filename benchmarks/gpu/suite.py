"""Everything that has to be seen on a GPU, in one run, into one folder.

    python benchmarks/gpu/suite.py OUT [--backend cuda_sm100] [--parts golden kernels ...]

Checks run side by side in processes of their own, then the measurements one after the other. A
part that fails or runs out of time leaves what it has, and the others go on. OUT gets one file
per part (`conformance.json`, `golden.log`, `generation.json`, `throughput.json`, `kernels.json`),
`machine.json` and `summary.md`, which is printed, too. Needs no network and no installation
beyond the packages of the project.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
# Limits in seconds; checks run together, measurements alone.
CHECKS = {"conformance-exact": 150, "conformance-normative": 150, "golden": 150, "generation": 150}
MEASUREMENTS = {"throughput": 100, "kernels": 100}


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
    if part.startswith("conformance-"):
        script = ["conformance.py", "--numerics", part.removeprefix("conformance-")]
    else:
        script = [f"{part}.py"]
    path, *options = script
    return [
        sys.executable, str(Path(__file__).parent / path), *options, "--backend", backend,
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
        result = out / f"{part}.json"
        if result.exists():
            pieces.append(json.loads(result.read_text())["table"])
        if word != "ok" or not result.exists():
            pieces.append(f"```\n{tail(out / f'{part}.log', 25)}\n```")
    return "\n".join(pieces) + "\n"


def merge(words: dict[str, str], out: Path) -> None:
    """One log instead of many, so that few files have to travel."""
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
