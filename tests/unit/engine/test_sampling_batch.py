"""Building a step's sampling tensors from its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer.device.errors import ContractError
from deepinfer.device.ops.sampling import SampleWork
from deepinfer.engine.request_controls import RequestControls
from deepinfer.engine.sampling_batch import SamplingBatch, SamplingRow, build_sampling_batch
from deepinfer.engine.sampling_params import SamplingParams

VOCAB = 10


def _row(
    *,
    slot: int = 0,
    num_output_tokens: int = 0,
    **fields: Any,  # noqa: ANN401 - any field of a request
) -> SamplingRow:
    params = SamplingParams(**fields)
    return SamplingRow(
        params=params,
        controls=RequestControls.of(params, VOCAB),
        seed=11,
        sample_index=2,
        position=30,
        num_output_tokens=num_output_tokens,
        slot=slot,
    )


def _build(*rows: SamplingRow) -> SamplingBatch:
    return build_sampling_batch(rows, VOCAB, eos_token_ids=(1,))


def test_plain_rows_have_no_controls() -> None:
    batch = _build(_row(temperature=0.0), _row())
    controls = batch.controls(torch.zeros(1, VOCAB, dtype=torch.int32), torch.zeros(1, VOCAB) > 0)
    assert controls == (None, None, None, None)
    assert batch.num_top is None


def test_columns_hold_what_each_row_asks_for() -> None:
    row = _row(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125)
    row = row._replace(seed=-(2**63), sample_index=4, position=99)
    params = _build(_row(), row).params
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
    assert batch.params.temperature.tolist() == [0.0]
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
    assert _build(_row(temperature=1e300)).params.temperature.isfinite().all()


def test_end_and_stop_tokens_are_banned_while_short_of_min_tokens() -> None:
    wanted: dict[str, Any] = {"min_tokens": 3, "stop_token_ids": [5, 6]}
    batch = _build(
        _row(),
        _row(num_output_tokens=2, **wanted),
        _row(num_output_tokens=3, **wanted),
    )
    assert batch.banned is not None
    assert batch.banned.rows.tolist() == [1, 1, 1]
    assert sorted(batch.banned.ids.tolist()) == [1, 5, 6]


def test_an_ignored_end_token_is_not_banned() -> None:
    assert _build(_row(min_tokens=3, ignore_eos=True)).banned is None


def test_ids_never_to_be_output_are_banned_in_every_row() -> None:
    batch = build_sampling_batch([_row(), _row()], VOCAB, never_token_ids=(9,))
    assert batch.banned is not None
    assert batch.banned.rows.tolist() == [0, 1]
    assert batch.banned.ids.tolist() == [9, 9]


def test_logit_bias_becomes_sparse_entries_of_its_row() -> None:
    batch = _build(_row(), _row(logit_bias={"7": -100.0, "2": 1.5}))
    assert batch.bias is not None
    assert [column.tolist() for column in batch.bias] == [[1, 1], [7, 2], [-100.0, 1.5]]


def test_allowed_ids_restrict_their_row_only() -> None:
    batch = _build(_row(), _row(allowed_token_ids=[3, 8]))
    assert batch.allowed is not None
    assert batch.allowed[0].all()
    assert batch.allowed[1].nonzero().flatten().tolist() == [3, 8]


def test_a_constraint_mask_is_joined_with_the_allowed_ids() -> None:
    mask = torch.arange(VOCAB) >= 5
    batch = _build(_row(allowed_token_ids=[3, 8])._replace(mask=mask))
    assert batch.allowed is not None
    assert batch.allowed[0].nonzero().flatten().tolist() == [8]
    assert mask.sum() == 5


def test_only_penalised_rows_point_to_their_counts() -> None:
    batch = _build(_row(slot=4), _row(slot=7, temperature=0.0, frequency_penalty=0.5))
    counts, seen = torch.zeros(8, VOCAB, dtype=torch.int32), torch.zeros(8, VOCAB) > 0
    penalties = batch.controls(counts, seen).penalties
    assert penalties is not None
    assert penalties.slots.tolist() == [-1, 7]
    assert penalties.repetition.tolist() == [1.0, 1.0]
    assert penalties.presence.tolist() == [0.0, 0.0]
    assert penalties.frequency.tolist() == [0.0, 0.5]
    assert penalties.output_counts is counts


def test_num_top_is_the_most_that_any_row_wants() -> None:
    assert _build(_row(), _row(logprobs=0)).num_top == 0
    assert _build(_row(logprobs=2), _row(logprobs=5), _row()).num_top == 5


def test_padding_rows_are_greedy_and_uncontrolled() -> None:
    batch = build_sampling_batch([_row(presence_penalty=1.0)], VOCAB, capacity=3)
    assert batch.params.temperature.tolist() == [1.0, 0.0, 0.0]
    assert batch.integers[4].tolist() == [0, -1, -1]


def test_too_many_rows_for_the_capacity_are_refused() -> None:
    with pytest.raises(ContractError, match="2 rows do not fit capacity=1"):
        build_sampling_batch([_row(), _row()], VOCAB, capacity=1)


def test_zero_rows_are_legal() -> None:
    batch = _build()
    assert batch.work is SampleWork.GREEDY
    assert batch.params.seeds.shape == (0,)


def test_moving_keeps_every_part() -> None:
    batch = _build(_row(min_tokens=1, logit_bias={"3": 1.0}, allowed_token_ids=[3], logprobs=1))
    moved = batch.to(torch.device("meta"))
    assert moved.params.seeds.device.type == "meta"
    assert moved.allowed is not None
    assert moved.banned is not None
    assert moved.bias is not None
    assert moved.allowed.device.type == moved.banned.ids.device.type == "meta"
    assert moved.bias.values.device.type == "meta"
    assert (moved.work, moved.num_top) == (batch.work, batch.num_top)
