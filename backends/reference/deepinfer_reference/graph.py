"""Graphs of the reference runtime: a CPU has none, so a replay runs the Python code again."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepinfer_reference.streams import limited_threads


class ReferenceGraph:
    """Work that was run once and can be run again.

    A device's graph repeats the launches of its capture; this one repeats the callable. Python
    that looks at host values may therefore act differently in a replay, which code written for
    a device's graph must not rely on.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        """Run `work` once in the calling thread, without gradients, and keep it."""
        self._work = work
        self.replay()

    def replay(self) -> None:
        """Run the work again; call it inside `Stream.enqueue`."""
        with torch.no_grad(), limited_threads():
            self._work()
