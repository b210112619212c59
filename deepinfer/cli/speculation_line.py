"""What came of drafts in a run: one line on standard error, and the figures of a report."""

from __future__ import annotations

from typing import Any

from deepinfer.speculation.metrics import SpeculationMetrics


def show_speculation(metrics: SpeculationMetrics | None) -> dict[str, Any]:
    """Print drafts verified and accepted in a round, and shares accepted by place in the block.

    Args:
        metrics: of the engine; None prints nothing.

    Returns:
        `{"speculation": figures}` for the report; empty without metrics.
    """
    if metrics is None or metrics.places.num_rounds == 0:
        return {}
    from deepinfer.cli.console import stderr_console

    places = metrics.places
    verified, accepted = (
        counts.sum() / places.num_rounds for counts in (places.verified, places.accepted)
    )
    shares = ["-" if share is None else f"{share:.0%}" for share in places.conditional]
    stderr_console().print(
        f"drafts in a round: {verified:.2f} verified, {accepted:.2f} accepted; accepted by place, "
        f"if those before were: {' '.join(shares)}",
        style="dim",
        markup=False,
        highlight=False,
    )
    return {"speculation": metrics.figures()}
