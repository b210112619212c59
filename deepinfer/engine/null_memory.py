"""The memory of a null device: who wrote which position of a block, and what was poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deepinfer.device.errors import ContractError


class Owner(NamedTuple):
    """An answer of a request, as the device sees it."""

    request_id: str
    answer: int


class _Row(NamedTuple):
    owner: Owner
    position: int
    token_id: int


class NullMemory:
    """KV rows by (block, offset) and window rings by slot; every read is checked.

    A row holds owner, position and token. Reading anything else than what the reader's own past
    must have left there raises: poison, another request's row, a token that was never fed.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows: dict[tuple[int, int], _Row | None] = {}
        self._rings: dict[int, Owner | None] = {}

    def read(
        self, owner: Owner, slot: int, blocks: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """Read positions 0 .. len(token_ids) - 1, which must hold these tokens.

        Raises:
            ContractError: one of them holds something else.
        """
        if token_ids and self._rings.get(slot) != owner:
            raise ContractError(
                f"{_name(owner)} reads window ring {slot}, which {self._ring_state(slot)}"
            )
        for position, token_id in enumerate(token_ids):
            found = self._rows.get(self._place(owner, blocks, position))
            if found != _Row(owner, position, token_id):
                raise ContractError(
                    f"{_name(owner)} reads position {position} of block "
                    f"{blocks[position // self._block_size]}, which should hold token {token_id} "
                    f"and holds {'poison or nothing' if found is None else found}"
                )

    def write(
        self,
        owner: Owner,
        slot: int,
        blocks: Sequence[int],
        first: int,
        token_ids: Sequence[int],
    ) -> None:
        """Write positions from `first` on.

        Raises:
            ContractError: a position has no block.
        """
        self._rings[slot] = owner
        for position, token_id in enumerate(token_ids, start=first):
            self._rows[self._place(owner, blocks, position)] = _Row(owner, position, token_id)

    def poison(self, slot: int, blocks: Sequence[int]) -> None:
        """Overwrite a slot and blocks, now."""
        self._rings[slot] = None
        for block in blocks:
            for offset in range(self._block_size):
                self._rows[block, offset] = None

    def _place(self, owner: Owner, blocks: Sequence[int], position: int) -> tuple[int, int]:
        column, offset = divmod(position, self._block_size)
        if column >= len(blocks) or blocks[column] < 0:
            raise ContractError(
                f"{_name(owner)} needs position {position}, its block table has "
                f"{sum(block >= 0 for block in blocks)} blocks of {self._block_size} tokens; "
                "reserve blocks before the launch"
            )
        return blocks[column], offset

    def _ring_state(self, slot: int) -> str:
        if slot not in self._rings:
            return "was never written"
        owner = self._rings[slot]
        return "is poisoned" if owner is None else f"is {_name(owner)}'s"


def _name(owner: Owner) -> str:
    return f"{owner.request_id}[{owner.answer}]"
