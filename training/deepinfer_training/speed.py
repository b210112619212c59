"""How a run is made fast: Triton Sinkhorn, compiled elementwise functions, CUDA graphs.

Which of them work on a machine is measured by `benchmark.py`, never assumed.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from deepinfer_training import fused, sinkhorn


@dataclass(frozen=True, slots=True)
class Speed:
    """Switches of a run; all off is plain eager torch.

    Attributes:
        triton: Sinkhorn steps as Triton kernels.
        compiled: elementwise functions through torch.compile.
        captured: a step is replayed as a CUDA graph.
    """

    triton: bool = False
    compiled: bool = False
    captured: bool = False

    @classmethod
    def load(cls, file: Path | None) -> Speed:
        """Switches that a benchmark wrote; all off without a file."""
        if file is None or not file.is_file():
            return cls()
        return cls(**json.loads(file.read_text(encoding="utf-8"))["speed"])

    def apply(self) -> None:
        """Set the functions that every forward of this process uses."""
        if self.compiled:
            fused.compile_all()
        else:
            fused.use_eager()
        if self.triton:
            from deepinfer_training.sinkhorn_triton import triton_sinkhorn

            sinkhorn.use(triton_sinkhorn)
        else:
            sinkhorn.use(sinkhorn.eager_sinkhorn)

    def to_fields(self) -> dict[str, bool]:
        """For a log or a file."""
        return dataclasses.asdict(self)
