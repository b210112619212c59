"""What a round of speculative decoding costs on the chosen backend: measured, shown, drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from deepinfer.cli.chart_svg import Panel, draw
from deepinfer.cli.console import stderr_console
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.registry import load_backend
from deepinfer.engine.kv_sizing import longest_sequence
from deepinfer.engine.round_costs import logged_progress, round_costs
from deepinfer.engine.step_timer import ModelStepTimer
from deepinfer.engine.worker import num_drafts
from deepinfer.model.loading import load_model

if TYPE_CHECKING:
    from rich.console import Console

    from deepinfer.config import EngineConfig
    from deepinfer.speculation import cost_measurement
    from deepinfer.speculation.cost_tables import CostTables


def measure(config: EngineConfig) -> CostTables:
    """Cost tables for the configuration's backend, checkpoint and limits.

    Args:
        config: `speculation.cost_table` is read or written as by an engine.
    Raises:
        CapabilityError, CheckpointError, ConfigError: what cannot be had, and why; among others,
            that the checkpoint has no drafter.
    """
    backend = load_backend(
        BackendConfig(config.backend.name, config.numerics, dict(config.backend.options))
    )
    try:
        checkpoint = config.checkpoint
        loaded = load_model(
            checkpoint.directory,
            backend,
            max_positions=config.max_model_len,
            random_seed=checkpoint.seed if checkpoint.random_weights else None,
            with_drafter=True,
        )
        assert loaded.drafter is not None  # it was asked for
        max_drafts = num_drafts(config, loaded.config)
        timer = ModelStepTimer(
            backend,
            loaded.backbone,
            loaded.drafter,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_drafts=max_drafts,
            max_model_len=longest_sequence(config, loaded.config),
        )
        with shown_progress() as progress:
            return round_costs(config, backend, timer, max_drafts=max_drafts, progress=progress)
    finally:
        backend.close()


@contextmanager
def shown_progress() -> Iterator[cost_measurement.Progress]:
    """A bar on a terminal, a line every now and then elsewhere."""
    console = stderr_console()
    if not console.is_terminal:
        yield logged_progress()
        return
    columns = (TextColumn("costs: {task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )


def show(console: Console, costs: CostTables, backend: str) -> None:
    """Print both tables side by side, with the price of a row."""
    table = Table(title=f"costs of a round on {backend}, ms", title_justify="left")
    headings = ("requests", "draft", "rows", "verify", "us a further row")
    for heading in headings:
        table.add_column(heading, justify="right")
    requests, rows = sorted(costs.draft_us), sorted(costs.verify_us)
    times = costs.verify_times(rows[-1])
    for line in range(max(len(requests), len(rows))):
        cells = ["", "", "", "", ""]
        if line < len(requests):
            cells[:2] = f"{requests[line]}", f"{costs.draft_us[requests[line]] / 1000:.2f}"
        if line < len(rows):
            count, mark = rows[line], "*" if rows[line] in costs.tiers else ""
            cells[2:4] = f"{count}{mark}", f"{costs.verify_us[count] / 1000:.2f}"
        if line + 1 < len(rows):
            step = rows[line + 1] - rows[line]
            cells[4] = f"{(times[rows[line + 1]] - times[rows[line]]) / step:.1f}"
        table.add_row(*cells)
    console.print(table)
    tiers = "* a graph tier; " if costs.tiers else ""
    console.print(
        f"{tiers}times are known to {100 * costs.relative_noise:.1f} %; a gain below that counts "
        "as none",
        style="dim",
    )


def drawn(costs: CostTables, caption: str) -> str:
    """An SVG of what was measured and of what the planner reckons with."""
    last = max(costs.verify_us)
    reckoned = [(n, t / 1000) for n, t in enumerate(costs.verify_times(last).tolist()) if n]
    verify = {
        "measured": [(n, costs.verify_us[n] / 1000) for n in sorted(costs.verify_us)],
        "reckoned": reckoned[:: max(1, last // 200)],
    }
    draft = {"draft pass": [(n, costs.draft_us[n] / 1000) for n in sorted(costs.draft_us)]}
    panels = [
        Panel("Verification, ms", "rows", verify),
        Panel("Draft pass, ms", "requests", draft),
    ]
    return draw(panels, caption=caption)


def figures(costs: CostTables) -> Mapping[str, object]:
    """The tables for a report."""
    return {
        "draft_us": {str(count): costs.draft_us[count] for count in sorted(costs.draft_us)},
        "verify_us": {str(count): costs.verify_us[count] for count in sorted(costs.verify_us)},
        "tiers": list(costs.tiers),
        "relative_noise": costs.relative_noise,
    }
