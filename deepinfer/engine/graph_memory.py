"""Memory that graphs of decode steps may take, and what they took."""

from __future__ import annotations

import logging
from collections.abc import Callable

from deepinfer.device.runtime import Graph, Runtime

_log = logging.getLogger(__name__)
_MIB = 2**20


class GraphMemory:
    """Captures graphs until they have taken what is reserved for them.

    Nothing that a graph has taken comes back before the engine ends, so those that came first
    keep it, and further steps are issued op by op. What a graph takes is what the device has
    less of after its capture; what others on the device take meanwhile counts, too.
    """

    def __init__(self, runtime: Runtime, reserved_bytes: int) -> None:
        """Nothing taken yet.

        Args:
            runtime: captures, and knows its memory.
            reserved_bytes: for all graphs together.
        """
        self._runtime = runtime
        self._reserved_bytes = reserved_bytes
        self._taken_bytes = 0
        self._is_short = False

    @property
    def taken_bytes(self) -> int:
        """What the graphs captured so far took."""
        return self._taken_bytes

    def has_room(self, name: str, num_bytes: int) -> bool:
        """Whether a graph may be captured; the first that may not is warned of.

        Args:
            name: of the graph, for the warning.
            num_bytes: what it will take at least.
        """
        if self._taken_bytes + num_bytes <= self._reserved_bytes:
            return True
        if not self._is_short:
            self._is_short = True
            _log.warning(
                "no memory for the graph of %s: it takes %.1f MiB or more, graphs have taken %.1f "
                "of the %.1f MiB reserved for them; such steps are issued op by op, which is "
                "slower; to leave more, lower cache.memory or scheduler.max_num_seqs",
                name, num_bytes / _MIB, self._taken_bytes / _MIB, self._reserved_bytes / _MIB,
            )  # fmt: skip
        return False

    def capture(self, name: str, work: Callable[[], None]) -> Graph:
        """Capture a graph, measured; see `Runtime.capture`.

        Raises:
            DeviceMemoryError: the device has no memory for it.
        """
        before = self._runtime.memory().free_bytes
        graph = self._runtime.capture(work)
        taken = max(0, before - self._runtime.memory().free_bytes)
        self._taken_bytes += taken
        _log.info(
            "graph of %s: %.1f MiB; graphs have taken %.1f of %.1f MiB", name, taken / _MIB,
            self._taken_bytes / _MIB, self._reserved_bytes / _MIB,
        )  # fmt: skip
        return graph
