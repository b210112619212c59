"""Sorting rows into expert slots without asking the device how many there are.

The number of slots is a capacity: every (row, expert) pair, and for each expert that may be
touched a part of a tile of padding. Slots are grouped by logical expert; the physical expert is
looked up per tile, so that spare copies need no second sort.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase
from deepinfer_kernels.quant.gemm_triton import row_tile

_PAIRS = 256
"""Pairs looked at together."""


class Slots(NamedTuple):
    """Where each pair of row and expert stands.

    Attributes:
        tile_experts: [tiles] int32 physical expert of each tile; -1: not used.
        slot_rows: [S] int32 row of each slot; -1 for padding.
        slot_weights: [S] fp32, set where a slot has a row.
        row_slots: [T, k] int32 slots of each row in ascending logical expert; -1 if invalid.
    """

    tile_experts: Tensor
    slot_rows: Tensor
    slot_weights: Tensor
    row_slots: Tensor


@triton.jit(do_not_specialize=["num_pairs"])
def _count(ids_ptr, valid_ptr, counts_ptr, num_pairs, k, PAIRS: tl.constexpr):
    expert = tl.program_id(0)
    total = tl.zeros([PAIRS], dtype=tl.int32)
    for start in range(0, num_pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        inside = pair < num_pairs
        valid = tl.load(valid_ptr + pair // k, mask=inside, other=0) != 0
        found = tl.load(ids_ptr + pair, mask=inside & valid, other=-1)
        total += (found == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["num_pairs"])
def _place(
    ids_ptr, weights_ptr, valid_ptr, physical_ptr, counts_ptr, tile_experts_ptr, slot_rows_ptr,
    slot_weights_ptr, row_slots_ptr, num_pairs, k, num_experts,
    TILE: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + index, mask=index < num_experts, other=0)
    tiles = (counts + (TILE - 1)) // TILE
    first_tile = tl.sum(tl.where(index < expert, tiles, 0), axis=0)
    num_tiles = tl.sum(tl.where(index == expert, tiles, 0), axis=0)
    physical = tl.load(physical_ptr + expert).to(tl.int32)
    for tile in range(num_tiles):
        tl.store(tile_experts_ptr + first_tile + tile, physical)
    taken = first_tile * TILE
    for start in range(0, num_pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        inside = pair < num_pairs
        row = pair // k
        valid = tl.load(valid_ptr + row, mask=inside, other=0) != 0
        found = tl.load(ids_ptr + pair, mask=inside & valid, other=-1)
        mine = found == expert
        slot = taken + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        # Place of this expert among the row's, in ascending id.
        place = tl.zeros([PAIRS], dtype=tl.int32)
        for other in range(k):
            other_id = tl.load(ids_ptr + row * k + other, mask=inside, other=-1)
            place += (other_id < expert).to(tl.int32)
        weight = tl.load(weights_ptr + pair, mask=mine, other=0.0)
        tl.store(slot_rows_ptr + slot, row, mask=mine)
        tl.store(slot_weights_ptr + slot, weight, mask=mine)
        tl.store(row_slots_ptr + row * k + place, slot, mask=mine)
        taken += tl.sum(mine.to(tl.int32), axis=0)


def place_rows(ids: Tensor, weights: Tensor, physical: Tensor, valid: Tensor) -> Slots:
    """Slots of all valid rows.

    Args:
        ids: [T, k] int64 distinct logical experts of each row.
        weights: [T, k] fp32.
        physical: [E] int64 physical expert of each logical one.
        valid: [T] bool.

    Returns:
        The slots; S is T * k and min(E, T * k) partial tiles, in whole tiles. A tile holds the
        rows that an expert gets on average, as far as products have such tiles.
    """
    num_rows, k = ids.shape
    num_pairs, num_experts = num_rows * k, physical.shape[0]
    device = ids.device
    tile = row_tile(triton.cdiv(num_pairs, num_experts)).rows
    capacity = num_pairs // tile + min(num_experts, num_pairs)
    tile_experts = torch.full((capacity,), -1, dtype=torch.int32, device=device)
    slot_rows = torch.full((capacity * tile,), -1, dtype=torch.int32, device=device)
    slot_weights = torch.empty(capacity * tile, dtype=torch.float32, device=device)
    row_slots = torch.full((num_rows, k), -1, dtype=torch.int32, device=device)
    if num_pairs:
        ids, weights, valid = ids.contiguous(), weights.contiguous(), valid.contiguous()
        counts = torch.empty(num_experts, dtype=torch.int32, device=device)
        _count[(num_experts,)](ids, valid, counts, num_pairs, k, PAIRS=_PAIRS)
        _place[(num_experts,)](
            ids, weights, valid, physical, counts, tile_experts, slot_rows, slot_weights,
            row_slots, num_pairs, k, num_experts, TILE=tile,
            EXPERTS=triton.next_power_of_2(num_experts),
            PAIRS=_PAIRS,
        )  # fmt: skip
    return Slots(tile_experts, slot_rows, slot_weights, row_slots)


def place_rows_truth(ids: Tensor, physical: Tensor, valid: Tensor) -> list[tuple[int, int]]:
    """(row, physical expert) of every slot that has a row, by logical expert then row."""
    pairs = []
    for logical in range(physical.shape[0]):
        for row, chosen in enumerate(ids.tolist()):
            if bool(valid[row]) and logical in chosen:
                pairs.append((row, int(physical[logical])))
    return pairs


_POINTERS = {"ids_ptr": "*i64", "valid_ptr": "*i1"}
COMPILE_CASES = (
    CompileCase(
        "_count", {**_POINTERS, "counts_ptr": "*i32", "num_pairs": "i32", "k": "i32"},
        {"PAIRS": _PAIRS},
    ),
    CompileCase(
        "_place",
        {
            "ids_ptr": "*i64", "weights_ptr": "*fp32", "valid_ptr": "*i1", "physical_ptr": "*i64",
            "counts_ptr": "*i32", "tile_experts_ptr": "*i32", "slot_rows_ptr": "*i32",
            "slot_weights_ptr": "*fp32", "row_slots_ptr": "*i32", "num_pairs": "i32", "k": "i32",
            "num_experts": "i32",
        },
        {"TILE": 128, "EXPERTS": 512, "PAIRS": _PAIRS},
    ),
)  # fmt: skip
