"""What a step needs of every running sequence and what seldom changes, by slot.

A decode step needs the blocks of hundreds of sequences, and nearly all are those of the step
before. Converting the lists anew would cost the host more with every token of context. So they
stand in arrays; a step refreshes the rows of sequences that got other blocks, and gathers its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer.engine.step_state import SequenceMetadata

_FIRST_WIDTH = 16


class SlotRows(NamedTuple):
    """Rows of a step's sequences, in their order; new tensors.

    Attributes:
        seq_slots: [R] int64.
        block_table: [R, most blocks of a sequence] int64, -1 behind a sequence's own.
        limits: [R] int64 most positions of each sequence that may ever be computed.
        draft_floors: [R] int64 first position whose rows have left the last layer.
    """

    seq_slots: Tensor
    block_table: Tensor
    limits: Tensor
    draft_floors: Tensor


class SlotTable:
    """Rows of the sequences that hold slots; those of other slots mean nothing."""

    def __init__(self, num_slots: int, num_layers: int) -> None:
        """Nobody holds a slot.

        Args:
            num_slots: slots.
            num_layers: of the model.
        """
        self._num_layers = num_layers
        self._blocks = np.full((num_slots, _FIRST_WIDTH), -1, dtype=np.int64)
        self._num_blocks = np.zeros(num_slots, dtype=np.int64)
        self._limits = np.zeros(num_slots, dtype=np.int64)
        self._draft_floors = np.zeros(num_slots, dtype=np.int64)

    def rows(self, sequences: tuple[SequenceMetadata, ...]) -> SlotRows:
        """Rows of the sequences of a step, refreshed where their blocks have changed."""
        for metadata in sequences:
            if metadata.sequence.has_new_blocks:
                self._refresh(metadata)
        slots = np.array([metadata.slot for metadata in sequences], dtype=np.int64)
        width = int(self._num_blocks[slots].max())
        return SlotRows(
            torch.from_numpy(slots),
            torch.from_numpy(self._blocks[slots, :width]),
            torch.from_numpy(self._limits[slots]),
            torch.from_numpy(self._draft_floors[slots]),
        )

    def _refresh(self, metadata: SequenceMetadata) -> None:
        sequence, slot = metadata.sequence, metadata.slot
        count = len(sequence.blocks)
        if count > self._blocks.shape[1]:
            wider = np.full((len(self._blocks), 2 * count), -1, dtype=np.int64)
            wider[:, : self._blocks.shape[1]] = self._blocks
            self._blocks = wider
        self._blocks[slot, :count] = sequence.blocks
        self._blocks[slot, count:] = -1
        self._num_blocks[slot] = count
        # The last token of a sequence is never fed, so its position is never computed.
        self._limits[slot] = sequence.max_len - 1
        self._draft_floors[slot] = sequence.draft_floor(self._num_layers)
        sequence.has_new_blocks = False
