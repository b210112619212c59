"""A step that the device has no memory for becomes preemptions and smaller steps, not a crash."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule

from deepinfer.device.errors import DeviceMemoryError
from deepinfer.device.null import CounterScript
from deepinfer.engine.batch_builder import BuiltStep
from deepinfer.engine.null_runner import NullStepRunner
from deepinfer.engine.outputs import FinishReason
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.step_runner import PreSamplerSync
from deepinfer.engine.step_state import SchedulerOutputs, WorkerStepState
from tests.unit.engine.async_life import AsyncLife

if TYPE_CHECKING:
    from tests.unit.engine.conftest import NullEngine

MakeNull = Callable[..., "NullEngine"]
Launch = Callable[..., WorkerStepState]


class SmallDevice:
    """Makes a null runner raise for steps above a number of rows, before or after issuing them."""

    def __init__(self, runner: NullStepRunner, num_rows: int, *, issues_first: bool) -> None:
        self.num_rows, self.issues_first = num_rows, issues_first
        self.refused: list[int] = []
        self._launch: Launch = runner.launch

    def launch(
        self,
        scheduled: SchedulerOutputs,
        built: BuiltStep,
        pre_sampler_sync: PreSamplerSync,
        *,
        timed: bool = False,
    ) -> WorkerStepState:
        fits = scheduled.num_rows <= self.num_rows
        if fits or self.issues_first:
            state = self._launch(scheduled, built, pre_sampler_sync, timed=timed)
            if fits:
                return state
        self.refused.append(scheduled.num_rows)
        raise DeviceMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def shrink(
    monkeypatch: pytest.MonkeyPatch, null: NullEngine, num_rows: int, *, issues_first: bool
) -> SmallDevice:
    device = SmallDevice(null.runner, num_rows, issues_first=issues_first)
    monkeypatch.setattr(null.runner, "launch", device.launch)
    return device


def ask(null: NullEngine, names: str) -> None:
    for index, name in enumerate(names):
        params = SamplingParams(temperature=0.0, max_tokens=10 + index, ignore_eos=True)
        null.engine.add_request(name, [5] * (1 + 3 * index), params)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("issues_first", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("max_drafts", [0, 2])
def test_answers_are_whole_in_smaller_steps(
    monkeypatch: pytest.MonkeyPatch,
    make_null: MakeNull,
    depth: int,
    issues_first: bool,
    max_drafts: int,
) -> None:
    script = CounterScript(20, 300, num_accepted=1)
    null = make_null(script, max_drafts=max_drafts, **{"scheduler.async_depth": depth})
    ask(null, "abcdef")
    for _ in range(3):  # some tokens are out, and steps in flight
        null.engine.step()
    device = shrink(monkeypatch, null, 3, issues_first=issues_first)
    results = null.run()
    assert device.refused
    assert null.engine.stats().num_preemptions > 0
    for index, name in enumerate("abcdef"):
        (answer,) = results[name].outputs
        assert answer.token_ids == list(range(20, 30 + index)), name
        assert answer.finish_reason is FinishReason.LENGTH


def test_rows_are_halved_until_steps_fit(
    monkeypatch: pytest.MonkeyPatch, make_null: MakeNull
) -> None:
    null = make_null()
    device = shrink(monkeypatch, null, 5, issues_first=False)
    null.engine.add_request(
        "long", [5] * 100, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    )
    (answer,) = null.run()["long"].outputs
    assert answer.token_ids == [20, 21, 22, 23]
    assert device.refused == [100, 50, 25, 12, 6]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_row_that_does_not_fit_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, make_null: MakeNull, depth: int
) -> None:
    null = make_null(**{"scheduler.async_depth": depth})
    ask(null, "a")
    for _ in range(4):
        null.engine.step()
    device = shrink(monkeypatch, null, 0, issues_first=False)
    (answer,) = null.run()["a"].outputs
    assert answer.finish_reason is FinishReason.ERROR
    assert answer.error is not None
    assert "device memory: request a stopped at" in answer.error
    assert "Tried to allocate 2.00 GiB" in answer.error
    assert answer.token_ids == list(range(20, 20 + len(answer.token_ids)))
    device.num_rows = 8  # memory is free again: the engine still serves
    ask(null, "b")
    (answer,) = null.run()["b"].outputs
    assert answer.token_ids == list(range(20, 30))


class ShortMemoryLife(AsyncLife):
    """Random lives on a device whose memory is full for one step now and then."""

    @precondition(lambda self: self.null is not None)
    @rule(num_rows=st.integers(1, 8), issues_first=st.booleans())
    def memory_is_full(self, num_rows: int, issues_first: bool) -> None:
        # One row always fits, so that every answer can still be whole.
        runner = self.device.runner
        launch: Launch = runner.launch
        device = SmallDevice(runner, num_rows, issues_first=issues_first)
        runner.launch = device.launch  # type: ignore[method-assign]
        self.step(1)
        runner.launch = launch  # type: ignore[method-assign]


TestShortMemoryLife = ShortMemoryLife.TestCase
TestShortMemoryLife.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
