"""Cases run in a process of their own, so that a hang or a crash costs one case and not the run.

The child keeps its backends between cases. It is replaced after a crash, after a time limit, and
after an unexpected exception on a device, whose context may be unusable from then on.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Protocol

from deepinfer.device.backend import labels_of
from deepinfer.device.errors import DeepInferError
from deepinfer.device.numerics import Numerics
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.outcome import Outcome, Status
from deepinfer_conformance.suite import SuiteCase, suite_cases, time_limit_s

_START_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a backend says of itself, or why it cannot be had.

    Attributes:
        features: declared capabilities.
        device: torch device it computes on.
        labels: what every report has to say, for example `emulated`.
        refusal: why it cannot be created; empty when it can.
    """

    features: frozenset[str] = frozenset()
    device: str = ""
    labels: tuple[str, ...] = ()
    refusal: str = ""


class Executor(Protocol):
    """Runs cases one after the other."""

    def greet(self) -> Greeting:
        """Create the backend; never raises for a backend that cannot be had."""
        ...

    def run(self, case: SuiteCase) -> Outcome:
        """Run a case; whatever happens comes back as its outcome."""
        ...

    def close(self) -> None:
        """Free the backends."""
        ...


def greeting_of(bench: Bench) -> Greeting:
    """Ask the backend under test."""
    try:
        backend = bench.under_test(Numerics.NORMATIVE)
    except DeepInferError as error:
        return Greeting(refusal=str(error))
    return Greeting(backend.features, str(backend.runtime.device), labels_of(backend))


def run_guarded(case: SuiteCase, bench: Bench) -> Outcome:
    """Run a case here; exceptions become outcomes."""
    start = time.perf_counter()
    try:
        outcome = case.run(bench)
    except Exception as error:
        # Foreign code runs here: whatever it raises belongs to the case.
        last = traceback.extract_tb(error.__traceback__)[-1]
        words = f"{type(error).__name__}: {error} ({last.name} in {last.filename}:{last.lineno})"
        outcome = Outcome(case.case_id, case.profile, Status.ERROR, message=words)
    return replace(outcome, seconds=time.perf_counter() - start)


class InProcess:
    """Runs cases in this process: for debuggers and for tests of the suite."""

    def __init__(self, bench: Bench) -> None:
        """Run on `bench`, which `close` closes."""
        self._bench = bench

    def greet(self) -> Greeting:
        """Create the backend here."""
        return greeting_of(self._bench)

    def run(self, case: SuiteCase) -> Outcome:
        """Run a case here, without a time limit."""
        return run_guarded(case, self._bench)

    def close(self) -> None:
        """Close the bench."""
        self._bench.close()


def _serve(pipe: Connection, backend: str, options: Mapping[str, object]) -> None:
    """The child: greet, then answer one case id after the other until None comes."""
    bench = Bench(backend, options)
    cases = {case.case_id: case for case in suite_cases()}
    pipe.send(greeting_of(bench))
    while (case_id := pipe.recv()) is not None:
        pipe.send(run_guarded(cases[case_id], bench))
    bench.close()


class Isolated:
    """Runs cases in a child process."""

    def __init__(
        self, backend: str, options: Mapping[str, object], *, limit_s: float | None = None
    ) -> None:
        """Nothing is started yet.

        Args:
            backend: name of the backend under test.
            options: its options; they travel to the child.
            limit_s: seconds a case may take; None takes each case's own limit.
        """
        self._backend, self._options, self._limit_s = backend, dict(options), limit_s
        self._child: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._greeting = Greeting()

    def greet(self) -> Greeting:
        """Start the child and let it create the backend."""
        self._start()
        return self._greeting

    def _start(self) -> Connection:
        if self._pipe is not None:
            return self._pipe
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._child = context.Process(
            target=_serve, args=(theirs, self._backend, self._options), daemon=True
        )
        self._child.start()
        theirs.close()
        self._pipe = ours
        reply = self._receive(_START_LIMIT_S)
        if isinstance(reply, Greeting):
            self._greeting = reply
        else:
            self._greeting = Greeting(refusal=f"its process {reply} while creating it")
        return ours

    def _receive(self, limit_s: float) -> object:
        """A message of the child, or in words why none came."""
        assert self._pipe is not None
        assert self._child is not None
        try:
            if self._pipe.poll(limit_s):
                return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._child.join(5.0)
            return f"died with exit code {self._child.exitcode}"
        return f"did not answer within {limit_s:g} s"

    def run(self, case: SuiteCase) -> Outcome:
        """Run a case in the child, within its time limit."""
        start = time.perf_counter()
        pipe = self._start()
        if self._greeting.refusal:
            self._stop()
            return Outcome(case.case_id, case.profile, Status.ERROR, message=self._greeting.refusal)
        pipe.send(case.case_id)
        limit = self._limit_s or time_limit_s(case)
        reply = self._receive(limit)
        seconds = time.perf_counter() - start
        if not isinstance(reply, Outcome):
            self._stop()
            status = Status.TIMEOUT if seconds >= limit else Status.CRASHED
            words = f"the process that ran it {reply}"
            return Outcome(case.case_id, case.profile, status, seconds, message=words)
        if reply.status is Status.ERROR and self._greeting.device != "cpu":
            self._stop()
        return reply

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.join()
        if self._pipe is not None:
            self._pipe.close()
        self._child = self._pipe = None

    def close(self) -> None:
        """End the child."""
        if self._pipe is not None and self._child is not None and self._child.is_alive():
            self._pipe.send(None)
            self._child.join(10.0)
        self._stop()
