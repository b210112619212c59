"""The figures of a checkpoint beside what was asked of it: the content of eval.json.

    python -m deepinfer_training.acceptance --run RUN --normative FILE --exact FILE

FILE are reports of `deepinfer eval --json`; RUN holds sts.json and, from the training machine,
evaluation.json. Writes RUN/eval.json and prints a table. A target that is missed is marked so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepinfer.device.errors import ConfigError, DeepInferError
from deepinfer_training.tasks import dump

# Bits per byte of the first model of this kind: 16.5 minutes on the same machine, 180.7 M tokens,
# bf16 without any quantisation.
BASELINE_BITS_PER_BYTE = {
    "code_stdlib": 1.2405, "dict_wordnet": 1.3247, "docs_python": 1.1578, "prose_austen": 1.3594,
    "prose_melville": 1.7666, "speech_sotu": 1.2452, "verse_tempest": 1.8004, "zh_lunyu": 2.155,
    "zh_tang": 2.6906,
}  # fmt: skip
_MOST_ABOVE_BASELINE, _FILES_NEEDED = 1.02, 8
_RECALL = {"8": 0.95, "24": 0.95, "48": 0.95, "128": 0.95, "256": 0.90, "512": 0.90, "960": 0.85}
# Nearer facts lie in the window, which controls leave alone.
_CONTROLLED = ("48", "128", "256", "512", "960")
_CONTROLS = ("selections_none", "selections_random")
_MACHINE = ("machine", "cpu_count", "python")
_SHARES = {("copy", "16"): 0.95, ("json", "object"): 0.95, ("add", "2digit"): 0.85}


@dataclass(frozen=True, slots=True)
class Line:
    """One target.

    Attributes:
        what: is measured.
        target: in words.
        value: found.
        is_met: whether that is enough.
    """

    what: str
    target: str
    value: float
    is_met: bool


class Scores:
    """Rows of a report of `deepinfer eval`."""

    def __init__(self, report: Mapping[str, Any]) -> None:
        self._rows = report["figures"]["scores"]

    def value(self, task: str, group: str, control: str = "") -> float:
        """One score that is a share or bits per byte.

        Raises:
            ConfigError: it was not measured.
        """
        for row in self._rows:
            if (row["task"], row["group"], row["control"]) == (task, group, control) and row[
                "metric"
            ] in ("exact", "bits_per_byte"):
                return float(row["value"])
        raise ConfigError(
            f"the report of deepinfer eval has no {task} {group} {control}".rstrip()
            + "; measure all tasks"
        )

    def texts(self) -> dict[str, float]:
        """Bits per byte by text."""
        return {row["group"]: row["value"] for row in self._rows if row["task"] == "bpb"}


def backbone_lines(normative: Scores, exact: Scores) -> Iterator[Line]:
    """Targets of the model itself."""
    texts, plain = normative.texts(), exact.texts()
    above = {name: texts[name] / base for name, base in BASELINE_BITS_PER_BYTE.items()}
    near = sum(ratio <= _MOST_ABOVE_BASELINE for ratio in above.values())
    yield Line("texts with bits per byte at most 2 % above the unquantised model",
               f">= {_FILES_NEEDED} of {len(above)}", near, near >= _FILES_NEEDED)  # fmt: skip
    for distance, target in _RECALL.items():
        share = normative.value("recall", distance)
        yield Line(f"recall at {distance} tokens", f">= {target:.0%}", share, share >= target)
    for control in _CONTROLS:
        worst = max(normative.value("recall", d, control) for d in _CONTROLLED)
        yield Line(f"recall, {control}, worst distance", "<= 5%", worst, worst <= 0.05)
    for (task, group), target in _SHARES.items():
        share = normative.value(task, group)
        yield Line(f"{task} {group}", f">= {target:.0%}", share, share >= target)
    cost = max(texts[name] / plain[name] for name in plain) - 1
    yield Line("bits per byte of normative above exact, worst text", "<= 2%", cost, cost <= 0.02)


def drafter_lines(calibrated: Mapping[str, Any]) -> Iterator[Line]:
    """Targets of the drafter and its confidence, from sts.json."""
    accepted, domains = calibrated["mean_accepted"], calibrated["mean_accepted_by_domain"]
    yield Line("mean accepted drafts, block 5, greedy", ">= 2.0", accepted, accepted >= 2.0)
    spread = max(domains.values()) - min(domains.values())
    yield Line("spread of accepted drafts between domains", ">= 1.5", spread, spread >= 1.5)
    area = calibrated["auroc"]
    yield Line("AUROC of the confidence", "> 0.75", area, area > 0.75)
    errors = calibrated["ece_after"]
    mean, worst = sum(errors) / len(errors), max(errors)
    yield Line("calibration error after calibration, mean of slots", "< 3%", mean, mean < 0.03)
    yield Line("calibration error after calibration, worst slot", "< 3%", worst, worst < 0.03)


def evaluation(run: Path, normative: Path, exact: Path) -> dict[str, Any]:
    """Content of eval.json.

    Raises:
        ConfigError: a file or a figure is missing.
    """
    reports = {"normative": _read(normative), "exact": _read(exact)}
    calibrated = _read(run / "sts.json")
    scores = {name: Scores(report) for name, report in reports.items()}
    lines = [*backbone_lines(scores["normative"], scores["exact"]), *drafter_lines(calibrated)]
    machine = run / "evaluation.json"
    return {
        "acceptance": [asdict(line) for line in lines],
        "bits_per_byte": {
            name: {
                "normative": round(value, 4),
                "exact": round(scores["exact"].texts()[name], 4),
                "unquantised_baseline": BASELINE_BITS_PER_BYTE.get(name),
            }
            for name, value in scores["normative"].texts().items()
        },
        "engine": {
            name: {
                "machine": {key: report["environment"].get(key) for key in _MACHINE},
                "versions": report["versions"],
                "figures": report["figures"],
            }
            for name, report in reports.items()
        },
        "training_machine": _read(machine) if machine.is_file() else None,
    }


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(f"{file} does not exist")
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def main() -> int:
    """Judge from the command line; 0 when written, met or not; 2 when a figure is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--normative", type=Path, required=True, help="report of deepinfer eval")
    parser.add_argument("--exact", type=Path, required=True, help="the same, exact, bpb alone")
    args = parser.parse_args()
    try:
        content = evaluation(args.run, args.normative, args.exact)
    except DeepInferError as error:
        sys.stderr.write(f"cannot judge: {error}\n")
        return 2
    dump(content, args.run / "eval.json")
    for line in content["acceptance"]:
        verdict = "met" if line["is_met"] else "MISSED"
        sys.stdout.write(
            f"{verdict:6}  {line['what']:68} {line['target']:>10} {line['value']:8.4g}\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
