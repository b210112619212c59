"""The null device: no math, made-up step times, a virtual clock, scripted outcomes.

For tests of scheduling. Time passes only when a test says so: `VirtualClock.advance` is the
host working, `Event.synchronize` is the host waiting. A stream is a line in time: work starts
when it is enqueued or when the stream is free, whichever is later, and takes what it was said
to cost. Its callable runs when the clock passes its end, so that late results are really late.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.device.errors import ContractError
from deepinfer.device.runtime import Event, MemoryFacts, StepKind

MAX_ACCEPTED = 5
"""Most drafts that a script may accept in one step."""

_DEFAULT_MEMORY = MemoryFacts(total_bytes=1 << 30, free_bytes=1 << 30)


class VirtualClock:
    """Time in microseconds, and the completions that wait for it."""

    def __init__(self) -> None:
        self._now_us = 0.0
        self._completions: list[tuple[float, int, Callable[[], None]]] = []
        self._num_scheduled = 0
        self._is_moving = False

    @property
    def now_us(self) -> float:
        """The time; inside a completion, the time of its end."""
        return self._now_us

    def advance(self, duration_us: float) -> None:
        """Let the host work for `duration_us`; completions on the way run in time's order.

        Raises:
            ContractError: the duration is negative, or a completion moves the clock.
        """
        if duration_us < 0:
            raise ContractError(f"VirtualClock.advance: {duration_us} us is negative")
        self.advance_to(self._now_us + duration_us)

    def advance_to(self, time_us: float) -> None:
        """Move to `time_us`; a time that has passed changes nothing."""
        if self._is_moving:
            raise ContractError(
                "VirtualClock: work of a stream moved the clock or waited for an event; only the "
                "host may, outside `enqueue`"
            )
        self._is_moving = True
        try:
            while self._completions and self._completions[0][0] <= max(time_us, self._now_us):
                end_us, _, complete = heapq.heappop(self._completions)
                self._now_us = max(self._now_us, end_us)
                complete()
            self._now_us = max(self._now_us, time_us)
        finally:
            self._is_moving = False

    def complete_at(self, time_us: float, complete: Callable[[], None]) -> None:
        """Run `complete` when the clock passes `time_us`, after all that was put there before."""
        heapq.heappush(self._completions, (time_us, self._num_scheduled, complete))
        self._num_scheduled += 1
        if not self._is_moving:
            self.advance_to(self._now_us)  # work without cost on a free stream is done already


@dataclass(frozen=True, slots=True)
class NullAccounting:
    """How the compute stream and the host spent virtual time.

    Attributes:
        device_busy_us: sum of the costs of the enqueued work.
        device_idle_us: sum of the gaps between one piece's end and the next one's start; the
            time before the first and after the last piece is nobody's fault and not counted.
        host_wait_us: time that the host spent in `synchronize`, on any stream.
    """

    device_busy_us: float
    device_idle_us: float
    host_wait_us: float

    @property
    def idle_share(self) -> float:
        """idle / (busy + idle); 0 when nothing has run."""
        span_us = self.device_busy_us + self.device_idle_us
        return self.device_idle_us / span_us if span_us else 0.0


class NullEvent:
    """A point in a null stream; its time is known when it is recorded."""

    def __init__(self, stream: NullStream, time_us: float, ticket: int) -> None:
        self._stream = stream
        self._ticket = ticket
        self._time_us = time_us

    @property
    def time_us(self) -> float:
        """Its time, known from the beginning."""
        return self._time_us

    def query(self) -> bool:
        """True when the virtual clock has reached the event; raises what the work raised."""
        if not self._stream.has_finished(self._ticket):
            return False
        self.check()
        return True

    def synchronize(self) -> None:
        """Move the clock to the event, count the wait, and raise what the work raised."""
        self._stream.wait_until(self.time_us)
        self.check()

    def check(self) -> None:
        """Raise what the work before the event has raised so far."""
        self._stream.raise_failure(self._ticket)


class NullStream:
    """A line in virtual time on which work has a place and a cost.

    An exception of a piece of work fails the stream as on a real runtime: later work is
    skipped, and the exception is raised by later calls and by the events after the piece.
    """

    def __init__(self, name: str, runtime: NullRuntime) -> None:
        self.name = name
        self._runtime = runtime
        self._free_us = 0.0
        self._busy_end_us: float | None = None
        self._busy_us = 0.0
        self._idle_us = 0.0
        self._num_enqueued = 0
        self._num_finished = 0
        self._failure: Exception | None = None
        self._failed_ticket = 0
        self._is_failure_reported = False

    @property
    def busy_us(self) -> float:
        """Sum of the costs of the enqueued work."""
        return self._busy_us

    @property
    def idle_us(self) -> float:
        """Sum of the gaps between pieces of work that cost time."""
        return self._idle_us

    def enqueue(self, work: Callable[[], None]) -> None:
        """Give `work` its place in time; it costs what `NullRuntime.step_cost` says."""
        self._runtime.require_open(f"stream {self.name!r}: enqueue")
        self.raise_failure(self._num_enqueued)
        cost_us = self._runtime.current_cost_us
        start_us = max(self._runtime.clock.now_us, self._free_us)
        self._free_us = start_us + cost_us
        if cost_us > 0:
            if self._busy_end_us is not None:
                self._idle_us += start_us - self._busy_end_us
            self._busy_us += cost_us
            self._busy_end_us = self._free_us
        self._num_enqueued += 1
        self._runtime.clock.complete_at(self._free_us, lambda: self._complete(work))

    def record_event(self, *, timed: bool = False) -> NullEvent:
        """An event at the time when everything enqueued so far has ended, or now if that is past.

        Virtual time is always known, so `timed` changes nothing.
        """
        self._runtime.require_open(f"stream {self.name!r}: record_event")
        time_us = max(self._runtime.clock.now_us, self._free_us)
        return NullEvent(self, time_us, self._num_enqueued)

    def wait_event(self, event: Event) -> None:
        """Start later work at the event's time or after it.

        Raises:
            ContractError: the event is not one of a null stream.
        """
        self._runtime.require_open(f"stream {self.name!r}: wait_event")
        if not isinstance(event, NullEvent):
            raise ContractError(
                f"stream {self.name!r}: wait_event got a {type(event).__name__}; expected an event "
                "recorded by a stream of the same null runtime"
            )
        self._free_us = max(self._free_us, event.time_us)
        # In the queue, not now: the waited-for work may fail only later.
        self._num_enqueued += 1
        self._runtime.clock.complete_at(self._free_us, lambda: self._complete(event.check))

    def synchronize(self) -> None:
        """Move the clock to the end of everything enqueued; raises what the work raised."""
        self._runtime.require_open(f"stream {self.name!r}: synchronize")
        self.wait_until(self._free_us)
        self.raise_failure(self._num_enqueued)

    def wait_until(self, time_us: float) -> None:
        """Let the host wait for a time of this stream; the wait is counted."""
        self._runtime.wait_until(time_us)

    def has_finished(self, ticket: int) -> bool:
        """True when the first `ticket` pieces have ended."""
        return self._num_finished >= ticket

    def raise_failure(self, ticket: int) -> None:
        """Raise the work's exception if one of the first `ticket` pieces has raised."""
        if self._failure is not None and self._failed_ticket <= ticket:
            self._is_failure_reported = True
            raise self._failure

    def raise_unreported(self) -> None:
        """Raise the work's exception if no call has raised it yet; for the end of the runtime."""
        if not self._is_failure_reported:
            self.raise_failure(self._num_enqueued)

    def reset_accounting(self) -> None:
        """Forget busy and idle time; the next gap is counted from the next piece of work."""
        self._busy_us = 0.0
        self._idle_us = 0.0
        self._busy_end_us = None

    def _complete(self, work: Callable[[], None]) -> None:
        if self._failure is None:
            try:
                with torch.no_grad():
                    work()
            except Exception as error:  # it belongs to the stream, not to who moves the clock
                error.add_note(
                    f"raised by piece {self._num_finished + 1} of null stream {self.name!r}"
                )
                self._failure = error
                self._failed_ticket = self._num_finished + 1
        self._num_finished += 1


