"""Selections that are not the model's: stand-ins for `index_select` in measuring runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.device.handles import RowCache
from deepinfer.device.op import OpTable
from deepinfer.device.ops.indexer import IndexPlan, Selection, select_topk
from deepinfer.device.ops.sampling import Purpose, philox_uniform
from deepinfer.model.controls import Selections

IndexSelect = Callable[..., Selection]


def control_select(table: OpTable, selections: Selections, layer: int) -> IndexSelect:
    """A function that is called like `index_select` and scores nothing.

    RANDOM chooses evenly among the visible entries, by a number that depends on the layer, the
    position and the entry alone, so that batching and chunking change no choice.

    Args:
        table: ops of the backend.
        selections: NONE or RANDOM.
        layer: the index source.
    """
    uniform, topk = table[philox_uniform], table[select_topk]

    def select(
        q: Tensor,
        head_weights: Tensor,
        positions: Tensor,
        rope_table: Tensor,
        cache: RowCache,
        candidates: Tensor | None,
        *,
        plan: IndexPlan,
    ) -> Selection:
        if selections is Selections.NONE:
            return Selection(positions.new_full((positions.shape[0], plan.topk), -1), None)
        seeds = torch.full_like(positions, layer)
        scores = uniform(
            seeds, torch.zeros_like(positions), positions, Purpose.SAMPLE, plan.max_visible
        )
        entry = torch.arange(plan.max_visible, device=positions.device)
        hidden = entry >= plan.visible.unsqueeze(1)
        return Selection(
            topk(scores.masked_fill(hidden, -torch.inf), plan.visible, plan.topk), None
        )

    return select
