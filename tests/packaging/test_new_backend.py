"""`deepinfer backend new`: the package installs, runs the suite, and a wrong op is named."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer.device.errors import ConfigError
from deepinfer_conformance.new_backend import write_backend

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]
Pip = Callable[..., None]

RUN = """
import sys
from deepinfer.cli import main
sys.exit(main({arguments!r}))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A generated package, not installed yet."""
    folder = tmp_path / "deepinfer-acme"
    write_backend("acme", folder)
    return folder


def _conformance(
    run_python: RunPython,
    pip: Pip,
    package: Path,
    *folders: Path,
    query: str,
    limit_s: int = 120,
) -> tuple[int, str, dict[str, str]]:
    """Install the package into a folder of its own and run the suite on it."""
    site, reports = package.parent / "site", package.parent / "reports"
    pip("install", package, "--target", site)
    arguments = ["conformance", "--backend", "acme", "--report", str(reports)]
    arguments += ["--time-limit", str(limit_s), query]
    # Spawned children import the main module: it has to be guarded.
    code = 'if __name__ == "__main__":\n' + "\n".join(
        f"    {line}" for line in RUN.format(arguments=arguments).strip().splitlines()
    )
    script = package.parent / "run.py"
    script.write_text(code, encoding="utf-8")
    done = run_python(
        f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", site, *folders
    )
    report = json.loads((reports / "report.json").read_text(encoding="utf-8"))
    statuses = {outcome["case_id"]: outcome["status"] for outcome in report["outcomes"]}
    return done.returncode, done.stdout + done.stderr, statuses


def test_generated_package_passes_its_one_op(
    package: Path, installed_wheel: Path, pip: Pip, run_python: RunPython
) -> None:
    code, text, statuses = _conformance(
        run_python, pip, package, installed_wheel, query="ops/norm/"
    )
    assert code == 0, text
    assert set(statuses.values()) == {"passed"}


def test_generated_package_is_told_what_is_missing(
    package: Path, installed_wheel: Path, pip: Pip, run_python: RunPython
) -> None:
    code, text, statuses = _conformance(
        run_python, pip, package, installed_wheel, query="ops/kv/*control"
    )
    assert code == 1, text
    assert set(statuses.values()) == {"missing"}
    assert "ops are missing: kv/copy_rows" in " ".join(text.split())


def test_planted_wrong_op_is_reported_with_case_and_repeat_command(
    package: Path, installed_wheel: Path, pip: Pip, run_python: RunPython
) -> None:
    source = package / "deepinfer_acme" / "ops" / "norm.py"
    text = source.read_text(encoding="utf-8")
    source.write_text(text.replace("+ eps)", "+ 2.0 * eps + 1e-3)"), encoding="utf-8")
    code, text, statuses = _conformance(
        run_python, pip, package, installed_wheel, query="ops/norm/rmsnorm:exact,control"
    )
    assert code == 1, text
    assert statuses == {"ops/norm/rmsnorm:exact,control": "failed"}
    words = " ".join(text.split())
    assert "ops/norm/rmsnorm:exact,control: out: error" in words
    assert "repeat: deepinfer conformance --backend acme 'ops/norm/rmsnorm:exact,control'" in words


@pytest.mark.parametrize(
    ("fault", "status"), [("os._exit(3)", "crashed"), ("time.sleep(600)", "timeout")]
)
def test_crash_or_hang_costs_one_case(
    package: Path,
    installed_wheel: Path,
    pip: Pip,
    run_python: RunPython,
    *,
    fault: str,
    status: str,
) -> None:
    source = package / "deepinfer_acme" / "ops" / "norm.py"
    text = source.read_text(encoding="utf-8")
    planted = (
        f"    if x.shape[0] == 1:\n        import os, time\n        {fault}\n    values = x.float()"
    )
    source.write_text(text.replace("    values = x.float()", planted), encoding="utf-8")
    code, text, statuses = _conformance(
        run_python, pip, package, installed_wheel, query="ops/norm/rmsnorm:exact,n*", limit_s=5
    )
    assert code == 1, text
    assert statuses.pop("ops/norm/rmsnorm:exact,n=1") == status
    assert len(statuses) > 1
    assert set(statuses.values()) == {"passed"}


@pytest.mark.parametrize("name", ["", "Acme", "9lives", "my-chip", "a b"])
def test_name_that_no_module_can_have_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected lower-case"):
        write_backend(name, tmp_path / "new")


def test_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        write_backend("acme", tmp_path)
