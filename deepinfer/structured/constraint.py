"""What the engine asks of a constraint on a request's output."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Constraint(Protocol):
    """State of one sequence's constraint; moves only when tokens are committed."""

    def mask(self, row: int) -> Tensor | None:
        """[vocab_size] bool on the host: tokens allowed `row` drafts ahead; None: all."""
        ...

    def advance(self, token_id: int) -> None:
        """Take one committed token."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Forget the last `num_tokens` tokens taken."""
        ...
