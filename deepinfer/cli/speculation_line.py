"""What came of drafts in a run: one line on standard error, a picture, the figures of a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepinfer.device.errors import ConfigError
from deepinfer.speculation.metrics import SpeculationMetrics


def show_speculation(
    metrics: SpeculationMetrics | None, picture: Path | None = None
) -> dict[str, Any]:
    """Print drafts verified and accepted in a round, and shares accepted by place in the block.

    Args:
        metrics: of the engine; None prints nothing.
        picture: SVG file to write, or None.

    Returns:
        `{"speculation": figures}` for the report; empty without metrics.
    Raises:
        ConfigError: a picture is asked for and there are no drafts to draw.
    """
    if metrics is None or metrics.places.num_rounds == 0:
        if picture is not None:
            raise ConfigError(
                f"--drafts-svg {picture}: no step had drafts; set speculation.mode to fixed or "
                "dynamic and ask for more than one token"
            )
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
    if picture is not None:
        from deepinfer.cli.speculation_svg import draw_metrics

        caption = f"{places.num_rounds:,} rounds of a sequence"
        picture.write_text(draw_metrics(metrics, caption=caption), encoding="utf-8")
    return {"speculation": metrics.figures()}
