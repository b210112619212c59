"""Where the backbone reports intermediate tensors when somebody looks."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TraceSink(Protocol):
    """Receives named tensors during a forward, on the device and in execution order.

    Names: `layers.N.streams` (entering layer N, before its Engram), `layers.N.expert_ids`,
    `layers.N.expert_weights`, `layers.N.selected_positions` and `layers.N.candidate_blocks`
    (index sources), `engram.N.hash_ids`, `final.streams`, `final.hidden`; of a drafter
    `draft.context`, `draft.N.streams`, `draft.N.expert_ids`, `draft.N.expert_weights` (N the
    stage), `draft.hidden`, `draft.tokens`, `draft.logits`, `draft.confidence_logits`.
    """

    def record(self, name: str, value: Tensor) -> None:
        """Take `value`; its buffer may be reused after the call, so keep a copy."""
        ...
