"""The owner's report: what it calls emulated, passed and failed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deepinfer.device.ops import load_all

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report() -> ModuleType:
    path = ROOT / "benchmarks/ascend950_report.py"
    spec = importlib.util.spec_from_file_location("ascend950_report", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _row(op: str, *failures: str) -> dict[str, Any]:
    return {"op": op, "numerics": "exact", "cases": 3, "worst": 0.1, "failures": list(failures)}


def _found(**changes: object) -> dict[str, Any]:
    return {
        "probe": {"device": "one", "versions": {"torch": "2"}, "missing": []},
        "ops": [_row("quant/linear")],
        "checks": {},
        "golden": {"tiny_a": {"cases": 2, "differing": []}},
        "generation": [],
        "speed": [],
        **changes,
    }


def test_every_check_is_shown_by_existing_ops(report: ModuleType) -> None:
    names = [f"{spec.family}/{spec.name}:" for spec in load_all().values()]
    for prefixes in report.CHECKS.values():
        for prefix in prefixes:
            assert any(name.startswith(prefix) for name in names), prefix


def test_every_check_stands_in_the_readme(report: ModuleType) -> None:
    text = (ROOT / "backends/ascend950/README.md").read_text(encoding="utf-8")
    for check in report.CHECKS:
        assert check.partition(". ")[2] in text, check


def test_emulation_settles_no_check(report: ModuleType) -> None:
    rows = [_row("mhc/mhc_expand")]
    assert set(report.checks(rows, emulated=True).values()) == {
        "open: the emulation follows the documentation"
    }
    assert report.checks(rows, emulated=False)["4. direction of npu_mhc_post"] == "passes"


def test_failed_op_fails_its_check_and_the_report(report: ModuleType) -> None:
    rows = [_row("mhc/mhc_expand", "case: wrong")]
    found = report.checks(rows, emulated=False)
    assert found["4. direction of npu_mhc_post"] == "FAILS in mhc/mhc_expand"
    assert report.has_failed(_found(ops=rows))
    assert "- case: wrong" in report.markdown(_found(ops=rows), "title")


@pytest.mark.parametrize(
    "changes",
    [
        {"ops": {"error": "RuntimeError: gone"}},
        {"speed": {"error": "RuntimeError: gone"}},
        {"golden": {"tiny_a": {"cases": 2, "differing": ["a"]}}},
    ],
)
def test_crash_or_difference_fails_the_report(
    report: ModuleType, changes: dict[str, object]
) -> None:
    assert not report.has_failed(_found())
    assert report.has_failed(_found(**changes))


def test_crash_of_a_part_is_kept(report: ModuleType) -> None:
    def part() -> None:
        raise RuntimeError("device gone")

    assert report.attempt(part) == {"error": "RuntimeError: device gone"}


def test_without_a_device_nothing_runs(
    report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["report", "--out", str(tmp_path / "out")])
    monkeypatch.setattr(
        report, "probe", lambda options: {"missing": ["no NPU"], "device": "", "versions": {}}
    )
    assert report.main() == 2
    assert not (tmp_path / "out").exists()
