"""Faults planted into kernels and compiled for the device: op conformance has to notice each.

    python -m benchmarks.gpu.mutations --backend cuda_sm100 --out mutations.json

The faults are those of `tests/kernels/mutations.py`. Each runs in a process of its own: first its
op cases with the right kernels, all of which have to pass, then with the fault, when at least one
has to fail. An op that raises has failed, and so has one that ends its process. A process that
runs out of time has shown nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.processes import Ended, python, run_all
from deepinfer.device.backend import Backend
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.registry import load_backend
from deepinfer_conformance.cases import OpCase
from deepinfer_conformance.run import run_case
from tests.kernels.mutations import MUTATIONS, cases_of, plant

RIGHT = "right kernels passed"


class Row(NamedTuple):
    """What became of one mutation.

    Attributes:
        verdict: `noticed`, `not noticed`, or what kept it from being judged.
        num_cases: op cases run with the fault.
        num_failed: how many of them failed.
        first: what the first of them said.
        seconds: of its process.
    """

    verdict: str
    num_cases: int
    num_failed: int
    first: str
    seconds: float


def failures(backend: Backend, reference: Backend, cases: list[OpCase]) -> list[str]:
    """What is wrong, case by case; ends with a case that raises, as the device may be lost."""
    found: list[str] = []
    for case in cases:
        try:
            result = run_case(backend, case, reference)
        # Whatever a broken kernel makes the driver say is what we are here to see.
        except Exception as error:
            return [*found, f"{case.case_id}: {type(error).__name__}: {error}"]
        if not result.passed:
            found.append(result.explain())
    return found


def judge(name: str, config: BackendConfig) -> int:
    """In the mutation's own process: print `RIGHT`, then the failures as JSON."""
    mutation = MUTATIONS[name]
    reference = load_backend(BackendConfig("reference", Numerics.NORMATIVE, {"runtime": "inline"}))
    cases = cases_of(mutation)
    wrong = failures(load_backend(config), reference, cases)
    if wrong:
        print(json.dumps(wrong))
        return 2
    print(RIGHT, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        plant(mutation, Path(folder), setattr)
        print(json.dumps(failures(load_backend(config), reference, cases)), flush=True)
    return 0


def row_of(name: str, ended: Ended) -> Row:
    """The verdict on a mutation from how its process ended."""
    num_cases = len(cases_of(MUTATIONS[name]))
    if ended.code is None:
        return Row("out of time", 0, 0, ended.last_line[:300], ended.seconds)
    if RIGHT not in ended.output.splitlines():
        return Row("wrong without the fault", 0, 0, ended.last_line[:300], ended.seconds)
    if ended.code != 0:
        first = f"process died with {ended.code}: {ended.last_line[:200]}"
        return Row("noticed", num_cases, 1, first, ended.seconds)
    found: list[str] = json.loads(ended.last_line)
    verdict = "noticed" if found else "not noticed"
    first = found[0].splitlines()[0][:300] if found else ""
    return Row(verdict, num_cases, len(found), first, ended.seconds)


def table_of(rows: Mapping[str, Row]) -> str:
    """Markdown."""
    noticed = sum(row.verdict == "noticed" for row in rows.values())
    lines = [
        f"{noticed} of {len(rows)} planted faults noticed\n",
        "| fault | kernel | verdict | failed | of cases | first |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {MUTATIONS[name].kernel.removeprefix('deepinfer_kernels.')} | {row.verdict} "
        f"| {row.num_failed} | {row.num_cases} | {row.first.replace('|', '/')} |"
        for name, row in rows.items()
    ]
    return "\n".join(lines)


def main() -> int:
    """Run all mutations, write the table; 1 if any was not noticed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="cuda_sm100")
    parser.add_argument("--interpret", action="store_true", help="without a GPU")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(MUTATIONS), default=list(MUTATIONS))
    parser.add_argument("--one", choices=list(MUTATIONS), help="run this one in this process")
    parser.add_argument("--workers", type=int, default=12, help="processes at a time")
    parser.add_argument("--limit", type=float, default=115, help="seconds for all")
    arguments = parser.parse_args()
    options = {"interpret": True} if arguments.interpret else {}
    if arguments.one:
        return judge(arguments.one, BackendConfig(arguments.backend, Numerics.NORMATIVE, options))
    more = ["--interpret"] if arguments.interpret else []
    begun = time.monotonic()

    def tell(name: str, ended: Ended) -> None:
        print(
            f"{time.monotonic() - begun:6.1f} s  {name}: {row_of(name, ended).verdict}", flush=True
        )

    ended = run_all(
        {
            name: python("-m", "benchmarks.gpu.mutations", "--one", name, "--backend",
                         arguments.backend, *more)
            for name in arguments.only
        },
        num_workers=arguments.workers,
        each_s=90,
        total_s=arguments.limit,
        on_end=tell,
    )  # fmt: skip
    rows = {name: row_of(name, how) for name, how in ended.items()}
    table = table_of(rows)
    print(table)
    if arguments.out:
        result = {"table": table, "rows": {name: row._asdict() for name, row in rows.items()}}
        arguments.out.write_text(json.dumps(result, indent=1))
    return 0 if all(row.verdict == "noticed" for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
