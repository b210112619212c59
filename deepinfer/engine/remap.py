"""Which result in flight each sequence of a new step goes on from (ZO-4).

A step is scheduled before the results of the steps before it are known on the host. On the
device they stand in a ring: the last `num_steps` steps, `rows_per_step` rows each. The remap
gives for every sequence of the new step the ring row of its latest result, or `NEWCOMER` when
the host knows its tokens itself: it joined, came back after a preemption, or had nothing in
flight. Ops of the state family follow it (`correct_inputs`), so sequences may end, join and move
between two steps.

A ring row is written again `num_steps` steps later. By then the host has collected the step that
wrote it, and no step scheduled since refers to it: `num_steps` is the steps in flight plus one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepinfer.device.ops.state import NEWCOMER
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.step_state import SchedulerOutputs


@dataclass(frozen=True, slots=True)
class ResultRing:
    """Where results stand on the device until the host has them.

    Attributes:
        num_steps: steps whose results are kept, `async_depth` + 1.
        rows_per_step: sequences that a step may hold.
    """

    num_steps: int
    rows_per_step: int

    @property
    def num_rows(self) -> int:
        """Rows of the ring."""
        return self.num_steps * self.rows_per_step

    def first_row(self, step: int) -> int:
        """Ring row of the first sequence that samples in a step; the others follow in order."""
        return step % self.num_steps * self.rows_per_step


@dataclass(frozen=True, slots=True)
class Remap:
    """Ring row, or NEWCOMER, of each sequence of a step."""

    rows: tuple[int, ...]

    @classmethod
    def between(
        cls, inflight: Iterable[SchedulerOutputs], scheduled: SchedulerOutputs, ring: ResultRing
    ) -> Remap:
        """The remap from the steps in flight, oldest first, to a new step."""
        latest: dict[Sequence, int] = {}
        for step in inflight:
            sampled = [metadata for metadata in step.sequences if metadata.samples]
            first = ring.first_row(step.step)
            # A result from before a preemption is no result of the sequence any more.
            latest.update(
                {metadata.sequence: row for row, metadata in enumerate(sampled, first)
                 if metadata.is_current}
            )  # fmt: skip
        return cls(tuple([latest.get(m.sequence, NEWCOMER) for m in scheduled.sequences]))
