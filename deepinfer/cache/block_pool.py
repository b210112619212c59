"""The pool of KV blocks and the pool of request slots."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.device.errors import ContractError


class BlockPool:
    """Blocks by number, each held by at most one sequence; lowest free number first out.

    Which numbers a sequence gets never changes results: rows are found through its block table.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks.

        Raises:
            ContractError: fewer are free; callers ask `num_free` first.
        """
        if count > len(self._free):
            raise ContractError(
                f"block pool: {count} blocks asked for, {len(self._free)} of {self.num_blocks} "
                "are free; check num_free before allocating"
            )
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back.

        Raises:
            ContractError: one of them is not in use.
        """
        for block in blocks:
            if block not in self._used:
                raise ContractError(f"block pool: block {block} is released but not in use")
            self._used.remove(block)
            self._free.append(block)


class SlotPool(BlockPool):
    """Persistent request slots: window ring, pending rows and penalty counts of one sequence."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)
