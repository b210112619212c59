"""Memory on its way back waits for the last step that was launched with it."""

from __future__ import annotations

from typing import cast

from deepinfer.engine.deferred_release import DeferredRelease
from deepinfer.engine.output_text import OutputText
from deepinfer.engine.request_controls import RequestControls
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.sequence import Request, Sequence

PARAMS = SamplingParams()


def sequence_of_step(last_step: int) -> Sequence:
    request = Request("r", None, [1], PARAMS, RequestControls.of(PARAMS, 9), 0, 0, 0, None)
    return Sequence(request, 0, [1], cast(OutputText, None), max_len=9, last_step=last_step)


def test_what_no_step_used_is_free_at_once() -> None:
    freed: list[tuple[int | None, list[int]]] = []
    queue = DeferredRelease(lambda slot, blocks: freed.append((slot, blocks)))
    queue.defer(sequence_of_step(-1), 3, [7, 8])
    assert freed == [(3, [7, 8])]


def test_memory_waits_for_its_last_step_and_goes_together() -> None:
    freed: list[tuple[int | None, list[int]]] = []
    queue = DeferredRelease(lambda slot, blocks: freed.append((slot, blocks)))
    queue.defer(sequence_of_step(5), 0, [1])
    queue.defer(sequence_of_step(6), 1, [2, 3])
    queue.defer(sequence_of_step(5), 2, [4])
    queue.collected(4)
    assert (freed, queue.num_blocks) == ([], 4)
    queue.collected(5)
    assert (freed, queue.num_blocks) == ([(0, [1]), (2, [4])], 2)
    queue.collected(6)
    assert (freed[2:], queue.num_blocks) == ([(1, [2, 3])], 0)
