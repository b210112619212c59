"""Which drafts of a batch are verified: each one counts those that come before it.

Counting is quadratic in the drafts and needs no sort: 256 requests of 5 drafts are 1.6 M
comparisons, spread over as many programs as there are requests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase

_SLOTS = 512


@triton.jit(do_not_specialize=["num_slots", "num_drafts"])
def _admit(
    survival_ptr, available_ptr, budget_ptr, out_ptr, num_slots, num_drafts, floor,
    DRAFTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    draft = tl.arange(0, DRAFTS)
    available = tl.minimum(tl.load(available_ptr + seq), num_drafts)
    own = tl.load(survival_ptr + seq * num_drafts + draft, mask=draft < available, other=0.0)
    admissible = own >= floor
    num_before = tl.zeros([DRAFTS], dtype=tl.int32)
    for start in range(0, num_slots, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        inside = slot < num_slots
        other_seq, other_draft = slot // num_drafts, slot % num_drafts
        limit = tl.load(available_ptr + other_seq, mask=inside, other=0)
        other = tl.load(survival_ptr + slot, mask=inside & (other_draft < limit), other=0.0)
        earlier = other_draft[None, :] < draft[:, None]
        same_place = other_draft[None, :] == draft[:, None]
        earlier = earlier | (same_place & (other_seq < seq)[None, :])
        before = other[None, :] > own[:, None]
        before = before | ((other[None, :] == own[:, None]) & earlier)
        before = before & (other >= floor)[None, :]
        num_before += tl.sum(before.to(tl.int32), axis=1)
    admitted = admissible & (num_before < tl.load(budget_ptr))
    tl.store(out_ptr + seq, tl.sum(admitted.to(tl.int32), axis=0).to(tl.int64))


def admit_drafts(survival: Tensor, available: Tensor, budget: Tensor, *, floor: float) -> Tensor:
    """[R] int64 drafts admitted of each request: the `budget` best of the batch.

    Args:
        survival: [R, D] fp32, not rising along D.
        available: [R] int64 drafts of each request.
        budget: [1] int64.
        floor: drafts below it are not admitted; exact in fp32.

    Returns:
        Counts; ties go to the lower draft, then to the lower request.
    """
    survival = survival.contiguous()
    num_seqs, num_drafts = survival.shape
    out = torch.empty(num_seqs, dtype=torch.int64, device=survival.device)
    if num_seqs:
        _admit[(num_seqs,)](
            survival, available.contiguous(), budget, out, survival.numel(), num_drafts, floor,
            DRAFTS=triton.next_power_of_2(num_drafts), SLOTS=_SLOTS,
        )  # fmt: skip
    return out


def admit_drafts_truth(
    survival: Tensor, available: Tensor, budget: int, *, floor: float
) -> list[int]:
    """`admit_drafts` by sorting all drafts."""
    slots = [
        (-value, draft, seq)
        for seq, (row, limit) in enumerate(zip(survival.tolist(), available.tolist(), strict=True))
        for draft, value in enumerate(row[:limit])
        if value >= floor
    ]
    chosen = [seq for _, _, seq in sorted(slots)[:budget]]
    return [chosen.count(seq) for seq in range(len(survival))]


COMPILE_CASES = (
    CompileCase(
        "_admit",
        {
            "survival_ptr": "*fp32", "available_ptr": "*i64", "budget_ptr": "*i64",
            "out_ptr": "*i64", "num_slots": "i32", "num_drafts": "i32", "floor": "fp32",
        },
        {"DRAFTS": 8, "SLOTS": _SLOTS},
    ),
)  # fmt: skip
