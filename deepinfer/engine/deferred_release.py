"""Memory of sequences that run no more, held back while the device may still use it (ZO-7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _Held:
    """What a sequence held; the sequence too, since launched steps refer to it."""

    sequence: Sequence
    last_step: int
    slot: int | None
    blocks: list[int]


class DeferredRelease:
    """Queue of slots and blocks on their way back to the pools.

    Nothing is given back before the last step that was launched with it has been collected.
    Collecting waits for the event that follows the step's copies to the host, and the device
    works in order, so by then nothing on the device reads the memory any more.
    """

    def __init__(self, give_back: Callable[[int | None, list[int]], None]) -> None:
        """An empty queue.

        Args:
            give_back: called with slot and blocks when the device needs them no more.
        """
        self._give_back = give_back
        self._held: list[_Held] = []
        self._collected_step = -1

    @property
    def collected_step(self) -> int:
        """The last step whose results the host has; -1 before the first."""
        return self._collected_step

    @property
    def num_blocks(self) -> int:
        """Blocks in the queue."""
        return sum(len(held.blocks) for held in self._held)

    def defer(self, sequence: Sequence, slot: int | None, blocks: list[int]) -> None:
        """Queue a sequence's memory; given back at once if no launched step refers to it.

        Args:
            sequence: whose it was.
            slot: its slot, or None when it keeps that.
            blocks: in the order of their positions.
        """
        self._held.append(_Held(sequence, sequence.last_step, slot, blocks))
        self._let_go()

    def collected(self, step: int) -> None:
        """Hear that a step has been collected; gives back what waited for it, all together."""
        self._collected_step = step
        self._let_go()

    def _is_free(self, held: _Held) -> bool:
        return held.last_step <= self._collected_step

    def _let_go(self) -> None:
        free = [held for held in self._held if self._is_free(held)]
        self._held = [held for held in self._held if not self._is_free(held)]
        for held in free:
            self._give_back(held.slot, held.blocks)
