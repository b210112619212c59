"""Many short processes side by side, each with a time limit.

A fault on a GPU spoils the process it happens in: illegal addresses end the CUDA context, wrong
loops never end. So whatever is expected to go wrong has a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """How a process ended.

    Attributes:
        code: its exit status; None when its time was up, or before it could start.
        output: what it printed, both streams.
        seconds: how long it ran.
    """

    code: int | None
    output: str
    seconds: float

    @property
    def last_line(self) -> str:
        """The last line printed, or nothing."""
        lines = self.output.strip().splitlines()
        return lines[-1] if lines else ""


def environment(**more: str) -> dict[str, str]:
    """This process's environment, one thread, the checkout importable, and `more`."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def python(*arguments: str) -> list[str]:
    """The command of this interpreter with arguments."""
    return [sys.executable, *arguments]


def run_all(
    commands: Mapping[str, Sequence[str]],
    *,
    num_workers: int,
    each_s: float,
    total_s: float,
    env: Mapping[str, str] | None = None,
    on_end: Callable[[str, Ended], None] = lambda name, ended: None,
) -> dict[str, Ended]:
    """Run commands in the checkout's root; how each ended, in the order of `commands`.

    Args:
        commands: by name.
        num_workers: processes at a time.
        each_s: seconds one may take.
        total_s: seconds after which all are ended and no more are started.
        env: environment; None: `environment()`.
        on_end: hears of each end, in the order of ends.
    """
    begun = time.monotonic()

    def run(command: Sequence[str]) -> Ended:
        started = time.monotonic()
        limit = min(each_s, begun + total_s - started)
        if limit <= 0:
            return Ended(None, "not started: the time was up", 0.0)
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment() if env is None else dict(env), timeout=limit,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            output = error.stdout or b""
            text = output if isinstance(output, str) else output.decode(errors="replace")
            return Ended(None, text, time.monotonic() - started)
        return Ended(done.returncode, done.stdout, time.monotonic() - started)

    ended: dict[str, Ended] = {}
    with ThreadPoolExecutor(num_workers) as pool:
        futures = {pool.submit(run, command): name for name, command in commands.items()}
        for future in as_completed(futures):
            name = futures[future]
            ended[name] = future.result()
            on_end(name, ended[name])
    return {name: ended[name] for name in commands}
