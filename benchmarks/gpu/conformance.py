"""Every op case and error case of one numerics mode, against the reference backend."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.registry import load_backend
from deepinfer_conformance.cases import OpCase, OpErrorCase, error_cases, op_cases
from deepinfer_conformance.run import refusal_fault, run_case


def main() -> int:
    """Run the cases; return 1 if any failed. The result is rewritten as the run goes on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--numerics", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--query", default="", help="prefix or pattern of case ids")
    arguments = parser.parse_args()
    numerics = Numerics(arguments.numerics)
    backend = load_backend(BackendConfig(arguments.backend, numerics, {}))
    reference = load_backend(BackendConfig("reference", numerics, {"runtime": "inline"}))
    cases = [case for case in op_cases(arguments.query) if case.numerics is numerics]
    errors = [case for case in error_cases(arguments.query) if case.numerics is numerics]
    begun = time.monotonic()
    faults: dict[str, str] = {}
    done: Counter[str] = Counter()
    bad: Counter[str] = Counter()

    def save() -> None:
        seconds = time.monotonic() - begun
        lines = ["| family | cases | failed |", "|---|---|---|"]
        lines += [f"| {family} | {done[family]} | {bad[family]} |" for family in sorted(done)]
        lines.append(f"\n{sum(done.values())} of {len(cases) + len(errors)} in {seconds:.0f} s")
        lines += [f"- {name}: {fault[:300]}" for name, fault in list(faults.items())[:40]]
        result: dict[str, Any] = {"table": "\n".join(lines), "faults": faults, "seconds": seconds}
        arguments.out.write_text(json.dumps(result, indent=1))

    everything: list[OpCase | OpErrorCase] = [*cases, *errors]
    for index, case in enumerate(everything):
        family = case.spec.family
        try:
            if isinstance(case, OpCase):
                result = run_case(backend, case, reference)
                fault = "" if result.passed else result.explain()
            else:
                fault = refusal_fault(backend, case)
        except Exception as error:
            # Whatever a device or a compiler raises is a failed case; the next one goes on.
            fault = f"{type(error).__name__}: {error}"
            print(case.case_id)
            traceback.print_exc()
            if "CUDA error" in fault:
                # Nothing on this device works any more in this process.
                faults[case.case_id] = fault
                bad[family] += 1
                break
        done[family] += 1
        if fault:
            faults[case.case_id] = fault
            bad[family] += 1
        if index % 50 == 0:
            save()
            print(f"{index} of {len(cases) + len(errors)}, {len(faults)} failed", flush=True)
    save()
    return 1 if faults or sum(done.values()) < len(cases) + len(errors) else 0


if __name__ == "__main__":
    sys.exit(main())
