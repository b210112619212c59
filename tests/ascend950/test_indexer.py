"""Choices that the contract leaves open and this backend takes as the reference does."""

from __future__ import annotations

import pytest
import torch

from deepinfer_ascend950.ops.indexer import select_candidates, select_topk


@pytest.mark.parametrize("num_entries", [5, 64, 1000])
def test_of_equal_scores_the_lowest_entries_are_taken(num_entries: int) -> None:
    scores = torch.zeros((3, num_entries))
    scores[1, -1] = 1.0
    visible = torch.full((3,), num_entries)
    found = select_topk(scores, visible, 4)
    assert found.tolist() == [[0, 1, 2, 3], [0, 1, 2, num_entries - 1], [0, 1, 2, 3]]


def test_of_equal_blocks_the_lowest_and_the_newest_are_taken() -> None:
    found = select_candidates(torch.zeros((1, 400)), torch.tensor([400]), 3, 4)
    assert found.tolist() == [[0, 1, 99]]
