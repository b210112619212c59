"""Ratios of bounded replay to all rows over the prompt length, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from deepinfer.bench.replay import ReplayFigures

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 30, 64, 60
_SERIES = (
    ("work by formula", "#bab0ac"),
    ("work counted in op calls", "#4e79a7"),
    ("time", "#f28e2b"),
    ("time without launches", "#59a14f"),
)
_TOP_RATIO = 1.2


def draw(figures: Sequence[ReplayFigures], *, title: str, subtitle: str) -> str:
    """An SVG document: one line per kind of ratio, logarithmic in the prompt length.

    Args:
        figures: at least one prompt length.
        title: first line.
        subtitle: machine and model.
    """
    lengths = [entry.num_tokens for entry in figures]
    low, high = math.log2(min(lengths)), math.log2(max(lengths))

    def x(num_tokens: int) -> float:
        share = (math.log2(num_tokens) - low) / (high - low) if high > low else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(ratio: float) -> float:
        return _TOP + (1 - min(ratio, _TOP_RATIO) / _TOP_RATIO) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_text(_LEFT, 24, title, size=15, weight="bold"), _text(_LEFT, 44, subtitle)]
    for tenth in range(0, 13, 2):
        height = y(tenth / 10)
        parts.append(_line([(_LEFT, height), (_WIDTH - _RIGHT, height)], "#e5e5e5", 1))
        parts.append(_text(_LEFT - 8, height + 4, f"{tenth / 10:.1f}", anchor="end"))
    for num_tokens in lengths:
        parts.append(
            _text(x(num_tokens), _HEIGHT - _BOTTOM + 18, f"{num_tokens:,}", anchor="middle")
        )
    parts.append(_text(_WIDTH / 2, _HEIGHT - _BOTTOM + 36, "prompt tokens", anchor="middle"))
    ratios = [
        (entry.formula_ratio, entry.counted_ratio, entry.time_ratio, entry.row_time_ratio)
        for entry in figures
    ]
    for column, (name, colour) in enumerate(_SERIES):
        points = [
            (x(num_tokens), y(ratio), ratio)
            for num_tokens, row in zip(lengths, ratios, strict=True)
            if (ratio := row[column]) is not None
        ]
        # The formula lies under what was counted: wider, so that both are seen.
        parts.append(_line([(px, py) for px, py, _ in points], colour, 7 if column == 0 else 2))
        for px, py, ratio in points:
            parts.append(
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{colour}">'
                f"<title>{escape(name)}: {ratio:.3f}</title></circle>"
            )
        left = _LEFT + 165 * column
        parts.append(
            f'<rect x="{left}" y="{_HEIGHT - 16}" width="12" height="12" fill="{colour}"/>'
        )
        parts.append(_text(left + 17, _HEIGHT - 6, name))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )


def _line(points: Sequence[tuple[float, float]], colour: str, width: int) -> str:
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
