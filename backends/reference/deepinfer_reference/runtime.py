"""The reference runtime: the CPU behind streams, events, graphs and groups of one."""

from __future__ import annotations

import enum
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.device.errors import CapabilityError, ContractError
from deepinfer.device.runtime import MemoryFacts
from deepinfer_reference.graph import ReferenceGraph
from deepinfer_reference.groups import SingleGroup
from deepinfer_reference.streams import HoldPolicy, InlineStream, ThreadStream, host_time_us

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class RuntimeMode(enum.Enum):
    """When enqueued work runs."""

    THREAD = "thread"
    """As soon as possible, in the stream's thread."""
    INLINE = "inline"
    """Inside `enqueue`; for debuggers and short stack traces."""
    ADVERSARIAL = "adversarial"
    """As late as the contract allows, chosen by a seed; released cache rows are poisoned."""


class ReferenceRuntime:
    """Runtime of the reference backend, on `torch.device("cpu")`.

    Work runs without gradients (`torch.no_grad`) and with as many intra-op threads as the
    thread that enqueued it had, rounded down to a power of two.
    """

    def __init__(
        self,
        mode: RuntimeMode = RuntimeMode.THREAD,
        *,
        seed: int = 0,
        max_held: int = 8,
        max_queries: int = 3,
    ) -> None:
        """Create the compute and copy streams.

        Args:
            mode: when enqueued work runs.
            seed: seeds the adversarial mode's choices; the other modes make none.
            max_held: pieces of work that the adversarial mode holds back in a stream, at most.
            max_queries: times the adversarial mode answers False about an event, at most.
        Raises:
            ContractError: `max_held` or `max_queries` is below 1.
        """
        self._mode = mode
        self._hold = HoldPolicy(seed, max_held, max_queries)
        self._is_closed = False
        self._streams: list[ThreadStream | InlineStream] = []
        self._device = torch.device("cpu")
        self._group = SingleGroup()
        self._compute_stream = self.new_stream("compute")
        self._copy_stream = self.new_stream("copy")

    @property
    def mode(self) -> RuntimeMode:
        """When enqueued work runs."""
        return self._mode

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return self._device

    @property
    def compute_stream(self) -> ThreadStream | InlineStream:
        """Stream for the model's work."""
        return self._compute_stream

    @property
    def copy_stream(self) -> ThreadStream | InlineStream:
        """Stream for copies; a second thread, so that missing waits show on a CPU too."""
        return self._copy_stream

    @property
    def device_group(self) -> SingleGroup:
        """The group of one."""
        return self._group

    @property
    def cpu_group(self) -> SingleGroup:
        """The group of one."""
        return self._group

    @property
    def poisons_released(self) -> bool:
        """True in adversarial mode."""
        return self._mode is RuntimeMode.ADVERSARIAL

    def now_us(self) -> float:
        """Time of the process's performance counter."""
        return host_time_us()

    def new_stream(self, name: str) -> ThreadStream | InlineStream:
        """A further stream; it is closed with the runtime."""
        self._require_open("new_stream")
        stream: ThreadStream | InlineStream
        if self._mode is RuntimeMode.INLINE:
            stream = InlineStream(name)
        else:
            stream = ThreadStream(name, self._hold if self.poisons_released else None)
        self._streams.append(stream)
        return stream

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An ordinary uninitialised tensor; a CPU copies from any memory.

        In adversarial mode it is filled with NaN, or with the least value of an integer type,
        so that reading before writing shows and is the same in every run.
        """
        self._require_open("pinned")
        values = torch.empty(shape, dtype=dtype, device=self._device)
        if not self.poisons_released:
            return values
        if dtype.is_floating_point or dtype.is_complex:
            return values.fill_(float("nan"))
        return values.fill_(True if dtype is torch.bool else torch.iinfo(dtype).min)

    def generator(self, seed: int) -> torch.Generator:
        """A CPU generator seeded with `seed`."""
        self._require_open("generator")
        return torch.Generator(device=self._device).manual_seed(seed)

    def capture(self, work: Callable[[], None]) -> ReferenceGraph:
        """Run `work` once after all work of the compute stream, and keep it for replays."""
        self._require_open("capture")
        self._compute_stream.synchronize()
        return ReferenceGraph(work)

    def memory(self) -> MemoryFacts:
        """Memory that this process can have.

        Linux: MemTotal and MemAvailable, lowered to the limit of the process's control group
        (version 2) where there is one. macOS: physical pages, and the free, inactive and
        speculative pages that `vm_stat` counts. Other systems: physical and available pages as
        `sysconf` names them.

        Raises:
            CapabilityError: the system does not tell.
        """
        self._require_open("memory")
        if _MEMINFO.exists():
            facts = parse_meminfo(_MEMINFO.read_text())
            return limit_to_cgroup(facts, _CGROUP)
        if sys.platform == "darwin":
            listing = subprocess.run(
                ["/usr/bin/vm_stat"], capture_output=True, text=True, check=True
            ).stdout
            return MemoryFacts(_sysconf_bytes("SC_PHYS_PAGES"), parse_vm_stat(listing))
        return MemoryFacts(_sysconf_bytes("SC_PHYS_PAGES"), _sysconf_bytes("SC_AVPHYS_PAGES"))

    def close(self) -> None:
        """Drain the streams and end their threads; a second call does nothing.

        Raises a failure of a stream's work that no other call has raised before.
        """
        self._is_closed = True
        with ExitStack() as stack:
            for stream in self._streams:
                stack.callback(stream.close)
            self._streams = []

    def _require_open(self, call: str) -> None:
        if self._is_closed:
            raise ContractError(
                f"{call}: the reference runtime ({self._mode.value}) is closed; create a new one"
            )


def parse_meminfo(text: str) -> MemoryFacts:
    """Memory from the text of Linux' meminfo, whose unit is KiB.

    Raises:
        CapabilityError: MemTotal or MemAvailable is missing.
    """
    counts = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))
    missing = [name for name in ("MemTotal", "MemAvailable") if name not in counts]
    if missing:
        raise CapabilityError(
            f"memory: {_MEMINFO} has no line {missing[0]!r} in kB (Linux 3.14 or later has); set "
            "cache.memory to the bytes the cache may take"
        )
    return MemoryFacts(int(counts["MemTotal"]) * 1024, int(counts["MemAvailable"]) * 1024)


def limit_to_cgroup(facts: MemoryFacts, folder: Path) -> MemoryFacts:
    """`facts` lowered to the limit that the control group in `folder` sets, if it sets one.

    File pages that the kernel can drop count as free, as they do in MemAvailable.
    """
    limit_file = folder / "memory.max"
    if not limit_file.exists() or limit_file.read_text().strip() == "max":
        return facts
    limit_bytes = int(limit_file.read_text())
    used_bytes = int((folder / "memory.current").read_text())
    droppable = re.search(
        r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE
    )
    free_bytes = limit_bytes - used_bytes + (int(droppable[1]) if droppable else 0)
    return MemoryFacts(
        total_bytes=min(facts.total_bytes, limit_bytes),
        free_bytes=max(0, min(facts.free_bytes, free_bytes)),
    )


def parse_vm_stat(listing: str) -> int:
    """Bytes that macOS can hand out, from what `vm_stat` prints.

    Raises:
        CapabilityError: the page size or a count is missing.
    """
    page = re.search(r"page size of (\d+) bytes", listing)
    counts = dict(re.findall(r"^Pages (free|inactive|speculative):\s+(\d+)\.$", listing, re.M))
    if page is None or len(counts) != 3:
        raise CapabilityError(
            "memory: vm_stat printed no page size or not all of the free, inactive and speculative "
            f"pages (found {sorted(counts)}); set cache.memory to the bytes the cache may take"
        )
    return int(page[1]) * sum(int(count) for count in counts.values())


def _sysconf_bytes(name: str) -> int:
    if name not in os.sysconf_names:
        raise CapabilityError(
            f"memory: this system ({sys.platform}) has neither {_MEMINFO} nor sysconf {name}; set "
            "cache.memory to the bytes the cache may take"
        )
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
