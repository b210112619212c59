"""What travels from layer to layer; row-gatherable, so that any layer can be called alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerState:
    """State between two layers; dimension 0 of every tensor is the row.

    Attributes:
        streams: [T, M, D] residual streams, activation dtype.
        pre: [T, M] fp32, collapses the streams for the next sublayer.
        entries: [T, topk] int64 selected entries of the latest index source, or None.
        slots: [T, topk] int64 cache rows of these entries, or None.
        candidates: [T, B] int64 candidate blocks, or None before the candidate source.
        taps: [T, D] stream means at the draft taps passed so far, when a drafter wants them.
    """

    streams: Tensor
    pre: Tensor
    entries: Tensor | None = None
    slots: Tensor | None = None
    candidates: Tensor | None = None
    taps: tuple[Tensor, ...] = ()

    def gather(self, rows: Tensor) -> LayerState:
        """The state of some rows.

        Args:
            rows: [n] int64 row indices.
        """

        def pick(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.index_select(0, rows)

        return LayerState(
            self.streams.index_select(0, rows),
            self.pre.index_select(0, rows),
            pick(self.entries),
            pick(self.slots),
            pick(self.candidates),
            tuple(tap.index_select(0, rows) for tap in self.taps),
        )


def initial_state(embedded: Tensor, num_streams: int) -> LayerState:
    """Every stream starts as the embedding [T, D]; `pre` is one-hot on stream 0."""
    streams = embedded.unsqueeze(1).expand(-1, num_streams, -1).contiguous()
    pre = torch.zeros((embedded.shape[0], num_streams), device=embedded.device)
    pre[:, 0] = 1.0
    return LayerState(streams, pre)
