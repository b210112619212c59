"""What runs on the training machine imports nothing that such a machine lacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Of the engine's dependencies these are not installed where a model is trained.
ABSENT = ("pydantic", "pluggy", "yaml", "rich")


@pytest.mark.parametrize("module", ["benchmark", "train", "train_drafter", "evaluate"])
def test_a_stage_starts_without_the_engines_dependencies(module: str) -> None:
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({ABSENT!r}))\n"
        f"import deepinfer_training.{module} as stage\n"
        "sys.argv[1:] = ['--help']\n"
        "stage.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{ROOT / 'training'}:{ROOT}", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--data" in done.stdout
