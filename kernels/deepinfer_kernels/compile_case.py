"""What a kernel file says about compiling its kernels without a GPU.

Counts that change from step to step (rows, requests, visible entries) are `do_not_specialize`
arguments: a count of 1, or a multiple of 16, would otherwise get a kernel of its own, compiled in
the middle of a run, whose sums may be ordered differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ARCHITECTURES = (90, 100)


@dataclass(frozen=True, slots=True)
class CompileCase:
    """One kernel with the types and constants it is compiled for.

    Attributes:
        kernel: name of the jitted function in the file.
        signature: Triton type of every run-time argument, in order.
        constants: value of every constexpr argument.
        num_warps: warps of a program.
        num_stages: tiles in flight in a loop, the one in use included.
        required: per architecture, words that the PTX must contain (tensor-core instructions).
        record_bytes: lengths of the cache records that it reads; a load that is wider than all of
            them are aligned is a fault.
        max_spill_bytes: bytes of registers spilled to local memory that are accepted.
        architectures: compute capabilities times ten.
    """

    kernel: str
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 3
    required: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    record_bytes: tuple[int, ...] = ()
    max_spill_bytes: int = 0
    architectures: tuple[int, ...] = ARCHITECTURES
