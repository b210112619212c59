"""The sweep's candidates compute what few rows compute; `--check` compiles them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import gemm_sweep
from benchmarks.gpu.gemm_sweep import Candidate, candidates
from deepinfer_kernels.quant.gemm_triton import Operand

# The candidates of the other shapes differ from these in the shape alone.
CANDIDATES = {it.name: it for it in candidates() if it.shape == gemm_sweep.SHAPES[0]}


@pytest.fixture(scope="module")
def small() -> tuple[Tensor, Operand, Tensor]:
    """A product whose K is split in two, and its result by few rows."""
    torch.manual_seed(0)
    x, weight = gemm_sweep.operands(40, 544, 130, "cpu")
    return x, weight, gemm_sweep.of_few_rows(x, weight)


@pytest.mark.parametrize("name", CANDIDATES)
def test_candidate_has_the_bits_of_few_rows(
    name: str, small: tuple[Tensor, Operand, Tensor]
) -> None:
    x, weight, expected = small
    many = CANDIDATES[name].many._replace(rows=130)
    assert torch.equal(gemm_sweep.product(x, weight, many), expected)


def test_verdict_says_how_far_a_result_is_off() -> None:
    expected = torch.tensor([1.0, -4.0]).bfloat16()
    assert gemm_sweep.verdict(expected.clone(), expected) == "same"
    value = torch.tensor([1.0, -4.03125]).bfloat16()  # the next value
    assert gemm_sweep.verdict(value, expected) == "DIFFER by 7.8e-03 of the largest value"


def test_table_is_sorted_and_keeps_what_failed() -> None:
    shape = "wq_b 32768x1280"
    text = gemm_sweep.table(
        [
            {"shape": shape, "part": True, "product": 131.0},
            {"shape": shape, "candidate": "as it is", "us": 180.0, "bits": "same"},
            {"shape": shape, "candidate": "groups=64", "us": 170.0, "bits": "DIFFER"},
            {"shape": shape, "candidate": "tile=1", "us": None, "bits": "OutOfResources"},
        ]
    )
    found = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert found == [
        "| 170.0 | DIFFER | groups=64 |",
        "| 180.0 | same | as it is |",
        "| - | OutOfResources | tile=1 |",
    ]
    assert f"{shape}, us: product 131.0" in text


def test_names_say_the_change() -> None:
    tile = gemm_sweep.TILES[0]
    candidate = Candidate(gemm_sweep.SHAPES[0], {"descriptors": False, "tile": tile})
    assert candidate.name == "descriptors=False, tile=256x128x64x8x3"
    assert candidate.many.tile is tile
