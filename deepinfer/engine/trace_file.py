"""A timeline as a trace that chrome://tracing, Perfetto and `deepinfer timeline plot` read.

One JSON array, one event a line, written as the run goes: a run that is cut short leaves a file
that can be read up to there (readers of this format take an array without its end).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from deepinfer.device.errors import ConfigError
from deepinfer.engine.timeline import DeviceSpan, HostSpan, Phase

PROCESS = 1
HOST_TRACK, DEVICE_TRACK, IDLE_TRACK = 1, 2, 3
TRACK_NAMES = {HOST_TRACK: "host", DEVICE_TRACK: "device", IDLE_TRACK: "device idle"}


class TraceFile:
    """Span sink that writes the trace event format.

    Complete events ("X") with `ts` and `dur` in microseconds from the first span: the host's
    phases, the device's work, its idle gaps; a flow arrow leads from each launch to its forward.
    Instants ("i"): ends of answers, preemptions, flushes.
    """

    def __init__(self, path: Path) -> None:
        """Begin the file.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            self._file: IO[str] = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--timeline {path}: cannot be written ({error.strerror}); name a file in an "
                "existing folder"
            ) from error
        self.path = path
        self._origin_us: float | None = None
        self._file.write("[")
        self._is_first = True
        for track, name in TRACK_NAMES.items():
            self._write(ph="M", name="thread_name", tid=track, args={"name": name})
            self._write(ph="M", name="thread_sort_index", tid=track, args={"sort_index": track})

    def host(self, span: HostSpan) -> None:
        """Write a phase, and for a launch the beginning of its arrow."""
        begin_us = self._since_origin(span.begin_us)
        args = "" if span.step is None else f'"step": {span.step}'
        self._span(span.phase.value, HOST_TRACK, begin_us, span.end_us - span.begin_us, args)
        if span.phase is Phase.LAUNCH:
            self._write(
                ph="s", name="launch", cat="step", id=span.step, tid=HOST_TRACK, ts=begin_us
            )

    def device(self, span: DeviceSpan) -> None:
        """Write a piece of device work, and for a forward the end of its arrow."""
        scheduled = span.scheduled
        begin_us = self._since_origin(span.begin_us)
        args = (
            f'"step": {scheduled.step}, "num_seqs": {len(scheduled.sequences)}, '
            f'"num_rows": {scheduled.num_rows}'
        )
        name = f"{scheduled.kind.value} {span.name}"
        self._span(name, DEVICE_TRACK, begin_us, span.end_us - span.begin_us, args)
        if span.name == "forward":
            self._write(
                ph="f", name="launch", cat="step", id=scheduled.step, bp="e",
                tid=DEVICE_TRACK, ts=begin_us,
            )  # fmt: skip

    def idle(self, begin_us: float, end_us: float) -> None:
        """Write a gap."""
        self._span("idle", IDLE_TRACK, self._since_origin(begin_us), end_us - begin_us, "")

    def mark(self, text: str, time_us: float) -> None:
        """Write an event of the host without a duration."""
        self._write(ph="i", s="t", name=text, tid=HOST_TRACK, ts=self._since_origin(time_us))

    def close(self) -> None:
        """End the array; a second call does nothing."""
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _since_origin(self, time_us: float) -> float:
        if self._origin_us is None:
            self._origin_us = time_us
        return time_us - self._origin_us

    def _span(self, name: str, track: int, begin_us: float, length_us: float, args: str) -> None:
        # Not through json: a dozen a step, and their writing is time of the host that is measured.
        self._put(
            f'{{"pid": {PROCESS}, "ph": "X", "name": "{name}", "tid": {track}, '
            f'"ts": {begin_us:.3f}, "dur": {length_us:.3f}, "args": {{{args}}}}}'
        )

    def _write(self, **event: Any) -> None:  # noqa: ANN401 - fields of the event format
        if "ts" in event:
            event["ts"] = round(event["ts"], 3)
        self._put(json.dumps({"pid": PROCESS} | event))

    def _put(self, text: str) -> None:
        self._file.write(("\n" if self._is_first else ",\n") + text)
        self._is_first = False
