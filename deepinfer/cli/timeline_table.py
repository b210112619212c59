"""The sums of a recorded timeline, on standard error and for the report."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from deepinfer.cli.console import stderr_console
from deepinfer.engine.timeline import Phase, RecordedTimeline, Timeline


def show_timeline(timeline: Timeline) -> dict[str, Any]:
    """Show the device's idle share and the host's cost of a step by phase.

    Returns:
        The same figures under the key `timeline`; empty when nothing was recorded.
    """
    if not isinstance(timeline, RecordedTimeline) or timeline.totals.num_steps == 0:
        return {}
    totals = timeline.totals
    stderr_console().print(
        f"{totals.num_steps} steps in "
        f"{(totals.device_busy_us + totals.device_idle_us) / 1e6:.3f} s of the device, "
        f"idle {100 * totals.idle_share:.2f} %",
        highlight=False,
    )
    table = Table()
    table.add_column("host, own time")
    table.add_column("us in a step", justify="right")
    table.add_column("share", justify="right")
    all_us = sum(totals.phase_us.values())
    for phase in Phase:
        phase_us = totals.phase_us[phase]
        share = f"{100 * phase_us / all_us:.1f} %" if all_us else ""
        table.add_row(phase.value, f"{phase_us / totals.num_steps:,.1f}", share)
    work_us = totals.host_work_us / totals.num_steps
    table.add_row("all but wait", f"{work_us:,.1f}", "", style="bold")
    stderr_console().print(table)
    return {
        "timeline": {
            "num_steps": totals.num_steps,
            "device_busy_us": totals.device_busy_us,
            "device_idle_us": totals.device_idle_us,
            "idle_share": totals.idle_share,
            "host_us": {phase.value: totals.phase_us[phase] for phase in Phase},
        }
    }
