"""The figures of speculation as pictures: acceptance by depth, reliability, budget over time."""

from __future__ import annotations

from deepinfer.cli.chart_svg import Panel, draw
from deepinfer.speculation.metrics import Places, SpeculationMetrics

_MOST_DOMAINS = 7


def draw_metrics(metrics: SpeculationMetrics, *, caption: str) -> str:
    """An SVG document of a run.

    Args:
        metrics: of the run.
        caption: what ran where.
    """
    return draw(
        [_acceptance(metrics), _reliability(metrics), _budget(metrics)],
        caption=caption,
    )


def _acceptance(metrics: SpeculationMetrics) -> Panel:
    """Lines for all requests and for the domains with the most rounds."""
    by_size = sorted(metrics.domains, key=lambda name: -metrics.domains[name].num_rounds)
    lines = {"all": _conditional(metrics.places)} | {
        name: _conditional(metrics.domains[name]) for name in sorted(by_size[:_MOST_DOMAINS])
    }
    depth = len(metrics.places.drafted)
    return Panel(
        "Accepted drafts, of those whose predecessors all were",
        "place in the block",
        lines,
        y_range=(0.0, 1.0),
        x_ticks=range(1, depth + 1),
    )


def _conditional(places: Places) -> list[tuple[float, float]]:
    return [
        (place + 1, share) for place, share in enumerate(places.conditional) if share is not None
    ]


def _reliability(metrics: SpeculationMetrics) -> Panel:
    bins = metrics.calibration.reliability()
    error = metrics.calibration.error()
    known = "no confidences" if error is None else f"calibration error {100 * error:.1f} %"
    return Panel(
        f"Share accepted by confidence; {known}",
        "confidence; bars: how many drafts",
        {
            "as foretold": [(0.0, 0.0), (1.0, 1.0)],
            "accepted": [(confidence, accepted) for confidence, accepted, _ in bins],
        },
        bars=[(confidence, count) for confidence, _, count in bins],
        y_range=(0.0, 1.0),
        x_ticks=(0.0, 0.25, 0.5, 0.75, 1.0),
    )


def _budget(metrics: SpeculationMetrics) -> Panel:
    """Means of a request, one point for each span of steps."""
    step = 0
    verified, accepted = [], []
    for span in metrics.spans:
        requests = max(1, span.num_requests)
        verified.append((step, span.num_verified / requests))
        accepted.append((step, span.num_accepted / requests))
        step += span.num_steps
    planned = sum(span.num_planned for span in metrics.spans) / max(1, step)
    return Panel(
        f"Drafts of a request over time; {100 * planned:.0f} % of the steps planned",
        "step",
        {"verified": verified, "accepted": accepted},
        y_range=(0.0, float(len(metrics.places.drafted))),
    )
