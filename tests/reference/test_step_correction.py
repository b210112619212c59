"""The correction of a step on the reference, from the remap to what every row attends to."""

from __future__ import annotations

import pytest
import torch

from deepinfer.device.numerics import Numerics
from deepinfer.device.ops import state
from deepinfer.device.ops.state import StepInputs, StepResults
from deepinfer.device.runtime import StepKind
from deepinfer_reference.backend import build_op_table

CACHED, MAX_DRAFTS, WINDOW, RING = 1000, 3, 8, 24


@pytest.mark.parametrize("accepted", range(MAX_DRAFTS + 1))
def test_zo_5_published_example(accepted: int) -> None:
    """1,000 tokens cached, 0 to 3 drafts accepted: the next step attends over the right range."""
    ops = build_op_table(Numerics.EXACT)
    # The first verification: the token at position 1,000 and three drafts.
    first = StepInputs(
        torch.tensor([10, 11, 12, 13]),
        torch.tensor([1 + MAX_DRAFTS]),
        torch.tensor([CACHED]),
        torch.tensor([[7, 8, 9]]),
    )
    num_accepted = torch.tensor([accepted])
    after = ops[state.next_inputs](first, torch.tensor([0]), num_accepted, kind=StepKind.DECODE)
    newest = 90
    results = StepResults(
        torch.tensor([[11, 12, 13][:accepted] + [newest] + [0] * (MAX_DRAFTS - accepted)]),
        num_accepted,
        after.context_lens,
        after.history,
    )
    drafts = torch.tensor([[91, 92, 93]])
    # The second one was built when the host knew 1,000 positions and bounds for the rest.
    host = StepInputs(
        torch.zeros(1 + MAX_DRAFTS, dtype=torch.int64),
        torch.tensor([1 + MAX_DRAFTS]),
        torch.tensor([CACHED + 1 + MAX_DRAFTS]),
        torch.full((1, 3), -1),
    )
    limits, remap = torch.tensor([5000]), torch.tensor([0])
    true = ops[state.correct_inputs](host, drafts, limits, remap, results)

    context = CACHED + 1 + accepted
    assert true.context_lens.tolist() == [context]
    assert true.input_ids.tolist() == [newest, 91, 92, 93]
    assert true.history.tolist() == [[7, 8, 9, 10, 11, 12, 13][accepted + 1 : accepted + 4]]
    rows = ops[state.row_layout](true.query_lens, true.context_lens, 1 + MAX_DRAFTS)
    positions = [context + offset for offset in range(1 + MAX_DRAFTS)]
    assert rows.positions.tolist() == positions
    slot = torch.tensor([0])
    plan = ops[state.window_plan](
        rows, true.query_lens, true.context_lens, slot, slot,
        kind=StepKind.DECODE, window=WINDOW, ring=RING,
    )  # fmt: skip
    for row, position in enumerate(positions):
        assert int(plan.write[row]) == position % RING
        keys = range(position - WINDOW + 1, position + 1)
        assert plan.read[row].tolist() == [key % RING for key in keys]
    compressed = ops[state.compress_plan](
        rows, true.query_lens, slot, torch.arange(40).view(1, 40),
        ratio=1, block_size=64, pending_ring=8,
    )  # fmt: skip
    # Every position up to its own, and none of a refused draft beyond it.
    assert compressed.visible.tolist() == [position + 1 for position in positions]
    assert compressed.slots.tolist() == positions
