"""One step of the drafter: block pass and losses at anchors of text that the target has read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_training.drafter import Anchors, DraftLoss, DraftObjective, draft_loss
from deepinfer_training.evaluation import Model
from deepinfer_training.fake_quant import Numerics


class DraftInputs(NamedTuple):
    """Text, what the frozen target computed on it, and where to draft.

    Attributes:
        ids: [B, T] int64.
        documents: [B, T] int64; a block's context ends where it changes.
        positions: [B, A] int64 anchors, at most T - block size - 1.
        taps: [B, T, taps * D].
        hidden: [B, T, D] after the final norm.
    """

    ids: Tensor
    documents: Tensor
    positions: Tensor
    taps: Tensor
    hidden: Tensor


class DraftLossFunction:
    """Losses of one phase; issues device work only, so that it can be captured."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        target: Model,
        numerics: Numerics,
        objective: DraftObjective,
        longest: int,
    ) -> None:
        """Prepare.

        Args:
            parameters: of the drafter, and the target's embedding and head.
            target: frozen.
            numerics: what is rounded.
            objective: weights of the losses.
            longest: T of inputs at most.
        """
        self._parameters, self._target = parameters, target
        self._numerics, self._objective = numerics, objective
        self._rotation = target.planner.plain_rotation(longest + target.arch.dspark_block_size)

    def __call__(self, inputs: DraftInputs) -> DraftLoss:
        """`total` carries the gradient."""
        ids, positions = inputs.ids, inputs.positions
        size = self._target.arch.dspark_block_size
        at = (positions.unsqueeze(-1) + torch.arange(size, device=ids.device)).flatten(1)
        wide = at.unsqueeze(-1).expand(-1, -1, inputs.hidden.shape[-1])
        logits = self._target.logits(inputs.hidden.gather(1, wide))
        return draft_loss(
            self._parameters, self._target.arch, ids, inputs.taps,
            logits.view(*positions.shape, size, -1),
            Anchors(positions, inputs.documents, self._rotation), self._numerics, self._objective,
        )  # fmt: skip
