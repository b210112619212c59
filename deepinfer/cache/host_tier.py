"""State in host memory below the device's pool: blocks, and windows at the end of a block."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar


class StateKind(enum.Enum):
    """What an entry holds: the rows of one block, or windows as they are after it.

    WINDOW is good for every layer, ENCODER_WINDOW up to the last KV source: what a prompt leaves
    whose later layers have not begun.
    """

    BLOCK = "block"
    WINDOW = "window"
    ENCODER_WINDOW = "encoder_window"


class StateName(NamedTuple):
    """Name of an entry: `text` is the name of the block that it belongs to."""

    kind: StateKind
    text: bytes


class HostState(Protocol):
    """Saved bytes of a device."""

    @property
    def num_bytes(self) -> int: ...


_State = TypeVar("_State", bound=HostState)


@dataclass(slots=True)
class TierStats:
    """Entries since the engine began.

    Attributes:
        num_saved: put into the tier.
        num_evicted: forgotten for their memory.
    """

    num_saved: int = 0
    num_evicted: int = 0


class HostTier(Generic[_State]):
    """Saved state by name, the least recently used evicted first, limited by bytes.

    Names of blocks come in chains from position 0 on. A chain is used as a whole: its last block
    counts as used before the others, so that what is evicted first is an end, never a beginning.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """An empty tier.

        Args:
            capacity_bytes: most bytes of all entries together.
        """
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self.stats = TierStats()
        self._entries: OrderedDict[StateName, _State] = OrderedDict()  # oldest use first

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: StateName) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[StateName]:
        """Names, the least recently used first."""
        return iter(self._entries)

    def find(self, name: StateName) -> _State | None:
        """The entry of that name, or None; looking is no use."""
        return self._entries.get(name)

    def put(self, name: StateName, state: _State) -> None:
        """Take an entry in as the one used last; an older one of that name is replaced.

        An entry above the tier's capacity is not kept.
        """
        self.remove(name)
        if state.num_bytes > self.capacity_bytes:
            return
        while self.num_bytes + state.num_bytes > self.capacity_bytes:
            self._drop(next(iter(self._entries)))
            self.stats.num_evicted += 1
        self._entries[name] = state
        self.num_bytes += state.num_bytes
        self.stats.num_saved += 1

    def use(self, chain: Iterable[bytes]) -> None:
        """Count the blocks of a chain as used now; names that are not here are skipped."""
        for text in reversed(list(chain)):
            name = StateName(StateKind.BLOCK, text)
            if name in self._entries:
                self._entries.move_to_end(name)

    def remove(self, name: StateName) -> None:
        """Forget an entry, if it is here."""
        if name in self._entries:
            self._drop(name)

    def _drop(self, name: StateName) -> None:
        self.num_bytes -= self._entries.pop(name).num_bytes
