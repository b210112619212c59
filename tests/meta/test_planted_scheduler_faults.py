"""The scheduler's property tests can fail: each planted fault of the pipeline is caught.

The faults are the ones the design exists to prevent. A fault that random lives do not find in a
few hundred schedules would mean that those lives prove little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from deepinfer.device.errors import ContractError
from deepinfer.device.ops.state import NEWCOMER
from deepinfer.engine import commit as commit_module
from deepinfer.engine.deferred_release import DeferredRelease
from deepinfer.engine.null_runner import NullStepRunner
from deepinfer.engine.pipeline import StepPipeline
from deepinfer.engine.remap import Remap
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.step_state import SequenceMetadata
from tests.unit.engine.async_life import AsyncLife

Plant = Callable[[pytest.MonkeyPatch], None]
# No shrinking: that a fault is found is enough, and the first example is not read.
SEARCH = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def _release_one_step_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        DeferredRelease,
        "_is_free",
        lambda self, held: held.last_step <= self.collected_step + 1,
    )


def _skip_the_remap(patch: pytest.MonkeyPatch) -> None:
    between = Remap.between
    patch.setattr(
        Remap,
        "between",
        lambda inflight, scheduled, ring: Remap(
            (NEWCOMER,) * len(between(inflight, scheduled, ring).rows)
        ),
    )


def _remap_to_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    between = Remap.between

    def shifted(inflight: object, scheduled: object, ring: object) -> Remap:
        rows = between(inflight, scheduled, ring).rows  # type: ignore[arg-type]
        return Remap(rows[1:] + rows[:1])

    patch.setattr(Remap, "between", shifted)


def _stale_length_on_the_device(patch: pytest.MonkeyPatch) -> None:
    result = NullStepRunner._result

    def stale(self: NullStepRunner, row: int, metadata: SequenceMetadata) -> object:
        return replace(result(self, row, metadata), context_len=metadata.context_len)

    patch.setattr(NullStepRunner, "_result", stale)


def _stale_length_on_the_host(patch: pytest.MonkeyPatch) -> None:
    missing = Scheduler._missing_blocks

    def without_inflight(self: Scheduler, sequence: Sequence, num_rows: int) -> int:
        return missing(self, sequence, num_rows - sequence.total_inflight_tokens)

    patch.setattr(Scheduler, "_missing_blocks", without_inflight)


def _ignore_the_generation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SequenceMetadata, "is_current", property(lambda self: True))


def _drop_the_flush(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepPipeline, "flush", lambda self: None)


def _ignore_accepted_drafts(patch: pytest.MonkeyPatch) -> None:
    commit_tokens = commit_module._commit_tokens

    def forgetful(
        sequence: Sequence,
        step: int,
        results: commit_module._HostResults,
        row: int,
        rules: commit_module.StopRules,
        committed: commit_module.Committed,
    ) -> None:
        sequence.num_cached_tokens -= results.num_accepted[row]
        commit_tokens(sequence, step, results, row, rules, committed)

    patch.setattr(commit_module, "_commit_tokens", forgetful)


def _end_on_a_guess(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "decodes_next", property(lambda self: False))


def _keep_tokens_after_the_end(patch: pytest.MonkeyPatch) -> None:
    ends = commit_module._ends

    def late(sequence: Sequence, token_id: int, rules: commit_module.StopRules) -> bool:
        if not ends(sequence, token_id, rules):
            return False
        sequence.token_ids.append(token_id)
        return True

    patch.setattr(commit_module, "_ends", late)


@dataclass(frozen=True, slots=True)
class Fault:
    """A planted fault and how it must show."""

    plant: Plant
    exception: type[BaseException]
    message: str


FAULTS = (
    # Read after the release, or written by who still thinks it his.
    Fault(_release_one_step_early, ContractError, "poison|over a row of"),
    Fault(_skip_the_remap, ContractError, "should hold token|which knows"),
    Fault(_remap_to_the_neighbour, ContractError, "names result row|which knows"),
    Fault(_stale_length_on_the_device, ContractError, "should hold token"),
    Fault(_stale_length_on_the_host, ContractError, "reserve blocks"),
    # Either the device reads what is not its own, or lengths that were counted twice do not fit.
    Fault(
        _ignore_the_generation,
        Exception,
        "poison|names result row|which knows",
    ),
    Fault(_drop_the_flush, AssertionError, "memory is left behind"),
    Fault(_ignore_accepted_drafts, ContractError, "reserve blocks|should hold token"),
    Fault(_end_on_a_guess, pytest.fail.Exception, "still open"),
    Fault(_keep_tokens_after_the_end, AssertionError, "beyond the script"),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.plant.__name__.strip("_"))
def test_planted_fault_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.plant(monkeypatch)
    with pytest.raises(fault.exception, match=fault.message):
        run_state_machine_as_test(AsyncLife, settings=SEARCH)


def test_without_a_fault_nothing_is_caught() -> None:
    run_state_machine_as_test(AsyncLife, settings=settings(SEARCH, max_examples=60))
