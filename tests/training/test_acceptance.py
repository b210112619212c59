"""eval.json says of every target whether it is met, and refuses to judge what was not measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer.device.errors import ConfigError
from deepinfer_training import acceptance, loss_curve

DISTANCES = ("8", "24", "48", "128", "256", "512", "960")


def row(task: str, group: str, value: float, control: str = "", metric: str = "exact") -> Any:  # noqa: ANN401
    return {"task": task, "group": group, "control": control, "metric": metric, "value": value}


def report(scale: float, *, recall: float = 1.0) -> dict[str, Any]:
    texts = acceptance.BASELINE_BITS_PER_BYTE.items()
    rows = [row("bpb", name, value * scale, metric="bits_per_byte") for name, value in texts]
    rows += [row("recall", d, recall) for d in DISTANCES]
    rows += [row("recall", d, 0.0, f"selections_{c}") for d in DISTANCES[2:]
             for c in ("none", "random")]  # fmt: skip
    rows += [row("copy", "16", 0.96), row("json", "object", 1.0), row("add", "2digit", 0.84)]
    return {"environment": {}, "versions": {}, "figures": {"scores": rows}}


CALIBRATED = {
    "mean_accepted": 1.9, "mean_accepted_by_domain": {"a": 0.5, "b": 2.5}, "auroc": 0.8,
    "ece_after": [0.01, 0.031],
}  # fmt: skip


@pytest.fixture
def judged(tmp_path: Path) -> dict[str, bool]:
    (tmp_path / "n.json").write_text(json.dumps(report(1.019, recall=0.89)))
    (tmp_path / "e.json").write_text(json.dumps(report(1.0)))
    (tmp_path / "sts.json").write_text(json.dumps(CALIBRATED))
    content = acceptance.evaluation(tmp_path, tmp_path / "n.json", tmp_path / "e.json")
    assert content["training_machine"] is None
    assert content["bits_per_byte"]["zh_tang"]["exact"] == 2.6906
    return {line["what"]: line["is_met"] for line in content["acceptance"]}


def test_targets_are_met_or_missed_by_their_own_bounds(judged: dict[str, bool]) -> None:
    missed = {what for what, is_met in judged.items() if not is_met}
    assert missed == {
        "recall at 8 tokens", "recall at 24 tokens", "recall at 48 tokens", "recall at 128 tokens",
        "recall at 256 tokens", "recall at 512 tokens", "add 2digit",
        "mean accepted drafts, block 5, greedy", "calibration error after calibration, worst slot",
    }  # fmt: skip
    assert len(judged) == 1 + 7 + 2 + 3 + 1 + 5


def test_what_was_not_measured_is_not_judged(tmp_path: Path) -> None:
    incomplete = report(1.0)
    incomplete["figures"]["scores"] = [
        each for each in incomplete["figures"]["scores"] if each["task"] != "copy"
    ]
    with pytest.raises(ConfigError, match="no copy 16; measure all tasks"):
        list(
            acceptance.backbone_lines(acceptance.Scores(incomplete), acceptance.Scores(report(1.0)))
        )
    with pytest.raises(ConfigError, match="does not exist"):
        acceptance.evaluation(tmp_path, tmp_path / "n.json", tmp_path / "e.json")


def test_the_picture_holds_every_loss_and_recall(tmp_path: Path) -> None:
    losses = dict.fromkeys(("prose", "docs", "code", "chinese", "tales"), 2.0)
    progress = [{"tokens": n * 10**6, "phase": f"{n} tokens", "loss": losses} for n in (1, 2)]
    log = {
        "device": "GPU <1>", "minutes": 1.0, "seed": 1,
        "records": [progress[0], {"recall": {"sparse": {"128": 0.5}}}, progress[1]],
    }  # fmt: skip
    picture = loss_curve.picture(log)
    assert picture.count("<polyline") == 6
    assert picture.count("<circle") == 1
    assert "GPU &lt;1&gt;, 1 minutes, 2 M tokens" in picture
    with pytest.raises(ConfigError, match="no progress records"):
        loss_curve.picture({"records": []})
