"""Streams and events of the reference runtime: in-order execution in a thread of its own.

Every piece of work gets a ticket, its place in the stream's order. An event is a ticket: it has
happened when that many pieces have finished. Waiting therefore never depends on catching a
signal at the right moment, and since an event exists before anybody can wait for it, waits
between streams cannot form a circle.
"""

from __future__ import annotations

import atexit
import logging
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

import torch

from deepinfer.device.errors import ContractError
from deepinfer.device.runtime import Event

_LOGGER = logging.getLogger(__name__)
_EXIT_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class HoldPolicy:
    """How the adversarial mode holds work back.

    The newest piece of work is always held. What is released is run to its end before the call
    that released it returns, so a seed and a sequence of host calls decide everything.

    Attributes:
        seed: seeds every choice.
        max_held: most pieces that stay held in one stream; at least 1.
        max_queries: most times that `Event.query` says False about held work; at least 1.
    """

    seed: int
    max_held: int
    max_queries: int

    def __post_init__(self) -> None:
        if self.max_held < 1 or self.max_queries < 1:
            raise ContractError(
                f"HoldPolicy: max_held {self.max_held} and max_queries {self.max_queries} must "
                "be at least 1; use the thread mode for work that is not held back"
            )


def host_time_us() -> float:
    """Microseconds of the process's performance counter."""
    return time.perf_counter_ns() / 1000


@dataclass(slots=True)
class EventTime:
    """When a timed event happened; None until it has."""

    time_us: float | None = None


def known_time_us(time: EventTime | None) -> float:
    """The time of an event, or an error that says why there is none."""
    if time is None:
        raise ContractError("time_us of an event recorded without a time; pass timed=True")
    if time.time_us is None:
        raise ContractError("time_us of an event that has not happened; synchronize it first")
    return time.time_us


def even_threads(available: int) -> int:
    """The largest power of two that is not above `available` (at least 1).

    Vendor libraries split products over threads in ways that can show in a row's bits; powers of
    two keep the parts even, and are the counts that the reference's invariance is tested with.
    """
    return 1 << (available.bit_length() - 1)


@contextmanager
def limited_threads() -> Iterator[None]:
    """Run with `even_threads` of the calling thread's intra-op threads."""
    before = torch.get_num_threads()
    wanted = even_threads(before)
    if wanted == before:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(slots=True)
class StreamFailure:
    """What a piece of work raised; shared by all streams that waited for it."""

    error: BaseException
    traceback: TracebackType | None
    is_reported: bool = False

    def reraise(self) -> NoReturn:
        """Raise the work's own exception; its traceback does not grow from call to call."""
        self.is_reported = True
        raise self.error.with_traceback(self.traceback)


