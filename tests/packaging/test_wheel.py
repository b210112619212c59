"""What the wheel holds and that it works installed, away from the checkout."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

TOP_LEVEL = {
    "deepinfer",
    "deepinfer_kernels",
    "deepinfer_conformance",
    "deepinfer_reference",
    "deepinfer_cuda_sm100",
    "deepinfer_ascend950",
}


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    """Paths inside the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def data_files(folder: Path) -> set[str]:
    """Return the files below `folder`, relative to it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def packed_files(names: list[str], folder: str) -> set[str]:
    """Return the wheel's files below `folder`, relative to it."""
    return {name.removeprefix(folder) for name in names if name.startswith(folder)}


def test_wheel_installs_no_generic_top_level_name(names: list[str]) -> None:
    found = {name.split("/")[0] for name in names}
    assert {name for name in found if not name.endswith(".dist-info")} == TOP_LEVEL


def test_wheel_holds_every_preset(names: list[str], root: Path) -> None:
    presets = data_files(root / "configs")
    assert presets
    assert packed_files(names, "deepinfer/_presets/") == presets


def test_wheel_holds_the_bundled_checkpoint_with_its_notices(names: list[str], root: Path) -> None:
    packed = packed_files(names, "deepinfer/_checkpoints/tiny-v41/")
    assert packed == data_files(root / "checkpoints/tiny-v41")
    assert {"config.json", "THIRD_PARTY_NOTICES"} <= packed


def test_wheel_holds_the_texts_and_tasks_of_eval_with_their_notices(
    names: list[str], root: Path
) -> None:
    packed = packed_files(names, "deepinfer/evaluation/data/")
    assert packed == data_files(root / "deepinfer/evaluation/data")
    assert {"THIRD_PARTY_NOTICES", "tasks/recall.jsonl", "heldout/zh_tang.txt"} <= packed


def test_wheel_marks_its_packages_as_typed(names: list[str]) -> None:
    assert {f"{package}/py.typed" for package in TOP_LEVEL} <= set(names)


def test_wheel_holds_no_tests_and_no_bytecode(names: list[str]) -> None:
    assert not [name for name in names if name.endswith(".pyc") or "/tests/" in name]


def test_installed_wheel_is_used_and_lists_its_backends(
    installed_wheel: Path, run_python: RunPython
) -> None:
    done = run_python(
        "import deepinfer\n"
        "from deepinfer.device.registry import list_backends\n"
        "print(deepinfer.__file__, *(info.name for info in list_backends()))\n",
        installed_wheel,
    )
    assert done.returncode == 0, done.stderr
    location, *backends = done.stdout.split()
    assert location == str(installed_wheel / "deepinfer/__init__.py")
    assert backends == ["ascend950", "cuda_sm100", "reference"]
