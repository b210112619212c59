"""The heap is frozen while an engine runs, and keeps no garbage of those before it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from deepinfer.engine.frozen_heap import FrozenHeap


@pytest.fixture(autouse=True)
def _thawed_afterwards() -> Iterator[None]:
    yield
    gc.unfreeze()


class Ring:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_alive_is_left_out_until_it_is_released() -> None:
    ring = Ring()
    seen = weakref.ref(ring)
    heap = FrozenHeap()
    del ring
    gc.collect()
    assert seen() is not None
    heap.release()
    gc.collect()
    assert seen() is None


def test_a_second_release_thaws_nobody_elses_heap() -> None:
    first = FrozenHeap()
    first.release()
    second = FrozenHeap()
    first.release()
    assert gc.get_freeze_count() > 0
    second.release()
    assert gc.get_freeze_count() == 0


def test_garbage_from_before_is_not_frozen() -> None:
    ring = Ring()
    seen = weakref.ref(ring)
    del ring
    heap = FrozenHeap()
    assert seen() is None
    heap.release()


def test_an_engine_that_is_done_with_goes_while_another_runs() -> None:
    ring = Ring()
    seen = weakref.ref(ring)
    first, second = FrozenHeap(), FrozenHeap()
    first.release()
    del ring
    gc.collect()
    assert seen() is None
    second.release()


def test_later_garbage_is_found_while_it_is_held() -> None:
    heap = FrozenHeap()
    ring = Ring()
    seen = weakref.ref(ring)
    del ring
    gc.collect()
    assert seen() is None
    heap.release()
