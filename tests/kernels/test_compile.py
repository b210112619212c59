"""Every kernel compiles for SM90 and SM100 without a GPU; in a process that does not interpret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module", params=[90, 100])
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    out: Path = tmp_path_factory.mktemp("compile") / "kernels.json"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [
            sys.executable, "-m", "deepinfer_kernels.compile", "--arch", str(request.param),
            "--out", str(out),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )  # fmt: skip
    assert out.exists(), done.stdout + done.stderr
    results: list[dict[str, Any]] = json.loads(out.read_text())
    return results


def test_no_kernel_exceeds_its_limits(compiled: list[dict[str, Any]]) -> None:
    faults = {result["kernel"]: result["faults"] for result in compiled if result["faults"]}
    assert faults == {}


def test_every_jitted_entry_is_compiled(compiled: list[dict[str, Any]]) -> None:
    found = {result["kernel"].rsplit(".", 1)[0] for result in compiled}
    folder = Path(__file__).parents[2] / "kernels/deepinfer_kernels"
    files = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*_triton.py")
        if "[grid]" in path.read_text() or "[(" in path.read_text()
    }
    assert files <= found
