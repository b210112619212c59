"""Comparing traces: order, bounds, ids as sets, and what is not comparable."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepinfer.device.errors import ContractError
from deepinfer.model.trace_compare import TraceDifference, compare_traces, execution_order


def _only(left: Tensor, right: Tensor, name: str = "logits") -> TraceDifference:
    (entry,) = compare_traces({name: left}, {name: right}, bound=1e-3)
    return entry


def test_execution_order_is_numeric_and_ends_with_the_drafter() -> None:
    names = [
        "engram.4.hash_ids",
        "layers.2.streams",
        "layers.2.selected_positions",
        "layers.2.candidate_blocks",
        "layers.2.expert_ids",
        "layers.2.expert_weights",
        "layers.10.streams",
        "final.streams",
        "final.hidden",
        "logits",
        "draft.context",
        "draft.0.streams",
        "draft.0.expert_ids",
        "draft.2.streams",
        "draft.hidden",
        "draft.logits",
        "draft.tokens",
        "draft.confidence_logits",
    ]
    shuffled = names[5:] + names[:5]
    assert sorted(shuffled, key=execution_order) == names


@pytest.mark.parametrize(
    "name", ["embed.weight", "layers.0.attn.wq_a.weight", "layers.x.streams", "draft.1.hash_ids"]
)
def test_name_of_no_trace_is_refused(name: str) -> None:
    with pytest.raises(ContractError, match=name):
        compare_traces({name: torch.ones(1, 1)}, {}, bound=0.0)


def test_error_is_relative_to_the_largest_trusted_value() -> None:
    left = torch.tensor([[100.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    right = left.clone()
    right[0, 1] = 0.05
    right[2, 0] = 2.5
    entry = _only(left, right)
    assert entry.max_abs == pytest.approx(0.5)
    assert entry.error == pytest.approx(0.005)
    assert entry.position == 2


def test_error_equal_to_the_bound_is_accepted() -> None:
    left, right = torch.tensor([[1.0]]), torch.tensor([[1.25]])
    (entry,) = compare_traces({"logits": left}, {"logits": right}, bound=0.25)
    assert entry.position is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_value_is_beyond_every_bound(value: float) -> None:
    left = torch.ones(3, 2)
    right = left.clone()
    right[1, 0] = value
    assert _only(left, right).position == 1


def test_ids_are_compared_as_sets_per_row() -> None:
    left = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    right = torch.tensor([[2, 1], [3, 5], [6, 5], [5, 6]])
    entry = _only(left, right, "layers.0.expert_ids")
    assert (entry.max_abs, entry.error, entry.position) == (2, 0.5, 1)


def test_hash_ids_of_equal_traces_do_not_differ() -> None:
    ids = torch.arange(6).reshape(2, 3)
    assert _only(ids, ids.clone(), "engram.1.hash_ids").position is None


def test_first_difference_is_the_first_in_execution_order() -> None:
    left = {"logits": torch.ones(2, 2), "layers.10.streams": torch.ones(2, 2)}
    left["layers.9.streams"] = torch.ones(2, 2)
    right = {name: value + 1 for name, value in left.items()}
    right["layers.9.streams"] = left["layers.9.streams"]
    beyond = [e.name for e in compare_traces(left, right, bound=0.5) if e.position is not None]
    assert beyond == ["layers.10.streams", "logits"]


def test_tensor_of_one_trace_only_is_a_difference() -> None:
    (entry,) = compare_traces({}, {"logits": torch.ones(1, 1)}, bound=1.0)
    assert entry.position == 0
    assert entry.note == "only in the right trace"


@pytest.mark.parametrize("right", [torch.ones(3, 2), torch.ones(2, 2, dtype=torch.int64)])
def test_other_shape_or_kind_of_dtype_is_a_difference(right: Tensor) -> None:
    entry = _only(torch.ones(2, 2), right)
    assert math.isinf(entry.error)
    assert entry.position == 0


def test_empty_tensors_do_not_differ() -> None:
    assert _only(torch.ones(2, 0), torch.ones(2, 0)).position is None
