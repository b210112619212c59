"""A backend of somebody else: a package built, installed and selected without editing ours."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]
Pip = Callable[..., None]

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "deepinfer-acme"
version = "3.1"

[project.entry-points."deepinfer.backends"]
acme = "deepinfer_acme.plugin"
acme_broken = "deepinfer_acme.no_such_module"
acme_future = "deepinfer_acme.future"
acme_misspelt = "deepinfer_acme.misspelt"
"""
PLUGIN = """
from types import SimpleNamespace

from deepinfer.device.hookspecs import hookimpl
from deepinfer.device.probe import Probe


@hookimpl
def deepinfer_probe():
    return Probe({name!r}, True, (), "Acme NPU", seam_version={seam_version})


@hookimpl
def {create_hook}(config):
    return SimpleNamespace(name=config.name, numerics=config.numerics)
"""
SELECT = """
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.registry import load_backend

print("selected", load_backend(BackendConfig({name!r}, Numerics.NORMATIVE)))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, pip: Pip) -> Path:
    """A folder into which the third party's distribution was installed."""
    source = tmp_path_factory.mktemp("acme")
    package = source / "deepinfer_acme"
    package.mkdir()
    create = "deepinfer_create_backend"
    files = {
        source / "pyproject.toml": PYPROJECT,
        package / "__init__.py": "",
        package / "plugin.py": PLUGIN.format(name="acme", seam_version=1, create_hook=create),
        package / "future.py": PLUGIN.format(
            name="acme_future", seam_version=999, create_hook=create
        ),
        package / "misspelt.py": PLUGIN.format(
            name="acme_misspelt", seam_version=1, create_hook="deepinfer_creat_backend"
        ),
    }
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    target = tmp_path_factory.mktemp("site")
    pip("install", source, "--target", target)
    return target


def select(run_python: RunPython, name: str, *folders: Path) -> str:
    """Return the output, or the last line of the error, of selecting a backend."""
    done = run_python(SELECT.format(name=name), *folders)
    return done.stdout if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_installed_package_is_listed_beside_our_backends(
    site: Path, installed_wheel: Path, run_python: RunPython
) -> None:
    done = run_python(
        "from deepinfer.device.registry import list_backends\n"
        "print(*(info.name for info in list_backends()))\n",
        site,
        installed_wheel,
    )
    assert done.returncode == 0, done.stderr
    assert {"acme", "acme_broken", "acme_future", "acme_misspelt", "reference"} <= set(
        done.stdout.split()
    )


def test_installed_package_is_selected_by_name(
    site: Path, installed_wheel: Path, run_python: RunPython
) -> None:
    text = select(run_python, "acme", site, installed_wheel)
    assert text.startswith("selected namespace(name='acme', numerics=<Numerics.NORMATIVE")


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("acme_broken", "no_such_module"),
        ("acme_future", "seam version 999"),
        ("acme_misspelt", "unknown hook 'deepinfer_creat_backend'"),
    ],
)
def test_unusable_plugin_of_a_package_is_refused_naming_it(
    site: Path, installed_wheel: Path, run_python: RunPython, *, name: str, cause: str
) -> None:
    text = select(run_python, name, site, installed_wheel)
    assert f"backend '{name}'" in text
    assert "deepinfer-acme 3.1" in text
    assert cause in text
