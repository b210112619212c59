"""The heap is frozen while an engine runs, and no longer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from deepinfer.engine.frozen_heap import FrozenHeap


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    # Engines of other tests may not have been closed.
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.unfreeze()
    if frozen:
        gc.freeze()


class Ring:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


def test_what_exists_is_left_out_until_the_last_holder_lets_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deepinfer.engine.frozen_heap._num_holders", 0)
    ring = Ring()
    seen = weakref.ref(ring)
    first, second = FrozenHeap(), FrozenHeap()
    del ring
    first.release()
    first.release()
    gc.collect()
    assert seen() is not None
    second.release()
    gc.collect()
    assert seen() is None


def test_later_garbage_is_found_while_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.engine.frozen_heap._num_holders", 0)
    heap = FrozenHeap()
    ring = Ring()
    seen = weakref.ref(ring)
    del ring
    gc.collect()
    assert seen() is None
    heap.release()
