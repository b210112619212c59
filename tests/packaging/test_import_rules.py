"""The import rules catch a breach: each is planted in a copy of the sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

PACKAGE_PARENTS = (
    ".",
    "kernels",
    "conformance",
    "backends/reference",
    "backends/cuda_sm100",
    "backends/ascend950",
)
BREACHES = {
    "1. The engine side": ("deepinfer/config/planted.py", "deepinfer_reference"),
    "2a. Of deepinfer": ("backends/reference/deepinfer_reference/planted.py", "deepinfer.config"),
    "2b. Backends do not": (
        "backends/cuda_sm100/deepinfer_cuda_sm100/planted.py",
        "deepinfer_ascend950",
    ),
    "3. Kernels import": ("kernels/deepinfer_kernels/planted.py", "deepinfer.device"),
    "4. The device layer": ("deepinfer/device/planted.py", "deepinfer.config"),
    "5. Conformance uses": ("conformance/deepinfer_conformance/planted.py", "deepinfer.config"),
}
SEAM_BREACHES = ("import triton", "import torch_npu", "import torch\ntorch.cuda.is_available()")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A copy of the sources with one breach of each rule in it."""
    copy = tmp_path_factory.mktemp("planted")
    shutil.copy(root / "pyproject.toml", copy)
    for folder in ("deepinfer", "kernels", "conformance", "backends"):
        shutil.copytree(root / folder, copy / folder)
    for path, module in BREACHES.values():
        (copy / path).write_text(f"import {module}\n", encoding="utf-8")
    return copy


def run(tool: Sequence[str], copy: Path) -> str:
    """Return the output of a tool that has to find something in the copy."""
    paths = os.pathsep.join(str(copy / parent) for parent in PACKAGE_PARENTS)
    done = subprocess.run(
        tool,
        cwd=copy,
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def report(planted: Path) -> str:
    """What import-linter says about the copy."""
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return run([sys.executable, "-c", code, "--no-cache"], planted)


@pytest.mark.parametrize("rule", BREACHES)
def test_planted_import_breaks_its_rule(report: str, rule: str) -> None:
    (verdict,) = [
        line for line in report.splitlines() if line.startswith(rule) and "BROKEN" in line
    ]
    assert verdict


@pytest.mark.parametrize("source", SEAM_BREACHES)
@pytest.mark.parametrize("folder", ["deepinfer/engine", "backends/reference/deepinfer_reference"])
def test_vendor_module_is_refused_outside_device_backends(
    planted: Path, folder: str, source: str
) -> None:
    path = planted / folder / "vendor.py"
    path.write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select=TID251", str(path)]
    assert "TID251" in run(command, planted)


@pytest.mark.parametrize("folder", ["kernels", "backends", "conformance", "configs"])
def test_plain_folder_is_refused_as_a_package(planted: Path, folder: str) -> None:
    path = planted / "deepinfer/engine/generic.py"
    path.write_text(f"import {folder}\n", encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select=TID251", str(path)]
    assert "TID251" in run(command, planted)
