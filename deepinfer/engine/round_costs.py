"""Cost tables of an engine: read from the file that its configuration names, or measured."""

from __future__ import annotations

import logging
import os
import platform
import time

import torch

from deepinfer.config import EngineConfig
from deepinfer.device.backend import Backend
from deepinfer.engine.cache_identity import cache_identity
from deepinfer.engine.kv_sizing import longest_sequence
from deepinfer.engine.step_timer import ModelStepTimer
from deepinfer.model.loading import LoadedModel
from deepinfer.speculation.cost_file import Facts, load_costs, save_costs
from deepinfer.speculation.cost_measurement import Progress, StepTimer, measure_costs
from deepinfer.speculation.cost_tables import CostTables
from deepinfer.speculation.planner import Scheduling, VerifyPlanner

_log = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 5.0


def round_costs(
    config: EngineConfig,
    backend: Backend,
    timer: StepTimer,
    *,
    max_drafts: int,
    progress: Progress | None = None,
) -> CostTables:
    """The costs of draft passes and verifications here.

    Args:
        config: `speculation.cost_table` names a file: read where it exists, written where not.
        backend: what is measured.
        timer: of the engine's worker.
        max_drafts: most drafts of a request.
        progress: told about points that are measured.
    Raises:
        ConfigError: the file belongs to another machine or configuration, or cannot be used.
    """
    path = config.speculation.cost_table
    facts = cost_facts(config, backend, max_drafts=max_drafts)
    if path is not None and path.exists():
        return load_costs(path, facts)
    max_num_seqs = config.scheduler.max_num_seqs
    costs = measure_costs(
        timer,
        max_num_seqs=max_num_seqs,
        max_rows=max_num_seqs * (1 + max_drafts),
        progress=progress,
    )
    if path is not None:
        save_costs(path, costs, facts)
    return costs


def logged_progress() -> Progress:
    """A log line every few seconds while costs are measured."""
    last_s = time.monotonic()

    def line(what: str, done: int, total: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _SECONDS_BETWEEN_LINES:
            last_s = time.monotonic()
            _log.info("costs: %d of %d passes timed, next %s", done, total, what)

    return line


def cost_facts(config: EngineConfig, backend: Backend, *, max_drafts: int) -> Facts:
    """What times depend on: machine, backend, model, limits."""
    model = cache_identity(config)
    return {
        "machine": platform.node(),
        "processor": platform.machine(),
        "cpu_count": os.cpu_count() or 0,
        "cpu_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "backend": backend.name,
        "backend_options": repr(sorted(config.backend.options.items())),
        "device": str(backend.runtime.device),
        "numerics": config.numerics.value,
        "determinism": config.determinism.value,
        "model": model["model"],
        "weights": model["weights"],
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_drafts": max_drafts,
    }


def verify_planner(
    config: EngineConfig, backend: Backend, loaded: LoadedModel, *, max_drafts: int
) -> VerifyPlanner:
    """The planner of an engine in dynamic mode, with the costs of its device.

    Args:
        config: of the engine; depth 0 sees the confidences of the drafts at hand, others do not.
        backend: what the model is on.
        loaded: the model, with its drafter.
        max_drafts: most drafts of a request.
    Raises:
        ConfigError: the cost table that the configuration names cannot be used.
    """
    assert loaded.drafter is not None  # a configuration that speculates loads it
    scheduler = config.scheduler
    timer = ModelStepTimer(
        backend,
        loaded.backbone,
        loaded.drafter,
        max_num_seqs=scheduler.max_num_seqs,
        max_drafts=max_drafts,
        max_model_len=longest_sequence(config, loaded.config),
    )
    return VerifyPlanner(
        round_costs(config, backend, timer, max_drafts=max_drafts, progress=logged_progress()),
        max_drafts=max_drafts,
        max_num_seqs=scheduler.max_num_seqs,
        max_rows=scheduler.max_num_tokens,
        scheduling=Scheduling.ASYNCHRONOUS if scheduler.async_depth else Scheduling.SYNCHRONOUS,
    )
