"""Building a step's sampling tensors from its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer.device.ops.sampling import LogitControls, SampleParams, SampleWork
from deepinfer.engine.logit_rows import LogitRows
from deepinfer.engine.request_controls import RequestControls
from deepinfer.engine.sampling_batch import (
    PACKED_ROWS,
    SampledRequest,
    SamplingBatch,
    build_sampling_batch,
)
from deepinfer.engine.sampling_params import SamplingParams

VOCAB = 10


def _row(
    *,
    slot: int = 0,
    **fields: Any,  # noqa: ANN401 - any field of a request
) -> SampledRequest:
    params = SamplingParams(**fields)
    return SampledRequest(
        params=params,
        controls=RequestControls.of(params, VOCAB),
        seed=11,
        sample_index=2,
        num_prompt_tokens=28,
        slot=slot,
    )


def _build(*rows: SampledRequest) -> SamplingBatch:
    return build_sampling_batch(rows, VOCAB, eos_token_ids=(1,))


def _rows(*positions: int) -> LogitRows:
    """One row for each request."""
    return LogitRows.single(torch.tensor(positions))


# Two requests, of three rows and two, and one row of padding.
_BLOCKS = LogitRows(
    owner=torch.tensor([0, 0, 0, 1, 1, 1]),
    offset=torch.tensor([0, 1, 2, 0, 1, 0]),
    positions=torch.tensor([29, 30, 31, 40, 41, 1]),
    starts=torch.tensor([0, 3, 5]),
    width=4,
)


def _params(batch: SamplingBatch) -> SampleParams:
    count = batch.reals.shape[1]
    return batch.params(torch.arange(count), torch.full((count,), 30))


def _controls(
    batch: SamplingBatch, rows: LogitRows, drafts: torch.Tensor | None = None
) -> LogitControls:
    counts = torch.zeros(8, VOCAB, dtype=torch.int32), torch.zeros(8, VOCAB) > 0
    none = torch.empty((len(rows.owner), 0), dtype=torch.int64)
    return batch.controls(rows, none if drafts is None else rows.before(drafts), counts)


def test_plain_rows_have_no_controls() -> None:
    batch = _build(_row(temperature=0.0), _row())
    assert _controls(batch, _rows(30, 31)) == (None, None, None, None)
    assert batch.num_top is None


def test_columns_hold_what_each_row_asks_for() -> None:
    row = _row(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125)
    row = row._replace(seed=-(2**63), sample_index=4)
    batch = _build(_row(), row)
    params = batch.params(torch.tensor([0, 1]), torch.tensor([30, 99]))
    assert [column[1].item() for column in params] == [0.5, 3, 0.25, 0.125, -(2**63), 4, 99]
    assert [column.dtype for column in params] == [
        torch.float32, torch.int64, torch.float32, torch.float32,
        torch.int64, torch.int64, torch.int64,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {"temperature": 1e-5}, {"top_k": 1}, {"top_p": 0.0}]
)
def test_every_greedy_request_becomes_temperature_zero(fields: dict[str, Any]) -> None:
    batch = _build(_row(**fields))
    assert _params(batch).temperature.tolist() == [0.0]
    assert batch.work is SampleWork.GREEDY


@pytest.mark.parametrize(
    ("fields", "work"),
    [
        ({}, SampleWork.RANDOM),
        ({"min_p": 0.1}, SampleWork.RANDOM),
        ({"top_k": -1}, SampleWork.RANDOM),
        ({"top_k": VOCAB}, SampleWork.RANDOM),
        ({"top_k": 4}, SampleWork.SORTED),
        ({"top_p": 0.9}, SampleWork.SORTED),
    ],
)
def test_work_is_the_most_that_any_row_needs(fields: dict[str, Any], work: SampleWork) -> None:
    assert _build(_row(temperature=0.0), _row(**fields)).work is work


def test_a_temperature_beyond_float32_stays_finite() -> None:
    assert _params(_build(_row(temperature=1e300))).temperature.isfinite().all()


def test_end_and_stop_tokens_are_banned_while_short_of_min_tokens() -> None:
    wanted: dict[str, Any] = {"min_tokens": 3, "stop_token_ids": [5, 6]}
    batch = _build(_row(), _row(**wanted), _row(**wanted))
    banned = _controls(batch, _rows(30, 30, 31)).banned
    assert banned is not None
    pairs = zip(banned.rows.tolist(), banned.ids.tolist(), strict=True)
    assert sorted(pair for pair in pairs if pair[0] >= 0) == [(1, 1), (1, 5), (1, 6)]


def test_within_a_block_every_row_counts_its_own_tokens() -> None:
    batch = _build(_row(min_tokens=3), _row(min_tokens=13))
    banned = _controls(batch, _BLOCKS).banned
    assert banned is not None
    # Prompts of 28 tokens: the ends may stand from position 31 and 41 on.
    pairs = zip(banned.rows.tolist(), banned.ids.tolist(), strict=True)
    assert sorted(pair for pair in pairs if pair[0] >= 0) == [(0, 1), (1, 1), (3, 1)]


def test_an_ignored_end_token_is_not_banned() -> None:
    assert _build(_row(min_tokens=3, ignore_eos=True)).banned is None


def test_ids_never_to_be_output_are_banned_in_every_row() -> None:
    batch = build_sampling_batch([_row(), _row()], VOCAB, never_token_ids=(9,))
    banned = _controls(batch, _BLOCKS).banned
    assert banned is not None
    assert banned.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert banned.ids.tolist() == [9] * 6


def test_ids_never_to_be_output_stand_beside_early_ends() -> None:
    rows = [_row(min_tokens=3), _row()]
    batch = build_sampling_batch(rows, VOCAB, eos_token_ids=(1,), never_token_ids=(8, 9))
    banned = _controls(batch, _rows(30, 31)).banned
    assert banned is not None
    pairs = zip(banned.rows.tolist(), banned.ids.tolist(), strict=True)
    assert sorted(pairs) == [(0, 1), (0, 8), (0, 9), (1, 8), (1, 9)]


@pytest.mark.parametrize(
    ("fields", "is_plain"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.1}, True),
        ({"logprobs": 0}, False),
        ({"min_tokens": 2}, False),
        ({"logit_bias": {3: 1.0}}, False),
        ({"allowed_token_ids": [3]}, False),
        ({"presence_penalty": 1.0}, False),
    ],
)
def test_a_batch_is_plain_without_anything_but_parameters(
    fields: dict[str, Any], is_plain: bool
) -> None:
    rows = [_row(), _row(**fields)]
    batch = build_sampling_batch(rows, VOCAB, eos_token_ids=(1,), never_token_ids=(9,))
    assert batch.is_plain == is_plain


def test_a_packed_batch_is_the_same_batch_and_greedy_requests() -> None:
    batch = _build(_row(top_k=3, temperature=0.7, top_p=0.25), _row(min_p=0.5))
    packed = torch.full((PACKED_ROWS, 4), -1, dtype=torch.int64)
    batch.pack_into(packed)
    found = SamplingBatch.plain(packed, batch.work, None)
    for column, expected in zip(_params(found)[:-1], _params(batch)[:-1], strict=True):
        assert torch.equal(column[:2], expected)
        assert column[2:].tolist() == [0, 0]


def test_logit_bias_holds_in_every_row_of_its_request() -> None:
    batch = _build(_row(), _row(logit_bias={"7": -100.0, "2": 1.5}))
    bias = _controls(batch, _BLOCKS).bias
    assert bias is not None
    entries = zip(*(column.tolist() for column in bias), strict=True)
    assert sorted(entry for entry in entries if entry[0] >= 0) == [
        (3, 2, 1.5), (3, 7, -100.0), (4, 2, 1.5), (4, 7, -100.0),
    ]  # fmt: skip


def test_allowed_ids_restrict_the_rows_of_their_request_only() -> None:
    batch = _build(_row(), _row(allowed_token_ids=[3, 8]))
    allowed = _controls(batch, _BLOCKS).allowed
    assert allowed is not None
    assert allowed[:3].all()
    for row in (3, 4):
        assert allowed[row].nonzero().flatten().tolist() == [3, 8]


def test_a_constraint_mask_is_joined_with_the_allowed_ids() -> None:
    mask = torch.arange(VOCAB) >= 5
    batch = _build(_row(allowed_token_ids=[3, 8])._replace(masks=(mask,)))
    allowed = _controls(batch, _rows(30)).allowed
    assert allowed is not None
    assert allowed[0].nonzero().flatten().tolist() == [8]
    assert mask.sum() == 5


def test_every_row_of_a_block_has_the_mask_of_its_place() -> None:
    masks = tuple(torch.arange(VOCAB) == token for token in (4, 7))
    batch = _build(_row(), _row()._replace(masks=(None,)), _row()._replace(masks=masks))
    rows = LogitRows(
        owner=torch.tensor([0, 1, 1, 2, 2, 2]),
        offset=torch.tensor([0, 0, 1, 0, 1, 2]),
        positions=torch.arange(6),
        starts=torch.tensor([0, 1, 3, 6]),
        width=3,
    )
    allowed = _controls(batch, rows).allowed
    assert allowed is not None
    assert allowed[[0, 1, 2]].all()
    assert [row.nonzero().flatten().tolist() for row in allowed[3:5]] == [[4], [7]]


def test_only_penalised_rows_point_to_their_counts() -> None:
    batch = _build(_row(slot=4), _row(slot=7, temperature=0.0, frequency_penalty=0.5))
    penalties = _controls(batch, _rows(30, 30)).penalties
    assert penalties is not None
    assert penalties.slots.tolist() == [-1, 7]
    assert penalties.repetition.tolist() == [1.0, 1.0]
    assert penalties.presence.tolist() == [0.0, 0.0]
    assert penalties.frequency.tolist() == [0.0, 0.5]
    assert penalties.pending.shape == (2, 0)


def test_drafts_before_a_row_are_pending() -> None:
    batch = _build(_row(frequency_penalty=0.5), _row())
    penalties = _controls(batch, _BLOCKS, torch.tensor([[5, 6, 7], [8, 9, -1]])).penalties
    assert penalties is not None
    assert penalties.slots[:5].tolist() == [0, 0, 0, -1, -1]
    assert penalties.pending[:5].tolist() == [
        [-1, -1, -1], [5, -1, -1], [5, 6, -1], [-1, -1, -1], [8, -1, -1],
    ]  # fmt: skip


def test_num_top_is_the_most_that_any_row_wants() -> None:
    assert _build(_row(), _row(logprobs=0)).num_top == 0
    assert _build(_row(logprobs=2), _row(logprobs=5), _row()).num_top == 5


def test_zero_rows_are_legal() -> None:
    batch = _build()
    assert batch.work is SampleWork.GREEDY
    assert _params(batch).seeds.shape == (0,)


def test_moving_keeps_every_part() -> None:
    batch = _build(_row(min_tokens=1, logit_bias={"3": 1.0}, allowed_token_ids=[3], logprobs=1))
    moved = batch.to(torch.device("meta"))
    assert moved.integers.device.type == moved.reals.device.type == "meta"
    assert moved.allowed is not None
    assert moved.banned is not None
    assert moved.bias is not None
    assert moved.allowed.masks.device.type == moved.banned.ids.device.type == "meta"
    assert moved.bias.values.device.type == "meta"
    assert (moved.work, moved.num_top) == (batch.work, batch.num_top)
