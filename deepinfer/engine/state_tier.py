"""The host tier of an engine: what is saved when, and which copies are still on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.cache.host_tier import HostState, HostTier, StateKind, StateName
from deepinfer.cache.prefix_index import PrefixIndex
from deepinfer.device.runtime import Event
from deepinfer.engine.state_copies import SavedWindow, StateCopies


@dataclass(frozen=True, slots=True)
class _Saving:
    """Blocks that are held until their copies have ended."""

    done: Event
    blocks: tuple[int, ...]


class StateTier:
    """Blocks and windows in host memory, filled and used by copies beside the steps.

    A block is saved when it becomes known, and loaded when a hit needs it after its memory on the
    device went to somebody else. Windows are saved where a later prompt is likely to begin.
    """

    def __init__(self, tier: HostTier[HostState], copies: StateCopies) -> None:
        """Nothing saved.

        Args:
            tier: keeps the states.
            copies: of the device.
        """
        self.tier = tier
        self.num_loaded_blocks = self.num_loaded_windows = 0
        self._copies = copies
        self._saving: deque[_Saving] = deque()
        self._loading: dict[int, Event] = {}

    def find_blocks(self, names: Sequence[bytes], index: PrefixIndex) -> tuple[HostState, ...]:
        """Saved states of the first of these names, as far as the device lacks the blocks."""
        found: list[HostState] = []
        for name in names:
            state = self.tier.find(StateName(StateKind.BLOCK, name))
            if state is None or index.block(name) is not None:
                break
            found.append(state)
        return tuple(found)

    def find_window(
        self, names: Sequence[bytes], kinds: Sequence[StateKind]
    ) -> tuple[int, HostState] | None:
        """Saved windows of one of the kinds after the most of these blocks; how many those are."""
        for count in range(len(names), 0, -1):
            for kind in kinds:
                state = self.tier.find(StateName(kind, names[count - 1]))
                if state is not None:
                    return count, state
        return None

    def save_blocks(self, names: Sequence[bytes], blocks: Sequence[int], first: int) -> None:
        """Save known blocks of a sequence from number `first` on.

        Args:
            names: of its known blocks from position 0 on.
            blocks: the blocks; the caller holds them once more, until `take_saved` names them.
            first: the first that may be new here.
        """
        fresh = [
            number
            for number in range(first, len(blocks))
            if StateName(StateKind.BLOCK, names[number]) not in self.tier
        ]
        saved = self._copies.save_blocks([blocks[number] for number in fresh])
        for number, state in zip(fresh, saved.states, strict=True):
            self.tier.put(StateName(StateKind.BLOCK, names[number]), state)
        self.tier.use(names)
        # All blocks before them, too: the end of a text is let go before its beginning.
        self._saving.append(_Saving(saved.done, tuple(blocks)))

    def keep_window(
        self, name: StateName, state: HostState, *, replaced: StateName | None = None
    ) -> None:
        """Keep the windows after a block, in place of earlier ones if those are named."""
        if replaced is not None:
            self.tier.remove(replaced)
        self.tier.put(name, state)

    def load(
        self,
        names: Sequence[bytes],
        blocks: Sequence[tuple[HostState, int]],
        window: SavedWindow | None,
    ) -> Event:
        """Bring states to the device.

        Args:
            names: of all blocks of the hit, for which this is a use.
            blocks: states and the blocks they go to.
            window: windows and where they go, or None.
        """
        done = self._copies.load(blocks, window)
        self._loading.update((block, done) for _, block in blocks)
        self.num_loaded_blocks += len(blocks)
        self.num_loaded_windows += window is not None
        self.tier.use(names)
        return done

    def loads_of(self, blocks: Sequence[int]) -> list[Event]:
        """Loads on their way into these blocks."""
        return [self._loading[block] for block in blocks if block in self._loading]

    @property
    def is_saving(self) -> bool:
        """Whether blocks are held for copies that have not been seen to end."""
        return bool(self._saving)

    def take_saved(self) -> list[tuple[int, ...]]:
        """Held blocks whose copies have ended; the caller lets them go, once for each time."""
        self._loading = {b: done for b, done in self._loading.items() if not done.query()}
        ended: list[tuple[int, ...]] = []
        while self._saving and self._saving[0].done.query():
            ended.append(self._saving.popleft().blocks)
        return ended

    def drain(self) -> None:
        """Wait until no copy is on the way."""
        for saving in self._saving:
            saving.done.synchronize()
        for done in self._loading.values():
            done.synchronize()

    def forget(self, name: bytes) -> None:
        """Forget what belongs to a block."""
        for kind in StateKind:
            self.tier.remove(StateName(kind, name))
