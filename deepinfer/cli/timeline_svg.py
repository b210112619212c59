"""A trace as a picture: host phases above device steps, idle gaps in red, shares below."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from deepinfer.cli.trace_events import Trace, TraceSpan, Window
from deepinfer.engine.trace_file import DEVICE_TRACK, HOST_TRACK, IDLE_TRACK

_WIDTH, _LEFT, _RIGHT = 1120, 90, 30
_LANE, _LANES_TOP = 34, 64
_HOST_COLOURS = {
    "schedule": "#4e79a7",
    "build": "#76b7b2",
    "launch": "#59a14f",
    "wait": "#dddddd",
    "commit": "#edc948",
    "controls": "#b07aa1",
    "output": "#9c755f",
}
_DEVICE_COLOURS = {"prefill": "#f28e2b", "decode": "#2f6f9f", "empty": "#bab0ac"}
_IDLE_COLOUR = "#e15759"
_OTHER_COLOUR = "#8c8c8c"
_NUM_TICKS = 8


def draw(trace: Trace, window: Window, *, title: str) -> str:
    """An SVG document of the window, with the sums of the whole trace."""
    scale = (_WIDTH - _LEFT - _RIGHT) / max(window.end_us - window.begin_us, 1e-9)

    def x(time_us: float) -> float:
        inside = min(max(time_us, window.begin_us), window.end_us)
        return _LEFT + (inside - window.begin_us) * scale

    shown = [s for s in trace.spans if s.end_us > window.begin_us and s.begin_us < window.end_us]
    parts = [
        _text(_LEFT, 22, title, size=15, weight="bold"),
        _text(
            _LEFT,
            42,
            f"steps {window.first_step} to {window.last_step} of the run; whole run: "
            f"{trace.summary()}",
        ),
    ]
    for lane, (track, name) in enumerate(((HOST_TRACK, "host"), (DEVICE_TRACK, "device"))):
        top = _LANES_TOP + lane * (_LANE + 12)
        parts.append(_text(_LEFT - 10, top + 21, name, anchor="end"))
        parts.append(_rect(_LEFT, top, _WIDTH - _LEFT - _RIGHT, _LANE, "#f6f6f6", ""))
        # Longer first, so that phases inside a phase are drawn over it.
        for span in sorted((s for s in shown if s.track == track), key=lambda s: -s.duration_us):
            parts.append(_span(span, x(span.begin_us), x(span.end_us), top))
    device_top = _LANES_TOP + _LANE + 12
    for span in (s for s in shown if s.track == IDLE_TRACK):
        begin, end = x(span.begin_us), x(span.end_us)
        tip = f"device idle, {span.duration_us:.0f} us"
        parts.append(_rect(begin, device_top, end - begin, _LANE, _IDLE_COLOUR, tip))
    axis_top = device_top + _LANE + 8
    parts += _axis(window, axis_top)
    parts += _legend(trace, axis_top + 44)
    height = axis_top + 44 + 22 * (len(_HOST_COLOURS) + 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _colour(span: TraceSpan) -> str:
    if span.track == HOST_TRACK:
        return _HOST_COLOURS.get(span.name, _OTHER_COLOUR)
    return _DEVICE_COLOURS.get(span.name.split()[0], _OTHER_COLOUR)


def _span(span: TraceSpan, begin: float, end: float, top: float) -> str:
    step = "" if span.step is None else f", step {span.step}"
    tip = f"{span.name}{step}, {span.duration_us:.0f} us"
    drawn = _rect(begin, top, end - begin, _LANE, _colour(span), tip)
    if span.track == DEVICE_TRACK and "forward" in span.name and end - begin > 26:
        middle = (begin + end) / 2
        drawn += _text(middle, top + 21, str(span.step), anchor="middle", colour="white")
    return drawn


def _axis(window: Window, top: float) -> list[str]:
    """Ticks in milliseconds from the beginning of the window."""
    parts = []
    for tick in range(_NUM_TICKS + 1):
        at = _LEFT + (_WIDTH - _LEFT - _RIGHT) * tick / _NUM_TICKS
        time_ms = (window.end_us - window.begin_us) * tick / _NUM_TICKS / 1000
        parts.append(_rect(at, top - 6, 1, 6, "#555555", ""))
        parts.append(_text(at, top + 10, f"{time_ms:.2f}", anchor="middle"))
    parts.append(_text(_LEFT - 24, top + 10, "ms", anchor="end"))
    return parts


def _legend(trace: Trace, top: float) -> list[str]:
    """Colours with the time of each phase in a step, over the whole run."""
    own, num_steps = trace.host_us(), max(1, trace.num_steps())
    parts = [_text(_LEFT, top - 8, "host, own time in a step", weight="bold")]
    rows: Sequence[tuple[str, str, float]] = [
        (name, colour, own.get(name, 0.0)) for name, colour in _HOST_COLOURS.items()
    ]
    for row, (name, colour, time_us) in enumerate(rows):
        y = top + 4 + row * 22
        parts.append(_rect(_LEFT, y, 14, 14, colour, ""))
        parts.append(_text(_LEFT + 22, y + 12, name))
        parts.append(_text(_LEFT + 190, y + 12, f"{time_us / num_steps:,.1f} us", anchor="end"))
    parts.append(_text(_LEFT + 320, top - 8, "device, time in a step", weight="bold"))
    work = trace.on(DEVICE_TRACK)
    device = [
        (kind, colour, sum(span.duration_us for span in work if span.name.startswith(kind)))
        for kind, colour in _DEVICE_COLOURS.items()
    ]
    device.append(("idle", _IDLE_COLOUR, trace.total_us(IDLE_TRACK)))
    for row, (name, colour, time_us) in enumerate(device):
        y = top + 4 + row * 22
        parts.append(_rect(_LEFT + 320, y, 14, 14, colour, ""))
        parts.append(_text(_LEFT + 342, y + 12, name))
        parts.append(_text(_LEFT + 510, y + 12, f"{time_us / num_steps:,.1f} us", anchor="end"))
    return parts


def _rect(x: float, y: float, width: float, height: float, colour: str, tip: str) -> str:
    # Narrower than half a pixel would vanish, and a short gap is what one looks for.
    shape = (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.5):.2f}" height="{height:.1f}" '
        f'fill="{colour}"'
    )
    return f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    colour: str = "#222222",
    size: int = 12,
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
        f'font-size="{size}" font-weight="{weight}">{escape(text)}</text>'
    )
