"""Line charts as SVG: panels of lines over one axis, with optional bars below the lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

_WIDTH, _LEFT, _RIGHT = 860, 60, 170
_TOP, _PANEL_HEIGHT, _GAP = 34, 230, 62
_COLOURS = ("#4e79a7", "#e15759", "#59a14f", "#b07aa1", "#f28e2b", "#76b7b2", "#9c755f", "#555555")
_NUM_TICKS = 4
_MOST_MARKS = 40
_MOST_BARS = 15

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot.

    Attributes:
        title: above it.
        x_label: below it.
        lines: points by name, in the order of the legend; drawn with a mark at each point.
        bars: points drawn as bars from the lower edge, scaled to a quarter of the height: how
            much evidence there is.
        y_range: lower and upper edge; None: from the lines.
        x_is_log: distances between x values are ratios; they are above 0.
        x_ticks: where the axis is labelled; empty: evenly.
    """

    title: str
    x_label: str
    lines: Mapping[str, Points]
    bars: Points = ()
    y_range: tuple[float, float] | None = None
    x_is_log: bool = False
    x_ticks: Sequence[float] = field(default=())


def draw(panels: Sequence[Panel], *, caption: str) -> str:
    """An SVG document of the panels, one below the other.

    Args:
        panels: what is drawn.
        caption: where the figures come from, below the last panel.
    """
    parts = []
    for index, panel in enumerate(panels):
        parts += _Drawing(panel, _TOP + index * (_PANEL_HEIGHT + _GAP)).parts()
    height = _TOP + len(panels) * (_PANEL_HEIGHT + _GAP) + 6
    parts.append(_text(_LEFT, height - 10, caption, colour="#666666"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )


class _Drawing:
    """A panel with its scales."""

    def __init__(self, panel: Panel, top: float) -> None:
        self._panel, self._top = panel, top
        points = [point for line in panel.lines.values() for point in line]
        xs = [x for x, _ in (*points, *panel.bars)] or [0.0, 1.0]
        ys = [y for _, y in points] or [0.0, 1.0]
        self._x_range = self._scaled(min(xs)), self._scaled(max(xs))
        self._y_range = panel.y_range or _rounded(min(ys), max(ys))

    def _scaled(self, x: float) -> float:
        return math.log(x) if self._panel.x_is_log else x

    def _x(self, x: float) -> float:
        low, high = self._x_range
        share = (self._scaled(x) - low) / (high - low) if high > low else 0.5
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * share

    def _y(self, y: float) -> float:
        low, high = self._y_range
        share = (min(max(y, low), high) - low) / (high - low)
        return self._top + _PANEL_HEIGHT * (1.0 - share)

    def parts(self) -> list[str]:
        panel, bottom = self._panel, self._top + _PANEL_HEIGHT
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        return [
            _text(_LEFT, self._top - 10, panel.title, weight="bold"),
            *self._grid(),
            *self._bars(),
            *self._lines(),
            _text(middle, bottom + 34, panel.x_label, anchor="middle", colour="#666666"),
        ]

    def _grid(self) -> list[str]:
        right, bottom = _WIDTH - _RIGHT, self._top + _PANEL_HEIGHT
        parts = []
        low, high = self._y_range
        for tick in range(_NUM_TICKS + 1):
            value = low + (high - low) * tick / _NUM_TICKS
            y = self._y(value)
            parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#dddddd"/>')
            parts.append(_text(_LEFT - 6, y + 4, f"{value:g}", anchor="end"))
        first, last = self._x_range
        even = [first + (last - first) * tick / _NUM_TICKS for tick in range(_NUM_TICKS + 1)]
        ticks = self._panel.x_ticks or [math.exp(x) if self._panel.x_is_log else x for x in even]
        for value in ticks:
            parts.append(_text(self._x(value), bottom + 16, f"{value:g}", anchor="middle"))
        return parts

    def _bars(self) -> list[str]:
        bars = self._panel.bars
        highest = max((y for _, y in bars), default=0.0)
        if highest <= 0.0:
            return []
        bottom = self._top + _PANEL_HEIGHT
        width = 0.6 * (_WIDTH - _LEFT - _RIGHT) / max(len(bars), _MOST_BARS)
        parts = []
        for x, y in bars:
            height = _PANEL_HEIGHT / 4 * y / highest
            parts.append(
                f'<rect x="{self._x(x) - width / 2:.1f}" y="{bottom - height:.1f}" '
                f'width="{width:.1f}" height="{height:.1f}" fill="#dbe4ee">'
                f"<title>{escape(f'{y:,g}')}</title></rect>"
            )
        return parts

    def _lines(self) -> list[str]:
        parts = []
        for number, (name, points) in enumerate(self._panel.lines.items()):
            colour = _COLOURS[number % len(_COLOURS)]
            placed = [(self._x(x), self._y(y)) for x, y in points]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
            marked = zip(placed, points, strict=True) if len(points) <= _MOST_MARKS else ()
            for (x, y), (at, value) in marked:
                tip = escape(f"{name}: {value:g} at {at:g}")
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{tip}</title>'
                    "</circle>"
                )
            legend_y = self._top + 14 + 17 * number
            parts.append(_text(_WIDTH - _RIGHT + 14, legend_y, name, colour=colour))
        return parts


def _rounded(low: float, high: float) -> tuple[float, float]:
    """Edges at round numbers around the values, 0 included when it is near."""
    if low > 0.0 and low < 0.5 * high:
        low = 0.0
    span = max(high - low, 1e-9 * max(abs(high), 1.0))
    step = 10.0 ** math.floor(math.log10(span / _NUM_TICKS))
    step = next(
        step * factor for factor in (1, 2, 2.5, 5, 10) if step * factor >= span / _NUM_TICKS
    )
    first = step * math.floor(low / step)
    while first + _NUM_TICKS * step < high - 1e-9 * step:
        step *= 2.0 if step * 2.0 * _NUM_TICKS > span else 2.5
        first = step * math.floor(low / step)
    return first, first + _NUM_TICKS * step


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    colour: str = "#222222",
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
