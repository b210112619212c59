"""The pool of KV blocks, and the pool of request slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deepinfer.cache.prefix_index import PrefixIndex
from deepinfer.device.errors import ContractError


class SlotPool:
    """Persistent request slots: window ring, pending rows and penalty counts of one sequence.

    The lowest free number is taken first; which one a sequence gets never changes results.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def allocate(self) -> int:
        """Take a slot.

        Raises:
            ContractError: none is free; callers ask `num_free` first.
        """
        if not self._free:
            raise ContractError(
                f"slot pool: all {self.num_slots} slots are in use; check num_free first"
            )
        slot = self._free.pop()
        self._used.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back.

        Raises:
            ContractError: it is not in use.
        """
        if slot not in self._used:
            raise ContractError(f"slot pool: slot {slot} is released but not in use")
        self._used.remove(slot)
        self._free.append(slot)


class BlockPool:
    """Blocks by number, each with the count of its holders.

        free --allocate--> held --release, last holder--> idle if published, else free
                             ^                              |
                             +----------- hold -------------+---- allocate: evicted

    A block that the prefix index knows stays as it is when its last holder leaves, until a hit
    takes it or its memory is needed. Idle blocks are evicted in the order in which they became
    idle, of one release the last positions first. Whoever holds a block holds all blocks of the
    text before it, too; so a block becomes idle only after those that follow it, and what is left
    of the index is always reachable from position 0.
    """

    def __init__(
        self,
        num_blocks: int,
        index: PrefixIndex | None = None,
        on_evict: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """A pool of free blocks.

        Args:
            num_blocks: blocks.
            index: knows the published ones; None when nothing is ever published.
            on_evict: hears of blocks that are taken from the index, before anybody gets them.
        """
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._index = index if index is not None else PrefixIndex()
        self._on_evict = on_evict or (lambda _: None)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders: dict[int, int] = {}
        self._idle: dict[int, None] = {}  # in the order of eviction

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return len(self._holders)

    @property
    def num_idle(self) -> int:
        """Published blocks that nobody holds."""
        return len(self._idle)

    def count_idle(self, blocks: Sequence[int]) -> int:
        """How many of these are idle: holding them lowers `num_free` by as many."""
        return sum(block in self._idle for block in blocks)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks of undefined content.

        Raises:
            ContractError: fewer can be had; callers ask `num_free` first.
        """
        if count > self.num_free:
            raise ContractError(
                f"block pool: {count} blocks asked for, {len(self._free)} of {self.num_blocks} "
                f"are free and {len(self._idle)} idle; check num_free before allocating"
            )
        if count > len(self._free):
            self._evict(count - len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        """Become one more holder of published blocks.

        Raises:
            ContractError: one of them is neither held nor idle.
        """
        for block in blocks:
            if block in self._idle:
                del self._idle[block]
            elif block not in self._holders:
                raise ContractError(
                    f"block pool: block {block} is to be shared, but nobody holds it and the "
                    "prefix index does not know it; look it up first"
                )
            self._holders[block] = self._holders.get(block, 0) + 1

    def release(self, blocks: Sequence[int]) -> list[int]:
        """Stop holding blocks, which are in the order of their positions.

        Returns:
            Those that are free now: nobody holds them, and no hit can find them.
        Raises:
            ContractError: one of them is not held.
        """
        freed: list[int] = []
        for block in reversed(blocks):
            num_holders = self._holders.get(block, 0)
            if num_holders == 0:
                raise ContractError(f"block pool: block {block} is released but not in use")
            if num_holders > 1:
                self._holders[block] = num_holders - 1
                continue
            del self._holders[block]
            if block in self._index:
                self._idle[block] = None
            else:
                freed.append(block)
        self._free += freed
        return freed

    def forget(self, block: int) -> None:
        """Take a published block out of the index; its holders keep it, without any it is free.

        Raises:
            ContractError: it is not published.
        """
        self._index.remove(block)
        if block in self._idle:
            del self._idle[block]
            self._on_evict([block])
            self._free.append(block)

    def _evict(self, count: int) -> None:
        evicted = [block for block, _ in zip(self._idle, range(count), strict=False)]
        for block in evicted:
            del self._idle[block]
            self._index.remove(block)
        self.num_evicted += count
        self._on_evict(evicted)
        self._free += evicted


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)
