"""What start-up has made is left out of garbage collections while an engine runs.

A full collection visits every container of the process: about a hundred milliseconds with torch
and the kernels' compiler loaded, and nothing is scheduled meanwhile. What lives as long as the
engine need not be visited; what requests leave behind is, as ever.
"""

from __future__ import annotations

import gc

_num_holders = 0


class FrozenHeap:
    """Held by an engine from the end of its start-up until it is closed.

    The heap is the process's: it thaws when nobody holds it any more, and what became garbage
    meanwhile is found then.
    """

    def __init__(self) -> None:
        """Leave everything that exists now out of collections."""
        global _num_holders
        _num_holders += 1
        self._is_held = True
        gc.freeze()

    def release(self) -> None:
        """Hold it no more; a second call does nothing."""
        global _num_holders
        if not self._is_held:
            return
        self._is_held = False
        _num_holders -= 1
        if _num_holders == 0:
            gc.unfreeze()
