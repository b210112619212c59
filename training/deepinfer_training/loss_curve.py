"""The training log as a picture: losses and recall over the tokens, phases marked.

    python -m deepinfer_training.loss_curve --run RUN

Reads RUN/training_log.json, writes RUN/loss.svg; the picture needs no package.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from deepinfer.device.errors import ConfigError, DeepInferError
from deepinfer_training.train import LOG_FILE

PICTURE = "loss.svg"
_WIDTH, _LEFT, _RIGHT = 860, 52, 132
_TOP, _PANEL, _GAP = 34, 230, 52
_COLOURS = ("#1b6ca8", "#c0392b", "#2e8b57", "#8e44ad", "#d68910", "#555555")
_LOSSES = ("prose", "docs", "code", "chinese", "tales")
_HIGHEST_LOSS = 6.0

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: lines over millions of tokens.

    Attributes:
        title: above it.
        top: y of its upper edge, in pixels.
        highest: value at the upper edge; the lower one is 0.
        lines: points by name.
        marks: draw every point, too.
    """

    title: str
    top: int
    highest: float
    lines: dict[str, list[Point]]
    marks: bool = False


def _scaled(panel: Panel, point: Point, tokens: float) -> Point:
    width = _WIDTH - _LEFT - _RIGHT
    share = min(point[1], panel.highest) / panel.highest
    return _LEFT + width * point[0] / tokens, panel.top + _PANEL * (1 - share)


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#333") -> str:
    return (f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{colour}">'
            f"{escape(text)}</text>")  # fmt: skip


def _drawn(panel: Panel, tokens: float, phases: Sequence[tuple[float, str]]) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, panel.top + _PANEL
    parts = [_text(_LEFT, panel.top - 8, panel.title)]
    for i in range(5):
        value = panel.highest * i / 4
        y = _scaled(panel, (0, value), tokens)[1]
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{value:g}", "end"))
    for i in range(5):
        x = _LEFT + (right - _LEFT) * i / 4
        parts.append(_text(x, bottom + 16, f"{tokens * i / 4:.0f} M", "middle"))
    for start, name in phases:
        x = _scaled(panel, (start, 0), tokens)[0]
        parts.append(f'<path d="M{x:.1f} {panel.top}V{bottom}" stroke="#aaa" '
                     'stroke-dasharray="3 3"/>')  # fmt: skip
        parts.append(f'<g transform="translate({x + 11:.0f} {panel.top + 4}) rotate(90)">'
                     f'{_text(0, 0, name, colour="#888")}</g>')  # fmt: skip
    for number, (name, points) in enumerate(panel.lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        placed = [_scaled(panel, point, tokens) for point in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
        if panel.marks:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
                      for x, y in placed]  # fmt: skip
        parts.append(_text(right + 8, panel.top + 14 + 16 * number, name, colour=colour))
    return parts


def picture(log: dict[str, Any]) -> str:
    """The SVG of a training log.

    Raises:
        ConfigError: the log holds no progress yet.
    """
    progress = [record for record in log["records"] if "tokens" in record]
    if not progress:
        raise ConfigError("the training log has no progress records; train first")
    total = progress[-1]["tokens"] / 1e6
    losses = {
        name: [(r["tokens"] / 1e6, r["loss"][name]) for r in progress if name in r["loss"]]
        for name in _LOSSES
    }
    recall: dict[str, list[Point]] = {}
    tokens, phases, phase = 0.0, [], None
    for record in log["records"]:
        if "tokens" in record:
            if record["phase"] != phase:
                phase = record["phase"]
                phases.append((tokens, phase))
            tokens = record["tokens"] / 1e6
        else:
            for distance, share in record["recall"]["sparse"].items():
                recall.setdefault(f"{distance} tokens", []).append((tokens, 100 * share))
    panels = [
        Panel("Loss of the training batches, nats per token", _TOP, _HIGHEST_LOSS, losses),
        Panel("Recall with the released selection sizes, % exact of 32, by distance",
              _TOP + _PANEL + _GAP, 100.0, recall, marks=True),
    ]  # fmt: skip
    height = _TOP + 2 * _PANEL + _GAP + 44
    caption = (f"{log['device']}, {log['minutes']:g} minutes, {total:.0f} M tokens, "
               f"seed {log['seed']}; dashed: start of a phase")  # fmt: skip
    drawn = [part for panel in panels for part in _drawn(panel, total, phases)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
            *drawn,
            _text(_LEFT, height - 8, caption),
            "</svg>",
            "",
        ]
    )


def main() -> int:
    """Draw from the command line; 0 on success, 2 for a missing log."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    args = parser.parse_args()
    try:
        file = args.run / LOG_FILE
        if not file.is_file():
            raise ConfigError(f"{file} does not exist; train first")
        text = picture(json.loads(file.read_text(encoding="utf-8")))
    except DeepInferError as error:
        sys.stderr.write(f"no picture: {error}\n")
        return 2
    (args.run / PICTURE).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
