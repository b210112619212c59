"""The property tests of the real worker can fail: faults between host and device are caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from deepinfer.device.errors import ContractError
from deepinfer.device.ops.state import NextInputs
from deepinfer.engine.deferred_release import DeferredRelease
from deepinfer.engine.remap import Remap
from deepinfer.engine.step_program import StepProgram
from deepinfer.engine.step_state import SequenceMetadata
from tests.backend.engine.test_adversarial_life import AdversarialLife

Plant = Callable[[pytest.MonkeyPatch], None]
SEARCH = settings(
    max_examples=200,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def _release_one_step_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        DeferredRelease, "_is_free", lambda self, held: held.last_step <= self.collected_step + 1
    )


def _skip_the_correction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepProgram, "_true_step", lambda self, step: step)


def _ignore_the_generation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SequenceMetadata, "is_current", property(lambda self: True))


def _keep_no_context(patch: pytest.MonkeyPatch) -> None:
    initialise = StepProgram.__init__

    def broken(self: StepProgram, *args: object, **kwargs: object) -> None:
        initialise(self, *args, **kwargs)  # type: ignore[arg-type]
        follow = self._next_inputs
        self._next_inputs = lambda *a, **k: NextInputs(a[0].context_lens[a[1]], follow(*a, **k)[1])

    patch.setattr(StepProgram, "__init__", broken)


def _write_all_results_to_one_step(patch: pytest.MonkeyPatch) -> None:
    between = Remap.between

    def previous(inflight: object, scheduled: object, ring: object) -> Remap:
        rows = between(inflight, scheduled, ring).rows  # type: ignore[arg-type]
        size = ring.rows_per_step  # type: ignore[attr-defined]
        return Remap(tuple(row % size if row >= 0 else row for row in rows))

    patch.setattr(Remap, "between", previous)


@pytest.mark.parametrize(
    "plant",
    [
        _release_one_step_early,
        _skip_the_correction,
        _ignore_the_generation,
        _keep_no_context,
        _write_all_results_to_one_step,
    ],
    ids=lambda plant: plant.__name__.strip("_"),
)
def test_planted_fault_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    # A late result can make a length negative, or one that the host has no tokens of.
    with pytest.raises((AssertionError, RuntimeError, ContractError)):
        run_state_machine_as_test(AdversarialLife, settings=SEARCH)