class ThreadEvent:
    """A ticket of one stream; stays usable after the stream is closed."""

    def __init__(
        self, executor: _Executor, ticket: int, num_false_answers: int, time: EventTime | None
    ) -> None:
        self._executor = executor
        self._ticket = ticket
        self._num_false_answers = num_false_answers
        self._time = time

    @property
    def time_us(self) -> float:
        """When the work before the event had finished, or when the event was recorded if later."""
        return known_time_us(self._time)

    def query(self) -> bool:
        """True when the work before the event has finished; raises what that work raised.

        Held work (adversarial mode) is run by the query that ends the series of False.
        """
        executor = self._executor
        if executor.is_finished(self._ticket):
            self.synchronize()
            return True
        if not executor.holds or executor.is_own_thread():
            return False
        if self._num_false_answers > 0:
            self._num_false_answers -= 1
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Wait until the work before the event has finished; raises what that work raised."""
        failure = self.settle()
        if failure is not None:
            failure.reraise()

    def settle(self) -> StreamFailure | None:
        """Wait like `synchronize`, but return the failure; for streams that wait."""
        return self._executor.wait(self._ticket)


class _Executor:
    """Queue and thread of one stream; apart from the handle so that the handle can be freed."""

    def __init__(self, name: str, hold: HoldPolicy | None) -> None:
        self.name = name
        self.holds = hold is not None
        self._hold = hold
        # Per stream, so that one stream's calls do not shift another one's choices.
        self._random = random.Random(f"{hold.seed} {name}" if hold else 0)
        self._held_limit = self._random.randint(1, hold.max_held) if hold else 0
        self._changed = threading.Condition()
        self._queue: deque[tuple[Callable[[], None] | ThreadEvent, int]] = deque()
        self._num_enqueued = 0
        self._num_released = 0
        self._num_finished = 0
        self._failure: StreamFailure | None = None
        self._failed_ticket = 0
        self._timed: dict[int, list[EventTime]] = {}
        self._is_closing = False
        self._is_abandoned = False
        self._thread = threading.Thread(
            target=self._run, name=f"deepinfer-stream-{name}", daemon=True
        )
        self._thread.start()
        _OPEN_EXECUTORS.add(self)

    def submit(self, item: Callable[[], None] | ThreadEvent) -> None:
        """Append work, or an event to wait for; raises the stream's failure if it has one."""
        # OpenMP keeps the thread count per thread: without this, work in the stream's thread
        # would miss a later torch.set_num_threads of the caller and split sums differently.
        num_threads = even_threads(torch.get_num_threads())
        with self._changed:
            self._require_open()
            if self._failure is not None:
                self._failure.reraise()
            self._queue.append((item, num_threads))
            self._num_enqueued += 1
            overflow = self._pick_release()
            self._changed.notify_all()
        if overflow and not self.is_own_thread():
            self.wait(overflow)

    def record(self, *, timed: bool) -> ThreadEvent:
        """An event after everything submitted so far."""
        with self._changed:
            self._require_open()
            num_false = self._random.randint(1, self._hold.max_queries) if self._hold else 0
            time = EventTime() if timed else None
            if time is not None and self._num_finished >= self._num_enqueued:
                time.time_us = host_time_us()
            elif time is not None:
                self._timed.setdefault(self._num_enqueued, []).append(time)
            return ThreadEvent(self, self._num_enqueued, num_false, time)

    def is_finished(self, ticket: int) -> bool:
        """True when the first `ticket` pieces have finished or were skipped."""
        with self._changed:
            return self._num_finished >= ticket

    def wait(self, ticket: int) -> StreamFailure | None:
        """Release and await the first `ticket` pieces; the failure if one of them failed."""
        with self._changed:
            if self._num_finished < ticket and self.is_own_thread():
                raise ContractError(
                    f"stream {self.name!r}: its own work waits for piece {ticket}, which cannot "
                    f"start before that work ends ({self._num_finished} finished); wait on the "
                    "host, or order streams with wait_event"
                )
            self._release(ticket)
            self._changed.wait_for(lambda: self._num_finished >= ticket)
            if self._failure is None or self._failed_ticket > ticket:
                return None
            return self._failure

    def wait_all(self) -> StreamFailure | None:
        """`wait` for everything submitted so far; an error once closed."""
        with self._changed:
            self._require_open()
            ticket = self._num_enqueued
        return self.wait(ticket)

    def close(self) -> None:
        """Drain, end the thread, and raise a failure that nobody has seen yet."""
        if self.is_own_thread():
            raise ContractError(f"stream {self.name!r}: closed by its own work; close on the host")
        with self._changed:
            if self._is_closing:
                return
        self.end()
        self._thread.join()
        if self._failure is not None and not self._failure.is_reported:
            self._failure.reraise()

    def abandon(self) -> None:
        """End the thread after the queued work, for a handle that was freed without `close`."""
        with self._changed:
            self._is_abandoned = True
        self.end()

    def end(self) -> None:
        """Accept no more work; what is queued still runs."""
        with self._changed:
            self._is_closing = True
            self._release(self._num_enqueued)
            self._changed.notify_all()

    def join_at_exit(self) -> None:
        """Wait a bounded time for the thread; threads that outlive the interpreter crash it."""
        self.end()
        self._thread.join(_EXIT_WAIT_S)
        if self._thread.is_alive():
            _LOGGER.warning(
                "stream %r still runs work %g s after the program's end; close the runtime first",
                self.name,
                _EXIT_WAIT_S,
            )

    def is_own_thread(self) -> bool:
        """True when called by the stream's work."""
        return threading.current_thread() is self._thread

    def _require_open(self) -> None:
        if self._is_closing:
            raise ContractError(
                f"stream {self.name!r} is closed and takes no calls; create a new runtime"
            )

    def _pick_release(self) -> int:
        """Ticket up to which too many held pieces are to run; 0 for none."""
        if self._hold is None:
            self._num_released = self._num_enqueued
            return 0
        if self._num_enqueued - self._num_released <= self._held_limit:
            return 0
        num_kept = self._random.randint(1, self._held_limit)
        self._held_limit = self._random.randint(1, self._hold.max_held)
        return self._num_enqueued - num_kept

    def _release(self, ticket: int) -> None:
        if ticket > self._num_released:
            self._num_released = ticket
            self._changed.notify_all()

    def _can_go_on(self) -> bool:
        can_start = self._num_finished < self._num_released
        return can_start or (self._is_closing and not self._queue)

    def _run(self) -> None:
        with torch.no_grad():
            while True:
                with self._changed:
                    self._changed.wait_for(self._can_go_on)
                    if not self._queue:
                        break
                    item, num_threads = self._queue.popleft()
                    failure = self._failure
                if failure is None:
                    failure = self._execute(item, num_threads)
                del item  # an idle stream must not keep the tensors of its last work alive
                with self._changed:
                    self._num_finished += 1
                    for time in self._timed.pop(self._num_finished, ()):
                        time.time_us = host_time_us()
                    if self._failure is None and failure is not None:
                        self._failure = failure
                        self._failed_ticket = self._num_finished
                    self._changed.notify_all()
        if self._is_abandoned and self._failure is not None and not self._failure.is_reported:
            _LOGGER.error(
                "stream %r was freed before anybody saw its failure",
                self.name,
                exc_info=self._failure.error,
            )

    def _execute(
        self, item: Callable[[], None] | ThreadEvent, num_threads: int
    ) -> StreamFailure | None:
        # Everything is caught, SystemExit included: an exception that ended this thread would
        # leave all who wait for the stream waiting for ever.
        try:
            if isinstance(item, ThreadEvent):
                return item.settle()
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)
            item()
        except BaseException as error:
            error.add_note(
                f"raised by piece {self._num_finished + 1} of stream {self.name!r}; the later work "
                "of the stream is skipped"
            )
            return StreamFailure(error, error.__traceback__)
        return None