@dataclass(frozen=True, slots=True)
class NullGraph:
    """Captured work of the null device: the callable."""

    work: Callable[[], None]

    def replay(self) -> None:
        """Run the work; call it inside `Stream.enqueue`, which gives it its cost."""
        self.work()


class NullGroup:
    """The group of one rank."""

    rank = 0
    size = 1

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """`values` itself."""
        return values

    def all_gather(self, values: Tensor) -> Tensor:
        """[1, ...] view of `values`."""
        return values.unsqueeze(0)

    def all_to_all(self, values: Tensor) -> Tensor:
        """`values` [1, ...] itself."""
        if values.dim() == 0 or values.shape[0] != self.size:
            raise ContractError(
                f"all_to_all: values have shape {list(values.shape)}, expected [1, ...] with one "
                "entry for each rank of the group"
            )
        return values

    def barrier(self) -> None:
        """Return at once."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Made-up device time of a step: a fixed part by kind and a part for each row, in us."""

    fixed_us: Mapping[StepKind, float] = field(
        default_factory=lambda: {
            StepKind.PREFILL: 2000.0,
            StepKind.DECODE: 1000.0,
            StepKind.EMPTY: 100.0,
        }
    )
    row_us: float = 1.0

    def step_cost_us(self, kind: StepKind, num_rows: int) -> float:
        """Cost of a step with `num_rows` rows."""
        return self.fixed_us[kind] + num_rows * self.row_us


