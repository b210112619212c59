"""The backend's README says of every op what the backend does."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpChoice
from deepinfer_ascend950.op_table import plan
from deepinfer_ascend950.schema.signature import wheel_schemas

README = Path(__file__).parents[2] / "backends/ascend950/README.md"
CHOICES = plan(BackendConfig("ascend950", Numerics.NORMATIVE, {}))


def _status(choice: OpChoice) -> str:
    if choice.implementation == "composed":
        return "by its parts"
    used = choice.reason.partition("torch: ")[0]
    return "S E" if any(operator in used for operator in wheel_schemas().operators) else "E"


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.op)
def test_row_of_op(choice: OpChoice) -> None:
    row = f"| {choice.op} | {choice.reason} | {choice.layout} | {_status(choice)} |"
    assert row in README.read_text(encoding="utf-8").splitlines()


def test_no_row_of_an_unknown_op() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    start = lines.index("| op | choice and reason | layout | status |") + 2
    table = lines[start : start + len(CHOICES) + 1]
    assert [line.split(" ")[1] for line in table if line] == [choice.op for choice in CHOICES]


def test_wheel_version() -> None:
    assert f"torch_npu {wheel_schemas().version}" in README.read_text(encoding="utf-8")
