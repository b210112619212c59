"""The JSON report: what it holds, and that it is strict and whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer.cli.report import write_json
from deepinfer.config import load_config
from deepinfer.device.errors import ConfigError, ContractError


def test_report_holds_environment_versions_configuration_and_figures(tmp_path: Path) -> None:
    config = load_config((), ["numerics=exact"])
    write_json(tmp_path / "r.json", "test", {"speed": 1.5}, config=config)
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["command"] == "test"
    assert report["figures"] == {"speed": 1.5}
    assert report["config"]["numerics"] == "exact"
    assert report["versions"]["torch"]
    assert report["environment"]["cpu_count"] >= 1
    assert report["date_utc"].endswith("+00:00")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), object()])
def test_figure_that_json_lacks_is_refused_and_leaves_no_file(tmp_path: Path, bad: object) -> None:
    with pytest.raises(ContractError, match="report of test"):
        write_json(tmp_path / "r.json", "test", {"x": bad})
    assert list(tmp_path.iterdir()) == []


def test_failed_write_keeps_the_old_report(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")
    with pytest.raises(ContractError):
        write_json(path, "test", {"x": float("nan")})
    assert path.read_text() == "old"


def test_report_replaces_an_older_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")
    write_json(path, "test", {})
    assert json.loads(path.read_text())["figures"] == {}
    assert list(tmp_path.iterdir()) == [path]


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent/r\.json"):
        write_json(tmp_path / "absent" / "r.json", "test", {})
