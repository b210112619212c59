"""When newcomers wait for company before they are prefilled.

A step is PREFILL or DECODE. In a full batch somebody ends every few steps, and a prefill step for
each place that becomes free would stop everybody's decoding for one prompt. So once there was no
room, newcomers wait until a share of those running has ended, or for a number of steps.
"""

from __future__ import annotations

_LEAST_CROWD, _SHARE = 16, 8


class PrefillHold:
    """Remembers when there was no room; the scheduler asks it before it admits."""

    def __init__(
        self, wait_steps: int, *, least_crowd: int = _LEAST_CROWD, share: int = _SHARE
    ) -> None:
        """Begin without a hold.

        Args:
            wait_steps: steps that newcomers wait at most; 0: they never do.
            least_crowd: running sequences from which on places of one or two do not count.
            share: a hold ends when one of so many running sequences has left.
        """
        self._wait_steps, self._least_crowd, self._share = wait_steps, least_crowd, share
        self._since = self._few_enough = 0
        self._head: object = None  # who did not fit; None: there is no hold

    def begin(self, step: int, num_running: int, head: object) -> None:
        """Hear that before `step` there was no room for the next in line.

        Args:
            step: number of the next step.
            num_running: sequences that hold memory, those that have just ended among them.
            head: the next in line.
        """
        if num_running >= self._least_crowd and self._wait_steps:
            self._since, self._head = step, head
            self._few_enough = num_running - max(1, num_running // self._share)

    def is_on(self, step: int, num_running: int, head: object) -> bool:
        """Whether newcomers wait in `step`; somebody else at the head of the line does not.

        Args:
            step: number of the next step.
            num_running: sequences that run.
            head: the next in line.
        """
        is_over = num_running <= self._few_enough or step - self._since >= self._wait_steps
        if is_over or head is not self._head:
            self._head = None
        return self._head is not None
