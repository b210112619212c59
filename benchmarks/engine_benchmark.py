"""A benchmark of several engines: their turns, its arguments, its end."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from deepinfer.device.errors import DeepInferError
from deepinfer.speculation.metrics import SpeculationMetrics

_Run = TypeVar("_Run")


def in_turns(runs: Sequence[_Run], rounds: int, label: str) -> Iterator[_Run]:
    """Each run once a round, with progress.

    A machine is not the same after an idle and after a busy turn: all orders take turns, too, so
    that within six rounds of three runs each comes after each of the others equally often.
    """
    orders = list(itertools.permutations(runs))
    random.Random(0).shuffle(orders)  # of many runs few orders come
    for number, order in enumerate(itertools.islice(itertools.cycle(orders), rounds)):
        print(f"\r  {label}, round {number + 1}/{rounds}  ", end="", file=sys.stderr, flush=True)
        yield from order
    print(file=sys.stderr)


def positive(text: str) -> int:
    """A whole number from 1, for argparse.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def drafting(metrics: SpeculationMetrics) -> dict[str, Any]:
    """What came of a run's drafts, without the list of its steps."""
    figures = metrics.figures()
    spans: Any = figures["budget"]
    planned = sum(spans["num_planned"]) / max(1, sum(spans["num_steps"]))
    return {**{k: v for k, v in figures.items() if k != "budget"}, "planned_share": planned}


def as_command(main: Callable[[], None]) -> None:
    """Run a benchmark; what the engine refuses is said without a traceback."""
    try:
        main()
    except DeepInferError as error:
        sys.exit(f"{error}")
