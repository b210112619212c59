"""npu_quant_matmul in its MX mode.

Pages: torch_npu 2.13 operator docs, npu_quant_matmul; CANN ops-nn, aclnnQuantMatmulV5, Ascend
950PR/950DT, MX quantisation (shapes of both scales, [1, 1, 32] groups, equal transposition of x2
and its scale).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer_ascend950.emulation.documented import OperatorPage, is_transposed
from deepinfer_ascend950.emulation.mx_format import spread_scales

_PAGE = OperatorPage("npu_quant_matmul")
_OUTPUTS = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
_E8M0 = 293
_MAX_LAST = 65535


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    """x1 [M, K] @ x2 [K, N], both in e4m3 with a scale for 32 values along K."""
    unused = (offset, bias, x1_dtype, x2_dtype, y_scale)
    if any(value is not None for value in unused) or scale_dtype != _E8M0:
        raise _PAGE.not_emulated("another mode than MX with e4m3 operands and e8m0 scales")
    _PAGE.require(
        pertoken_scale is not None and pertoken_scale_dtype == _E8M0,
        f"pertoken_scale_dtype is {pertoken_scale_dtype}; MX needs both scales as {_E8M0} (e8m0)",
    )
    assert pertoken_scale is not None
    _PAGE.value("group_sizes", list(group_sizes or ()), ([1, 1, 32],))
    _PAGE.value("output_dtype", output_dtype, tuple(_OUTPUTS))
    for name, matrix in (("x1", x1), ("x2", x2)):
        _PAGE.rank(name, matrix, (2,))
        _PAGE.dtype(name, matrix, (torch.float8_e4m3fn,))
        _PAGE.require(
            matrix.shape[-1] <= _MAX_LAST, f"{name} has a last dimension above {_MAX_LAST}"
        )
    num_rows, inner = x1.shape
    _PAGE.require(x2.shape[0] == inner, f"x2 is {list(x2.shape)} for x1 {list(x1.shape)}")
    num_pairs, num_outputs = -(-inner // 64), x2.shape[1]
    for name, bytes_ in (("scale", scale), ("pertoken_scale", pertoken_scale)):
        _PAGE.dtype(name, bytes_, (torch.uint8, torch.int8))
    _PAGE.shape("pertoken_scale", pertoken_scale, (num_rows, num_pairs, 2))
    _PAGE.shape("scale", scale, (num_pairs, num_outputs, 2))
    _PAGE.require(x1.is_contiguous(), "x1 is a view with gaps; only transposition is documented")
    _PAGE.require(
        (is_transposed(x2) and scale.transpose(0, 1).is_contiguous())
        or (x2.is_contiguous() and scale.is_contiguous()),
        "x2 and scale must be both transposed views or both contiguous",
    )
    left = x1.float() * spread_scales(pertoken_scale, inner)
    right = x2.T.float() * spread_scales(scale.transpose(0, 1), inner)
    return (left @ right.T).to(_OUTPUTS[output_dtype or 0])
