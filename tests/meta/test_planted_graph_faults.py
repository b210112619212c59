"""The tests of replayed steps can fail: what padding and replays could spoil is caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepinfer.engine.batch_builder import BuiltStep
from deepinfer.engine.sampling_batch import SamplingBatch
from deepinfer.engine.step_graphs import ReplayedRun
from deepinfer.engine.step_upload import TierLayout
from tests.backend.engine.test_decode_graphs import test_replayed_rounds_change_no_token as rounds

Plant = Callable[[pytest.MonkeyPatch], None]


def _lay_out(patch: pytest.MonkeyPatch, **changes: int) -> None:
    initialise = TierLayout.__init__

    def broken(self: TierLayout, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        initialise(self, *args, **(kwargs | changes))

    patch.setattr(TierLayout, "__init__", broken)


def _padding_has_results_of_its_own(patch: pytest.MonkeyPatch) -> None:
    """In the ring row of the first sequence of a step."""
    _lay_out(patch, spare_result=0)


def _padding_has_drafts_of_its_own(patch: pytest.MonkeyPatch) -> None:
    """In the slot of a sequence."""
    _lay_out(patch, spare_slot=0)


def _capture_with_the_real_step(patch: pytest.MonkeyPatch) -> None:
    """Its drafts are replaced by the next ones before they are verified for good."""
    patch.setattr(ReplayedRun, "_forward_of_padding", lambda self: None)


def _leave_the_captured_padding(patch: pytest.MonkeyPatch) -> None:
    """The step is not run again after capturing."""
    prepare, forward = ReplayedRun.prepare, ReplayedRun.forward

    def broken(self: ReplayedRun, sampling: SamplingBatch) -> None:
        self.forward = lambda: None  # type: ignore[method-assign]
        prepare(self, sampling)
        self.forward = forward.__get__(self)  # type: ignore[method-assign]

    patch.setattr(ReplayedRun, "prepare", broken)


def _keep_the_first_parameters(patch: pytest.MonkeyPatch) -> None:
    finish = ReplayedRun.finish

    def broken(self: ReplayedRun, sampling: SamplingBatch, host: Any) -> None:  # noqa: ANN401
        if sampling.is_plain and self._tier.controls_of is not None:
            self._tier.controls_of = sampling
        finish(self, sampling, host)

    patch.setattr(ReplayedRun, "finish", broken)


def _pack_over_the_step_before(patch: pytest.MonkeyPatch) -> None:
    """Requests of the step before stand where the new one has padding."""
    pack = TierLayout.pack

    def broken(self: TierLayout, built: BuiltStep, runtime: Any) -> Any:  # noqa: ANN401
        packed = pack(self, built, runtime)
        self.padding.copy_(packed)
        return packed

    patch.setattr(TierLayout, "pack", broken)


@pytest.mark.parametrize(
    ("plant", "mode"),
    [
        (_padding_has_results_of_its_own, "off"),
        (_padding_has_drafts_of_its_own, "fixed"),
        (_capture_with_the_real_step, "fixed"),
        (_leave_the_captured_padding, "off"),
        (_keep_the_first_parameters, "off"),
        (_pack_over_the_step_before, "off"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__.strip("_"),
)
def test_planted_fault_is_caught(plant: Plant, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        rounds(mode, 1)
