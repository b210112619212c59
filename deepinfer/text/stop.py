"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopStep(NamedTuple):
    """What one piece led to: text that may be shown now, and the stop string found, if any."""

    emit: str
    matched: str | None


class StopMatcher:
    """Holds back text that may be the beginning of a stop string until that is decided.

    The stop string that is complete first ends the text (of several complete at the same
    character, the longest), so the result does not depend on how the text was cut into pieces.
    After a match nothing more is emitted.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_in_output: bool = False) -> None:
        """Begin an answer.

        Args:
            stop_strings: texts, none of them empty; there may be none.
            include_in_output: emit the stop string too.
        """
        self._stop_strings = tuple(stop_strings)
        self._include_in_output = include_in_output
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, None so far."""
        return self._matched

    def push(self, piece: str, *, armed: bool = True) -> StopStep:
        """Take the next piece of text.

        Args:
            piece: text, possibly empty.
            armed: whether a stop string that becomes complete inside this piece counts; False
                while the least number of tokens is not reached.
        """
        if self._matched is not None:
            return StopStep("", self._matched)
        text = self._held + piece
        found = self._first_match(text) if armed else None
        if found is not None:
            start, self._matched = found
            end = start + len(self._matched)
            self._held = ""
            return StopStep(text[: end if self._include_in_output else start], self._matched)
        num_held = self._num_undecided(text)
        self._held = text[len(text) - num_held :]
        return StopStep(text[: len(text) - num_held], None)

    def flush(self) -> str:
        """End the text: what was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None  # end, start, stop string: the smallest wins
        for stop in self._stop_strings:
            # What ends inside the held text was judged when that text came.
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start, stop) < best):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _num_undecided(self, text: str) -> int:
        """Length of the longest end of the text that is a true beginning of a stop string."""
        return max(
            (
                length
                for stop in self._stop_strings
                for length in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:length])
            ),
            default=0,
        )
