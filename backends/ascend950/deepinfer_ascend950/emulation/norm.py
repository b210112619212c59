"""npu_rms_norm.

Pages: Ascend op-plugin docs, torch_npu.npu_rms_norm; CANN ops-nn, aclnnRmsNorm (dtype table of
Ascend 950PR/950DT).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_ascend950.emulation.documented import OperatorPage

_PAGE = OperatorPage("npu_rms_norm")
_PAIRS = (
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
)


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + epsilon) * gamma over the dimensions of gamma, and 1 / rms in fp32."""
    _PAGE.value("dtypes of self and gamma", (self.dtype, gamma.dtype), _PAIRS)
    _PAGE.filled("gamma", gamma)
    _PAGE.rank("self", self, range(1, 9))
    num_outer = self.dim() - gamma.dim()
    _PAGE.require(
        num_outer > 0 and self.shape[num_outer:] == gamma.shape,
        f"gamma {list(gamma.shape)} is not the end of self {list(self.shape)}",
    )
    dims = tuple(range(num_outer, self.dim()))
    values = self.float()
    rstd = torch.rsqrt(values.square().mean(dims, keepdim=True) + epsilon)
    return (values * rstd * gamma.float()).to(self.dtype), rstd
