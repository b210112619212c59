"""npu_scatter_nd_update_.

Pages: torch_npu 2.13 operator docs, npu_scatter_nd_update_; CANN ops-nn, aclnnScatterNdUpdate
(dtypes of Ascend 950PR/950DT).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_ascend950.emulation.documented import OperatorPage

_PAGE = OperatorPage("npu_scatter_nd_update_")
_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.bool,
    torch.int8,
    torch.float8_e4m3fn,
)


def npu_scatter_nd_update_(self: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Put `updates` at `indices`; changes self in place. Which of equal indices wins is open."""
    _PAGE.rank("self", self, range(1, 9))
    _PAGE.dtype("self", self, _DTYPES)
    _PAGE.dtype("updates", updates, (self.dtype,))
    _PAGE.dtype("indices", indices, (torch.int32, torch.int64))
    _PAGE.require(indices.dim() >= 2, f"indices has {indices.dim()} dimensions, at least 2 needed")
    depth = indices.shape[-1]
    if depth != 1:
        raise _PAGE.not_emulated(f"an index of {depth} dimensions")
    _PAGE.shape("updates", updates, (*indices.shape[:-1], *self.shape[1:]))
    rows = indices.flatten().long()
    _PAGE.require(
        bool(((rows >= 0) & (rows < self.shape[0])).all()),
        f"indices must lie in [0, {self.shape[0]})",
    )
    # CPU tensors of fp8 cannot be indexed for writing; a move does not care what the bytes mean.
    raw = torch.uint8 if self.dtype.itemsize == 1 and self.dtype is not torch.bool else self.dtype
    self.view(raw)[rows] = updates.reshape(-1, *self.shape[1:]).view(raw)
    return self