class NullRuntime:
    """Runtime without a device; tensors are on the CPU so that tests can look into them."""

    def __init__(
        self,
        costs: StepCosts | None = None,
        *,
        memory: MemoryFacts = _DEFAULT_MEMORY,
        poisons_released: bool = False,
    ) -> None:
        """Start at time 0 with nothing enqueued.

        Args:
            costs: device time of the steps; None takes the defaults of `StepCosts`.
            memory: what `memory()` answers.
            poisons_released: what the property of that name answers.
        """
        self.clock = VirtualClock()
        self.costs = costs if costs is not None else StepCosts()
        self._memory = memory
        self._poisons_released = poisons_released
        self._current_cost_us = 0.0
        self._host_wait_us = 0.0
        self._is_closed = False
        self._group = NullGroup()
        self._streams: list[NullStream] = []
        self._compute_stream = self.new_stream("compute")
        self._copy_stream = self.new_stream("copy")

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def compute_stream(self) -> NullStream:
        """The stream whose busy and idle time `accounting` tells."""
        return self._compute_stream

    @property
    def copy_stream(self) -> NullStream:
        """A second line in time."""
        return self._copy_stream

    @property
    def device_group(self) -> NullGroup:
        """The group of one."""
        return self._group

    @property
    def cpu_group(self) -> NullGroup:
        """The group of one."""
        return self._group

    @property
    def poisons_released(self) -> bool:
        """What the constructor was told."""
        return self._poisons_released

    @property
    def current_cost_us(self) -> float:
        """What a piece of work enqueued now costs: 0 outside `step_cost`."""
        return self._current_cost_us

    @contextmanager
    def step_cost(self, cost_us: float) -> Iterator[None]:
        """Within the block, every enqueued piece of work costs `cost_us`.

        A step that enqueues several pieces puts the block around the one that takes the time.
        """
        if cost_us < 0:
            raise ContractError(f"step_cost: {cost_us} us is negative")
        outer_us = self._current_cost_us
        self._current_cost_us = cost_us
        try:
            yield
        finally:
            self._current_cost_us = outer_us

    def step(self, kind: StepKind, num_rows: int) -> AbstractContextManager[None]:
        """`step_cost` with what the runtime's `costs` say of such a step."""
        return self.step_cost(self.costs.step_cost_us(kind, num_rows))

    def accounting(self) -> NullAccounting:
        """Busy, idle and wait times since the start or the last reset."""
        return NullAccounting(
            self._compute_stream.busy_us, self._compute_stream.idle_us, self._host_wait_us
        )

    def reset_accounting(self) -> None:
        """Begin the accounting anew, for example after a warm-up."""
        self._host_wait_us = 0.0
        for stream in self._streams:
            stream.reset_accounting()

    def wait_until(self, time_us: float) -> None:
        """Let the host wait until `time_us` and count the wait."""
        wait_us = max(0.0, time_us - self.clock.now_us)
        self.clock.advance_to(time_us)
        self._host_wait_us += wait_us

    def now_us(self) -> float:
        """The virtual time."""
        return self.clock.now_us

    def new_stream(self, name: str) -> NullStream:
        """A further line in time."""
        self.require_open("new_stream")
        stream = NullStream(name, self)
        self._streams.append(stream)
        return stream

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An ordinary uninitialised tensor."""
        self.require_open("pinned")
        return torch.empty(shape, dtype=dtype)

    def generator(self, seed: int) -> torch.Generator:
        """A CPU generator seeded with `seed`."""
        self.require_open("generator")
        return torch.Generator().manual_seed(seed)

    def capture(self, work: Callable[[], None]) -> NullGraph:
        """Run `work` once, now and without cost, and keep it."""
        self.require_open("capture")
        work()
        return NullGraph(work)

    def memory(self) -> MemoryFacts:
        """What the constructor was told."""
        self.require_open("memory")
        return self._memory

    def close(self) -> None:
        """Let all enqueued work end, without counting the wait; a second call does nothing.

        Raises a failure of a stream's work that no other call has raised before.
        """
        if self._is_closed:
            return
        for stream in self._streams:
            self.clock.advance_to(stream.record_event().time_us)
        self._is_closed = True
        for stream in self._streams:
            stream.raise_unreported()

    def require_open(self, call: str) -> None:
        """Raise a ContractError that names `call` if the runtime is closed."""
        if self._is_closed:
            raise ContractError(f"{call}: the null runtime is closed; create a new one")


class TokenScript(Protocol):
    """Outcomes of a null step: what a real device would sample and accept."""

    def token(self, request_id: str, index: int) -> int:
        """Token id that the request's output has at `index`, counted from 0."""
        ...

    def accepted(self, request_id: str, step: int) -> int:
        """Drafts accepted in the request's decode step `step` (from 0): 0 to `MAX_ACCEPTED`."""
        ...


