"""npu_transpose_batchmatmul.

Pages: Ascend op-plugin docs, torch_npu.npu_transpose_batchmatmul; CANN ops-nn,
aclnnTransposeBatchMatMul (Ascend 950PR/950DT).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer_ascend950.emulation.documented import OperatorPage

_PAGE = OperatorPage("npu_transpose_batchmatmul")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_MAX_LAST = 65535


def npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> Tensor:
    """(permuted input [B, M, K] @ permuted weight [B, K, N]) permuted; products summed in fp32."""
    if bias is not None or scale is not None or batch_split_factor != 1:
        raise _PAGE.not_emulated("bias, scale and splitting")
    for name, matrix in (("input", input), ("weight", weight)):
        _PAGE.rank(name, matrix, (3,))
        _PAGE.filled(name, matrix)
        _PAGE.require(
            matrix.shape[-1] <= _MAX_LAST, f"{name} has a last dimension above {_MAX_LAST}"
        )
    _PAGE.dtype("input", input, _FLOATS)
    _PAGE.dtype("weight", weight, (input.dtype,))
    order_1 = list(perm_x1 or (0, 1, 2))
    order_2 = list(perm_x2 or (0, 1, 2))
    order_y = list(perm_y or (1, 0, 2))
    _PAGE.value("perm_x1", order_1, ([0, 1, 2], [1, 0, 2]))
    _PAGE.value("perm_x2", order_2, ([0, 1, 2],))
    _PAGE.value("perm_y", order_y, ([1, 0, 2],))
    left, right = input.permute(order_1), weight.permute(order_2)
    _PAGE.require(
        left.shape[0] == right.shape[0] and left.shape[2] == right.shape[1],
        f"permuted input {list(left.shape)} does not meet weight {list(right.shape)}",
    )
    product = torch.bmm(left.float(), right.float()).to(input.dtype)
    return product.permute(order_y).contiguous()
