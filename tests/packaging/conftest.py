"""Builds packages the way a user or a third party would, without any index."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

MakeDistribution = Callable[[str, Mapping[str, str]], None]
Pip = Callable[..., None]
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

OFFLINE = ("--no-index", "--no-deps", "--disable-pip-version-check")


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def pip() -> Pip:
    """Runs pip offline and fails with its output."""

    def run(command: str, source: Path, *options: str | Path) -> None:
        arguments = [command, source, *OFFLINE, "--no-build-isolation", *options]
        done = subprocess.run(
            [sys.executable, "-m", "pip", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, root: Path, pip: Pip) -> Path:
    """The project's own wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", root, "--wheel-dir", folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed_wheel(tmp_path_factory: pytest.TempPathFactory, wheel: Path, pip: Pip) -> Path:
    """A folder into which the wheel was installed."""
    folder = tmp_path_factory.mktemp("installed")
    pip("install", wheel, "--target", folder)
    return folder


@pytest.fixture(scope="session")
def run_python() -> RunPython:
    """Runs code in a new interpreter that finds packages in the given folders first."""

    def run(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
        inherited = os.environ.get("PYTHONPATH")
        paths = [*map(str, folders), *([inherited] if inherited else [])]
        return subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            cwd=folders[0] if folders else None,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    return run


@pytest.fixture
def make_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeDistribution:
    """Puts a made-up installed distribution with backend plugins on this process's path.

    The mapping gives the source of one plugin module for each entry point name.
    """
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def make(distribution: str, plugins: Mapping[str, str]) -> None:
        folder = site / f"{distribution}-1.5.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n", encoding="utf-8"
        )
        lines = ["[deepinfer.backends]"]
        for name, source in plugins.items():
            module = f"{distribution}_{name}_plugin"
            (site / f"{module}.py").write_text(source, encoding="utf-8")
            lines.append(f"{name} = {module}")
            # Forget the module afterwards: another test may use the name again.
            monkeypatch.setitem(sys.modules, module, sys)
            del sys.modules[module]
        (folder / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")

    return make
