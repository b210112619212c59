"""Tiers of decode steps, and steps laid out for them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from deepinfer.device.ops.state import NEWCOMER
from deepinfer.device.runtime import Runtime, StepKind
from deepinfer.engine.batch_builder import BuiltStep
from deepinfer.engine.step_tiers import Tier, row_tier, tier_of
from deepinfer.engine.step_upload import StepUpload, TierLayout
from deepinfer.model.step_batch import StepBatch

SPARE_RESULT, SPARE_SLOT = 77, 88
RUNTIME = cast(
    "Runtime",
    SimpleNamespace(pinned=lambda shape, dtype: torch.full(shape, -999, dtype=dtype)),
)


def built(
    lens: list[int], *, key_len: int = 40, num_rows: int | None = None, budget: int | None = None
) -> BuiltStep:
    """A decode step of requests with so many rows, numbers different everywhere."""
    count, rows = len(lens), sum(lens) if num_rows is None else num_rows
    numbers = torch.arange(count)
    batch = StepBatch(
        kind=StepKind.DECODE,
        input_ids=torch.cat((numbers + 100, torch.zeros(rows - count, dtype=torch.int64))),
        query_lens=torch.tensor(lens),
        context_lens=numbers + 10,
        seq_slots=numbers + 20,
        block_table=numbers.unsqueeze(1) + torch.tensor([[30, 31, 32]]),
        history=numbers.unsqueeze(1) + torch.tensor([[40, 41]]),
        logits_rows=torch.arange(rows),
        max_query_len=max(lens),
        max_key_len=key_len,
    )
    return BuiltStep(
        batch=batch,
        num_newcomers=count,
        num_samples=count,
        remap=numbers + 50,
        limits=numbers + 60,
        result_rows=numbers + 70,
        result_seqs=numbers,
        draft_budget=torch.tensor([] if budget is None else [budget], dtype=torch.int64),
        draft_floors=numbers + 90,
        drafts=True,
        prompt_targets=[],
        num_prompt_top=0,
    )


@pytest.mark.parametrize(
    ("step", "max_drafts", "tier"),
    [
        (built([1], key_len=1), 0, Tier(1, 1, 1, 512)),
        (built([1, 1], key_len=512), 0, Tier(2, 2, 1, 512)),
        (built([1] * 3, key_len=513), 0, Tier(4, 4, 1, 1024)),
        (built([1] * 64, key_len=4000), 0, Tier(64, 64, 1, 4096)),
        (built([1] * 65, key_len=4096), 0, Tier(128, 128, 1, 4096)),
        (built([4, 4, 2]), 3, Tier(4, 12, 4, 512)),
        (built([1, 4, 4]), 3, Tier(4, 12, 4, 512)),
        # Near the end of its answer a request has fewer rows; the graph is the same.
        (built([2, 1, 1]), 3, Tier(4, 4, 4, 512)),
        (built([1, 1, 1]), 3, Tier(4, 4, 4, 512)),
        (built([2, 2, 2], num_rows=5, budget=2), 1, Tier(4, 6, 2, 512, has_budget=True)),
        # Not fewer rows than requests: each request's first token has a place of its own.
        (built([2] * 5, num_rows=6, budget=1), 1, Tier(8, 8, 2, 512, has_budget=True)),
    ],
)
def test_tier_is_the_smallest_that_fits(step: BuiltStep, max_drafts: int, tier: Tier) -> None:
    assert tier_of(step, max_key_len=4096, max_drafts=max_drafts) == tier


def test_key_tiers_end_at_the_longest_sequence() -> None:
    assert tier_of(built([1], key_len=600), max_key_len=700, max_drafts=0).key_len == 700


def test_row_tiers_rise_by_half_a_power_of_two() -> None:
    tiers = [row_tier(count) for count in (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 48, 49, 96, 97)]
    assert tiers == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]


def layout_of(step: BuiltStep, max_drafts: int = 0) -> TierLayout:
    return TierLayout(
        tier_of(step, max_key_len=4096, max_drafts=max_drafts),
        block_size=16,
        history_len=2,
        spare_result=SPARE_RESULT,
        spare_slot=SPARE_SLOT,
    )


@pytest.mark.parametrize("budget", [None, 5])
def test_a_packed_step_is_the_step_and_then_padding(budget: int | None) -> None:
    step = built([4, 2, 3], budget=budget)
    layout = layout_of(step, max_drafts=3)
    found = layout.step(layout.pack(step, RUNTIME))
    exact = StepUpload(step, RUNTIME).to(torch.device("cpu"))
    narrowed = found.narrowed(3, 9)
    for name in ("remap", "limits", "result_rows", "result_seqs", "draft_slots", "draft_floors"):
        assert torch.equal(getattr(narrowed, name), getattr(exact, name)), name
    assert torch.equal(found.draft_budget, step.draft_budget)
    for name in ("input_ids", "query_lens", "context_lens", "seq_slots", "history", "logits_rows"):
        assert torch.equal(getattr(narrowed.batch, name), getattr(exact.batch, name)), name
    assert narrowed.batch.block_table[:, :3].equal(exact.batch.block_table)
    assert (narrowed.batch.block_table[:, 3:] == -1).all()
    batch = found.batch
    assert (batch.max_query_len, batch.max_key_len) == (4, 512)
    assert batch.input_ids.tolist() == [100, 101, 102] + [0] * 9
    assert batch.logits_rows.tolist() == list(range(12))
    assert batch.block_table.shape == (4, 32)
    padding = {
        "query_lens": 0, "context_lens": 0, "seq_slots": 0, "remap": NEWCOMER, "limits": 0,
        "result_rows": SPARE_RESULT, "result_seqs": 3, "draft_slots": SPARE_SLOT,
        "draft_floors": 0,
    }  # fmt: skip
    for name, value in padding.items():
        own: Any = getattr(found, name, None)
        assert int((getattr(batch, name) if own is None else own)[3]) == value, name
    parts = (
        *(getattr(batch, name) for name in ("input_ids", "block_table", "history")),
        found.remap,
    )
    assert {part.storage_offset() % 16 for part in parts} == {0}
    assert batch.history[3].tolist() == batch.block_table[3, :2].tolist() == [-1, -1]


def test_what_the_device_knows_better_is_left_as_padding() -> None:
    step = built([1] * 3)
    batch = replace(
        step.batch, input_ids=torch.zeros(3, dtype=torch.int64), history=torch.full((3, 2), -1)
    )
    step = replace(step, batch=batch)
    layout = TierLayout(
        Tier(4, 4, 1, 512), block_size=16, history_len=2, spare_result=7, spare_slot=9
    )
    written = layout.pack(step, RUNTIME)
    assert torch.equal(layout.pack(replace(step, num_newcomers=0), RUNTIME), written)


def test_blocks_beyond_the_tiers_keys_are_left_out() -> None:
    step = built([1, 1])
    layout = TierLayout(
        Tier(2, 2, 1, 32), block_size=16, history_len=2, spare_result=0, spare_slot=0
    )
    table = layout.step(layout.pack(step, RUNTIME)).batch.block_table
    assert table.tolist() == [[30, 31], [31, 32]]


def test_the_next_step_of_a_tier_leaves_nothing_of_the_one_before() -> None:
    layout = layout_of(built([1] * 4))
    packed = layout.pack(built([1] * 4), RUNTIME)
    layout.pack(built([1] * 3), RUNTIME)
    assert torch.equal(layout.pack(built([1] * 4), RUNTIME), packed)
    assert layout.step(layout.pack(built([1] * 3), RUNTIME)).batch.query_lens.tolist() == [
        1, 1, 1, 0,
    ]  # fmt: skip
