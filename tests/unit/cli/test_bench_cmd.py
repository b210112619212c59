"""`deepinfer bench replay`: table, files, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from deepinfer.cli import main


def test_figures_are_shown_written_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, picture = tmp_path / "replay.json", tmp_path / "replay.svg"
    command = ["bench", "replay", "--lengths", "64,200", "--repeats", "1", "--chunk", "128"]
    assert main([*command, "--svg", str(picture), "--json", str(report)]) == 0
    assert "no launches" in capsys.readouterr().out
    short, long = json.loads(report.read_text())["figures"]["lengths"]
    # 140 tokens are kept: nothing is left out of the first prompt.
    assert short["counted_ratio"] == 1.0
    assert long["counted_ratio"] < 1.0
    assert long["counted_ratio"] == pytest.approx(long["formula_ratio"], rel=0.01)
    assert long["exact_us"] > 0
    names = [node.tag.rpartition("}")[2] for node in ElementTree.parse(picture).iter()]
    assert names.count("polyline") >= 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "64,x"], "--lengths 64,x: expected whole numbers"),
        (["--lengths", "0"], "--lengths 0: expected numbers from 1"),
        (["--lengths", "5000"], "longer than the model's 4096 positions"),
        (["--chunk", "0"], "--chunk 0"),
        (["--experts", "8"], "--experts goes with --layers"),
        (["--layers", "3"], "layer 3 reads what layer 2 wrote"),
        (["--svg", "nowhere/a.svg"], "there is no folder nowhere"),
        (["--set", "replay.keep_tokens=20"], "replay.keep_tokens = 20 is less"),
    ],
)
def test_bad_options_are_refused_before_the_work(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "replay", *options]) == 2
    assert message in capsys.readouterr().err
