"""Drafts between two steps, by the persistent slot of their sequence; they stay on the device.

A sequence may sit a step out, so its drafts are not kept by step but where its other state is.
Whatever the host knows of them comes with the results of the step that drew them. A prompt's
steps forget what the slot held before, so a new owner never meets the drafts of another, nor a
sequence that was preempted its own old ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.ops.sampling import SampleWork
from deepinfer.model.draft_batch import Drafts


class SlotDrafts:
    """Drafts, their logits and their survival for every slot; written and read in stream order."""

    def __init__(
        self, num_slots: int, max_drafts: int, vocab_size: int, device: torch.device
    ) -> None:
        """No slot has drafts.

        Args:
            num_slots: S persistent slots; slot S is spare, for padding requests.
            max_drafts: D drafts of a sequence.
            vocab_size: V of the logits, which are allocated when a sequence first samples.
            device: where everything lives.
        """
        shape = (num_slots + 1, max_drafts)
        self._ids = torch.full(shape, -1, dtype=torch.int64, device=device)
        self._survival = torch.zeros(shape, device=device)
        self._vocab_size = vocab_size
        self._logits: Tensor | None = None

    @property
    def max_drafts(self) -> int:
        """D."""
        return self._ids.shape[1]

    def ids(self, slots: Tensor) -> Tensor:
        """[n, D] int64 drafts of slots [n] int64; -1 and what follows are none."""
        return self._ids.index_select(0, slots)

    def survival(self, slots: Tensor) -> Tensor:
        """[n, D] fp32 probability that the drafts up to each are accepted; 0: there is none."""
        return self._survival.index_select(0, slots)

    def logits(self, slots: Tensor, work: SampleWork) -> Tensor | None:
        """[n, D, V] fp32 that the drafts were drawn from; None where every draft is certain."""
        if work is SampleWork.GREEDY or self._logits is None:
            return None
        return self._logits.index_select(0, slots)

    def forget(self, slots: Tensor) -> None:
        """Leave slots [n] without drafts."""
        self._ids.index_fill_(0, slots, -1)
        self._survival.index_fill_(0, slots, 0.0)

    def keep(self, slots: Tensor, drafts: Drafts, valid: Tensor, work: SampleWork) -> None:
        """Take the drafts of a pass.

        Args:
            slots: [n] int64, each once but the spare one.
            drafts: of the same sequences.
            valid: [n] bool; others get none.
            work: of the requests; above GREEDY some drafts were drawn at random.
        """
        present = valid.unsqueeze(1)
        survival = torch.cumprod(drafts.confidences, 1)
        self._ids.index_copy_(0, slots, torch.where(present, drafts.tokens, -1))
        self._survival.index_copy_(0, slots, torch.where(present, survival, 0.0))
        if work is SampleWork.GREEDY:
            return
        self.allocate_logits().index_copy_(0, slots, drafts.logits)

    def allocate_logits(self) -> Tensor:
        """[S + 1, D, V] fp32 logits of drafts, made at the first call."""
        if self._logits is None:
            shape = (*self._ids.shape, self._vocab_size)
            self._logits = torch.zeros(shape, device=self._ids.device)
        return self._logits
