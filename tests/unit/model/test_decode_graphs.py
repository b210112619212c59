"""Tiers, padding and replay of decode graphs, on a model that records what it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from deepinfer.device.runtime import StepKind
from deepinfer.model.caches import CacheGeometry, ModelCaches
from deepinfer.model.decode_graphs import DecodeGraphs, Tier, row_tier, tier_of
from deepinfer.model.forwarded import Forwarded
from deepinfer.model.layer_state import LayerState
from deepinfer.model.step_batch import StepBatch, StepPlan

CACHES = cast("ModelCaches", SimpleNamespace(geometry=SimpleNamespace(block_size=16)))


@dataclass
class Recorder:
    """Gives every row its input id, and keeps the batches."""

    batches: list[StepBatch]

    def create_caches(self, geometry: CacheGeometry) -> ModelCaches:
        return CACHES

    def step(self, batch: StepBatch, caches: ModelCaches) -> Forwarded:
        self.batches.append(batch)
        logits = batch.input_ids.float()[batch.logits_rows].unsqueeze(1)
        return Forwarded(logits, cast("LayerState", None), cast("StepPlan", batch))


class Replay:
    """A graph that repeats its work into the tensor it was captured with."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work

    def replay(self) -> None:
        self.work()


def graphs_of(model: Recorder) -> DecodeGraphs:
    runtime = SimpleNamespace(capture=lambda work: (work(), Replay(work))[1])
    return DecodeGraphs(model, cast("Any", SimpleNamespace(runtime=runtime)), max_key_len=4096)


def step(num_seqs: int, *, key_len: int = 40, kind: StepKind = StepKind.DECODE) -> StepBatch:
    numbers = torch.arange(num_seqs)
    return StepBatch(
        kind=kind,
        input_ids=numbers + 100,
        query_lens=torch.ones_like(numbers),
        context_lens=numbers * 3,
        seq_slots=numbers,
        block_table=numbers.unsqueeze(1) + torch.zeros(3, dtype=torch.int64),
        history=torch.zeros(num_seqs, 2, dtype=torch.int64),
        logits_rows=numbers,
        max_query_len=1,
        max_key_len=key_len,
    )


@pytest.mark.parametrize(
    ("num_seqs", "key_len", "tier"),
    [
        (1, 1, Tier(1, 1, 1, 512)),
        (2, 512, Tier(2, 2, 1, 512)),
        (3, 513, Tier(4, 4, 1, 1024)),
        (64, 4000, Tier(64, 64, 1, 4096)),
        (65, 4096, Tier(128, 128, 1, 4096)),
    ],
)
def test_tier_is_the_smallest_that_fits(num_seqs: int, key_len: int, tier: Tier) -> None:
    assert tier_of(step(num_seqs, key_len=key_len), 4096) == tier


def test_key_tiers_end_at_the_longest_sequence() -> None:
    assert tier_of(step(1, key_len=600), 700).key_len == 700


def test_steps_of_a_tier_share_a_graph_and_are_padded() -> None:
    model = Recorder([])
    graphs = graphs_of(model)
    graphs.step(step(4), CACHES)
    graphs.step(step(3), CACHES)
    assert graphs.num_graphs == 1
    held = model.batches[-1]
    assert held is model.batches[0]
    assert held.query_lens.tolist() == [1, 1, 1, 0]
    assert held.block_table.shape == (4, 32)
    assert held.block_table[2].tolist() == [2, 2, 2] + [-1] * 29


def test_logits_are_those_of_the_real_rows() -> None:
    graphs = graphs_of(Recorder([]))
    logits = graphs.step(step(3), CACHES).logits
    assert logits.squeeze(1).tolist() == [100.0, 101.0, 102.0]


@pytest.mark.parametrize(
    "batch",
    [
        step(2, kind=StepKind.PREFILL),
        replace(step(2), logits_rows=torch.zeros(3, dtype=torch.int64)),
    ],
    ids=["prefill", "more-logits-than-rows"],
)
def test_other_steps_are_issued_as_they_are(batch: StepBatch) -> None:
    model = Recorder([])
    graphs = graphs_of(model)
    graphs.step(batch, CACHES)
    assert graphs.num_graphs == 0
    assert model.batches == [batch]


def test_a_longer_key_bound_gets_its_own_graph() -> None:
    graphs = graphs_of(Recorder([]))
    graphs.step(step(2, key_len=500), CACHES)
    graphs.step(step(2, key_len=900), CACHES)
    assert graphs.num_graphs == 2


def test_row_tiers_rise_by_half_a_power_of_two() -> None:
    tiers = [row_tier(count) for count in (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 48, 49, 96, 97)]
    assert tiers == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]


def test_verifications_of_a_row_tier_share_a_graph() -> None:
    """Whatever the rows of each request are, which only the device knows."""
    model = Recorder([])
    graphs = graphs_of(model)
    for lens in ([4, 4, 2], [1, 4, 4], [4, 4, 4]):
        count = sum(lens)
        batch = replace(
            step(3),
            input_ids=torch.arange(count) + 100,
            query_lens=torch.tensor(lens),
            logits_rows=torch.arange(count),
            max_query_len=4,
        )
        found = graphs.step(batch, CACHES)
        assert found.logits.squeeze(1).tolist() == [100.0 + row for row in range(count)]
        held = model.batches[-1]
        assert held.input_ids.shape == (12,)
        assert held.query_lens.tolist() == [*lens, 0]
        assert held.max_query_len == 4
    assert graphs.num_graphs == 1
