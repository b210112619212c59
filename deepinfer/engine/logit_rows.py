"""Which request and position each row of logits stands for; made on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.device.ops.state import RowLayout


class LogitRows(NamedTuple):
    """Rows of logits that decide tokens, request after request; then perhaps padding.

    Attributes:
        owner: [L] int64 sampling request of the row; of padding any.
        offset: [L] int64 index within the request's rows: 0 decides the next token, j the one
            after draft j.
        positions: [L] int64 position of the token that the row decides.
        starts: [N + 1] int64 first row of each request.
        width: most rows of a request, known to the host.
    """

    owner: Tensor
    offset: Tensor
    positions: Tensor
    starts: Tensor
    width: int

    @classmethod
    def verifying(cls, layout: RowLayout, width: int) -> LogitRows:
        """All rows of a decode step, in which every request samples."""
        positions = layout.positions + 1
        return cls(layout.row_seq, layout.row_offset, positions, layout.query_starts, width)

    @classmethod
    def single(cls, positions: Tensor) -> LogitRows:
        """One row for each request, deciding `positions` [N]."""
        count = positions.shape[0]
        starts = torch.arange(count + 1, device=positions.device)
        return cls(starts[:count], torch.zeros_like(positions), positions, starts, 1)

    def of(self, requests: Tensor) -> Tensor:
        """Rows of some requests.

        Args:
            requests: [B] int64.

        Returns:
            [B, width] int64; -1 where a request has fewer rows.
        """
        places = torch.arange(self.width, device=requests.device)
        rows = self.starts.index_select(0, requests).unsqueeze(1) + places
        stops = self.starts.index_select(0, requests + 1).unsqueeze(1)
        return torch.where(rows < stops, rows, -1)

    def before(self, draft_ids: Tensor) -> Tensor:
        """Drafts that stand before each row in this step.

        Args:
            draft_ids: [N, D] int64.

        Returns:
            [L, D] int64; -1 where there is none.
        """
        places = torch.arange(draft_ids.shape[1], device=draft_ids.device)
        own = draft_ids.index_select(0, self.owner)
        return torch.where(places < self.offset.unsqueeze(1), own, -1)