@dataclass(frozen=True, slots=True)
class RepeatScript:
    """The same token and the same accepted count, always."""

    token_id: int
    num_accepted: int = 0

    def __post_init__(self) -> None:
        _check_accepted("RepeatScript", self.num_accepted)

    def token(self, request_id: str, index: int) -> int:
        """`token_id`."""
        return self.token_id

    def accepted(self, request_id: str, step: int) -> int:
        """`num_accepted`."""
        return self.num_accepted


@dataclass(frozen=True, slots=True)
class CounterScript:
    """Tokens that count up, so that a gap or a repeat in an output shows at once."""

    first: int
    vocab_size: int
    num_accepted: int = 0

    def __post_init__(self) -> None:
        _check_accepted("CounterScript", self.num_accepted)
        if not 0 <= self.first < self.vocab_size:
            raise ContractError(
                f"CounterScript: first {self.first} is not a token id below vocab_size "
                f"{self.vocab_size}"
            )

    def token(self, request_id: str, index: int) -> int:
        """`first + index`, starting again at `first` after the last token of the vocabulary."""
        return self.first + index % (self.vocab_size - self.first)

    def accepted(self, request_id: str, step: int) -> int:
        """`num_accepted`."""
        return self.num_accepted


@dataclass(frozen=True, slots=True)
class ListScript:
    """Tokens and accepted counts written out for each request; asking beyond them is an error."""

    tokens: Mapping[str, Sequence[int]]
    num_accepted: Mapping[str, Sequence[int]]

    def __post_init__(self) -> None:
        for request_id, counts in self.num_accepted.items():
            for count in counts:
                _check_accepted(f"ListScript, request {request_id!r}", count)

    def token(self, request_id: str, index: int) -> int:
        """Entry `index` of the request's tokens."""
        return self._entry("tokens", self.tokens, request_id, index)

    def accepted(self, request_id: str, step: int) -> int:
        """Entry `step` of the request's counts; 0 for a request without any."""
        if request_id not in self.num_accepted:
            return 0
        return self._entry("num_accepted", self.num_accepted, request_id, step)

    def _entry(
        self, name: str, table: Mapping[str, Sequence[int]], request_id: str, index: int
    ) -> int:
        entries = table.get(request_id, ())
        if not 0 <= index < len(entries):
            raise ContractError(
                f"ListScript: {name} of request {request_id!r} has {len(entries)} entries, entry "
                f"{index} was asked for; write a longer list or stop the request earlier"
            )
        return entries[index]


@dataclass(frozen=True, slots=True)
class RandomScript:
    """Random outcomes that are a pure function of seed, request and index.

    However a scheduler batches, repeats or preempts, a request's output stays the same.
    """

    seed: int
    vocab_size: int
    max_accepted: int = MAX_ACCEPTED

    def __post_init__(self) -> None:
        _check_accepted("RandomScript", self.max_accepted)
        if self.vocab_size < 1:
            raise ContractError(f"RandomScript: vocab_size {self.vocab_size} is below 1")

    def token(self, request_id: str, index: int) -> int:
        """A token id below `vocab_size`."""
        return self._draw("token", request_id, index) % self.vocab_size

    def accepted(self, request_id: str, step: int) -> int:
        """A count from 0 to `max_accepted`."""
        return self._draw("accepted", request_id, step) % (self.max_accepted + 1)

    def _draw(self, purpose: str, request_id: str, index: int) -> int:
        # The free text comes last, so that different arguments never make the same key.
        key = f"{self.seed} {purpose} {index} {request_id}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def _check_accepted(owner: str, count: int) -> None:
    if not 0 <= count <= MAX_ACCEPTED:
        raise ContractError(f"{owner}: {count} accepted drafts, expected 0 to {MAX_ACCEPTED}")
