"""Mistakes planted into replay, each of which the checks of replay have to notice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.registry import load_backend
from deepinfer.model import step_planner
from deepinfer.model.caches import CacheGeometry
from deepinfer.model.loading import LoadedModel, load_model
from deepinfer.model.replay import PrefillRows, bounded_rows, cold_rows, decoder_start
from deepinfer.model.step_batch import BatchReplay, Cut, CutPlan, StepPlan
from deepinfer.model.step_planner import StepPlanner
from tests.backend.replay_bench import Asked, ReplayBench

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "tiny_a"
HIT = 48


class Bounded:
    """The longest golden case in bounded replay."""

    def __init__(self, loaded: LoadedModel, backend: Backend) -> None:
        cases = json.loads((GOLDEN / "cases.json").read_text())
        case = cases["cases"][-1]
        self.ids: list[int] = case["prompt_ids"]
        self.keep = loaded.config.sliding_window
        arrays = load_file(GOLDEN / "cases.safetensors")
        self.expected = arrays[f"{case['name']}.replay{self.keep}.logits"]
        self.limit = 1e-4 * cases["logit_scale"]
        self.loaded, self.backend = loaded, backend

    def bench(self) -> ReplayBench:
        return ReplayBench(
            self.loaded, self.backend, num_slots=2, num_tables=1, length=len(self.ids) + 8
        )

    def rows(self, num_tokens: int) -> PrefillRows:
        return cold_rows(self.loaded.config, decoder_start(num_tokens, self.keep))

    def is_golden(self) -> bool:
        """Whether prompt and decoding give the golden logits."""
        bench = self.bench()
        asked = Asked(list(self.ids), 0, 0, self.rows(len(self.ids)))
        found = bench.decode(bench.prefill(asked, chunk=40), asked, count=3)[0]
        # NaN, which a row that was never written gives, is not below any limit.
        return bool((found - self.expected[:3]).abs().max() <= self.limit)

    def keeps_blocks(self) -> bool:
        """Whether a bounded rebuild leaves the cached blocks as they are."""
        bench = self.bench()
        bench.prefill(Asked(list(self.ids), 0, 0))
        before = bench.blocks(0, HIT)
        rebuilt = bounded_rows(self.loaded.config, HIT, 0)
        bench.prefill(Asked(list(self.ids), 1, 0, rebuilt))
        return all(map(torch.equal, before.values(), bench.blocks(0, HIT).values()))

    def resumes_alike(self) -> bool:
        """Whether an answer that is computed anew goes on with the same logits."""
        bench = self.bench()
        asked = Asked(list(self.ids), 0, 0, self.rows(len(self.ids)))
        answer = bench.decode(bench.prefill(asked), asked, count=4)[0]
        again = Asked(asked.ids, 1, 0, self.rows(len(asked.ids)))
        return torch.equal(bench.prefill(again)[0], answer[-1])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are faster without helpers, and helpers that wait for a core are slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def bounded() -> Iterator[Bounded]:
    backend = load_backend(BackendConfig("reference", Numerics.EXACT, {"runtime": "inline"}))
    yield Bounded(load_model(GOLDEN / "checkpoint", backend, max_positions=256), backend)
    backend.close()


def test_without_a_fault_all_checks_pass(bounded: Bounded) -> None:
    assert bounded.is_golden()
    assert bounded.keeps_blocks()


def test_a_start_that_moves_with_the_answer_is_noticed(bounded: Bounded) -> None:
    assert not bounded.resumes_alike()


def test_layers_that_see_below_the_start_are_noticed(
    bounded: Bounded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(replay: BatchReplay, cut: int) -> Tensor:
        return torch.zeros_like(replay.floors)

    monkeypatch.setattr(BatchReplay, "floors_after", none)
    assert not bounded.is_golden()


def test_a_last_source_that_sees_a_floored_window_is_noticed(
    bounded: Bounded, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_of = StepPlanner._cut

    def floored(
        planner: StepPlanner,
        entering: StepPlan,
        cut: Cut,
        replay: BatchReplay,
        number: int,
        geometry: CacheGeometry,
    ) -> CutPlan:
        made = cut_of(planner, entering, cut, replay, number, geometry)
        window = made.remainder.window
        read = torch.where(made.after.window.read >= 0, window.read, -1)
        return replace(made, remainder=replace(made.remainder, window=window._replace(read=read)))

    monkeypatch.setattr(StepPlanner, "_cut", floored)
    assert not bounded.is_golden()


def test_logits_of_the_wrong_row_are_noticed(
    bounded: Bounded, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_of = StepPlanner._cut

    def unmapped(
        planner: StepPlanner,
        entering: StepPlan,
        cut: Cut,
        replay: BatchReplay,
        number: int,
        geometry: CacheGeometry,
    ) -> CutPlan:
        made = cut_of(planner, entering, cut, replay, number, geometry)
        rows = (made.after.batch.logits_rows - 1).clamp_min(0)
        after = replace(made.after, batch=replace(made.after.batch, logits_rows=rows))
        return replace(made, after=after)

    monkeypatch.setattr(StepPlanner, "_cut", unmapped)
    assert not bounded.is_golden()


def test_replayed_rows_that_are_written_are_noticed(
    bounded: Bounded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_planner, "_sparing_cached", lambda plan, *_: plan)
    assert bounded.is_golden()
    assert not bounded.keeps_blocks()
