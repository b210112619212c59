"""What start-up has made is left out of garbage collections while an engine runs.

A full collection visits every container of the process: about a hundred milliseconds with torch
and the kernels' compiler loaded, and nothing is scheduled meanwhile. What lives as long as the
engine need not be visited; what requests leave behind is, as ever.
"""

from __future__ import annotations

import gc


class FrozenHeap:
    """Held by an engine from the end of its start-up until it is closed.

    An engine is full of reference cycles and keeps weights and caches alive, so one that is done
    with must be found by a collection. Hence garbage is collected before anything is frozen, and
    whoever lets go thaws the heap of the whole process, for other engines as well: they run on,
    with longer collections. An engine that is dropped without being closed stays in memory.
    """

    def __init__(self) -> None:
        """Leave everything that is alive now out of collections."""
        self._is_held = True
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    def release(self) -> None:
        """Let collections find everything again; a second call does nothing."""
        if self._is_held:
            self._is_held = False
            gc.unfreeze()
