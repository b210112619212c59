"""Contenders that decode in turns, each in a process of its own.

Two OpenMP teams in one process slow each other down, and so do two that run at once: contenders
take turns in blocks of steps, and a noisy machine hits all of them.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import NamedTuple

from torch import Tensor

from benchmarks.decode_contenders import Contender, Prepared

_WARM_STEPS = 4


class Turns(NamedTuple):
    """How contenders are measured.

    Attributes:
        context: tokens of each prompt.
        rounds: blocks of each contender.
        steps: most steps of a block.
        block_s: seconds after which a block begins no further step.
    """

    context: int
    rounds: int
    steps: int
    block_s: float

    @property
    def num_tokens(self) -> int:
        """Most tokens that a sequence decodes."""
        return (self.rounds + 1) * (self.steps + 1) + _WARM_STEPS


Rates = dict[str, float]
"""Milliseconds per token by contender: median over blocks."""


def run_turns(
    contenders: Mapping[str, Contender],
    batches: list[int],
    turns: Turns,
    on_batch: Callable[[int, Rates], None] = lambda batch, rates: None,
) -> dict[int, Rates]:
    """Measure all contenders at all batches.

    Args:
        contenders: by the name shown.
        batches: sequences that decode together.
        turns: how.
        on_batch: hears of each batch's figures at once.
    Raises:
        RuntimeError: a contender failed; its traceback is printed by its process.
    """
    context = get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name, contender in contenders.items():
        pipes[name], theirs = context.Pipe()
        context.Process(target=_serve, args=(contender, turns, theirs), daemon=True).start()
        theirs.close()
    found: dict[int, Rates] = {}
    for batch in batches:
        for pipe in pipes.values():
            pipe.send(batch)
        for name in pipes:
            _receive(pipes, name)
        times: dict[str, list[float]] = {name: [] for name in pipes}
        for turn in range(turns.rounds):
            print(f"\r  batch {batch}, round {turn + 1} of {turns.rounds}", end="",
                  file=sys.stderr, flush=True)  # fmt: skip
            for name, pipe in pipes.items():
                pipe.send(0)
                times[name].append(_receive(pipes, name))
        print(file=sys.stderr)
        found[batch] = {
            name: statistics.median(values) / batch * 1e3 for name, values in times.items()
        }
        on_batch(batch, found[batch])
    for pipe in pipes.values():
        pipe.send(None)
    return found


def _receive(pipes: Mapping[str, Connection], name: str) -> float:
    try:
        seconds: float = pipes[name].recv()
    except EOFError:
        raise RuntimeError(f"{name} ended; its error is printed above") from None
    return seconds


def _serve(contender: Contender, turns: Turns, pipe: Connection) -> None:
    """Child process: a batch prepares, 0 asks for a block and gets seconds per step, None ends."""
    prepared: Prepared | None = None
    while (message := pipe.recv()) is not None:
        if message:
            if prepared is not None:
                prepared.close()
                prepared = None
                gc.collect()  # its memory is free before the next one is made
            prepared = contender.prepare(message, turns.context, turns.num_tokens)
            _block(prepared, _WARM_STEPS, turns.block_s)
            pipe.send(0.0)
        else:
            assert prepared is not None  # the batch came first
            prepared.step()  # wakes threads that went to sleep while the others had their turn
            pipe.send(_block(prepared, turns.steps, turns.block_s))


def _block(prepared: Prepared, most: int, block_s: float) -> float:
    """Seconds per step, until the device has finished the last one."""
    begun, count, last = time.perf_counter(), 0, None
    while count < most and time.perf_counter() - begun < block_s:
        last = prepared.step()
        count += 1
    if isinstance(last, Tensor):
        last.cpu()  # waits for the device; the engine's steps have waited already
    return (time.perf_counter() - begun) / count