_OPEN_EXECUTORS: weakref.WeakSet[_Executor] = weakref.WeakSet()


@atexit.register
def _join_executors() -> None:
    for executor in list(_OPEN_EXECUTORS):
        executor.join_at_exit()


class ThreadStream:
    """An in-order queue whose work runs in a thread of its own, without gradients.

    The first exception of a piece of work ends the stream's usefulness: later work is skipped,
    and the exception itself is raised by every `enqueue`, by `synchronize`, and by the events
    recorded after that piece. A stream that waits for such an event fails in the same way.
    """

    def __init__(self, name: str, hold: HoldPolicy | None = None) -> None:
        """Start the thread.

        Args:
            name: shows in errors, logs and as the thread's name.
            hold: hold work back in this way; None runs it as soon as possible.
        """
        self.name = name
        self._executor = _Executor(name, hold)
        self._finalizer = weakref.finalize(self, self._executor.abandon)
        # At exit the threads are joined by _join_executors; abandoning them would not wait.
        self._finalizer.atexit = False

    def enqueue(self, work: Callable[[], None]) -> None:
        """Queue `work` and return; in adversarial mode a full queue first runs older work."""
        self._executor.submit(work)

    def record_event(self, *, timed: bool = False) -> ThreadEvent:
        """An event after everything enqueued so far; fails if that work fails."""
        return self._executor.record(timed=timed)

    def wait_event(self, event: Event) -> None:
        """Let later work wait for an event of this or another stream of the runtime.

        Raises:
            ContractError: the event is not one of a threaded stream.
        """
        if not isinstance(event, ThreadEvent):
            raise ContractError(
                f"stream {self.name!r}: wait_event got a {type(event).__name__}; expected an event "
                "recorded by a stream of the same runtime"
            )
        self._executor.submit(event)

    def synchronize(self) -> None:
        """Wait for everything enqueued so far; raises what the work raised."""
        failure = self._executor.wait_all()
        if failure is not None:
            failure.reraise()

    def close(self) -> None:
        """Drain the queue and join the thread; a second call does nothing.

        Raises a failure of the work that no other call has raised before.
        """
        self._executor.close()
        self._finalizer.detach()


class InlineEvent:
    """An event of an inline stream: it has always happened."""

    def __init__(self, time: EventTime | None) -> None:
        self._time = time

    @property
    def time_us(self) -> float:
        """When it was recorded."""
        return known_time_us(self._time)

    def query(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Return at once; the work's exceptions were raised where it was enqueued."""


class InlineStream:
    """Runs work inside `enqueue`, for debuggers; an exception comes out there and then."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._is_closed = False

    def enqueue(self, work: Callable[[], None]) -> None:
        """Run `work` now, without gradients."""
        self._require_open()
        with torch.no_grad(), limited_threads():
            work()

    def record_event(self, *, timed: bool = False) -> InlineEvent:
        """An event that has happened."""
        self._require_open()
        return InlineEvent(EventTime(host_time_us()) if timed else None)

    def wait_event(self, event: Event) -> None:
        """Wait for `event` here; returns at once for events of inline streams."""
        self._require_open()
        event.synchronize()

    def synchronize(self) -> None:
        """Return at once."""
        self._require_open()

    def close(self) -> None:
        """Refuse further calls."""
        self._is_closed = True

    def _require_open(self) -> None:
        if self._is_closed:
            raise ContractError(
                f"stream {self.name!r} is closed and takes no calls; create a new runtime"
            )
