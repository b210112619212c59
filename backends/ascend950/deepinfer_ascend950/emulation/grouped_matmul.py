"""npu_grouped_matmul: one x, one weight with all groups, one result; grouped along M.

Page: Ascend op-plugin docs, torch_npu.npu_grouped_matmul, Ascend 950PR/950DT: formula 1 (not
quantised), formula 5 (MX, e4m3 on both sides, `scale`) and formula 6-2 (MX, e4m3 x and E2M1
weight, whose scale is `antiquant_scale`); tables of dtypes and of the single-single-single case.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer_ascend950.emulation.documented import OperatorPage, is_transposed
from deepinfer_ascend950.emulation.mx_format import spread_scales, unpacked_e2m1

_PAGE = OperatorPage("npu_grouped_matmul")
_OUTPUTS = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
_E8M0, _E2M1_X2 = 293, 296
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_ALIGNED_BYTES, _MAX_GROUPS = 32, 1024


def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    scale: Sequence[Tensor] | None = None,
    offset: Sequence[Tensor] | None = None,
    antiquant_scale: Sequence[Tensor] | None = None,
    antiquant_offset: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    activation_input: Sequence[Tensor] | None = None,
    activation_quant_scale: Sequence[Tensor] | None = None,
    activation_quant_offset: Sequence[Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[Tensor]:
    """Rows of each group times the group's matrix; rows behind the last group are undefined."""
    unused = (bias, offset, antiquant_offset, activation_input, activation_quant_scale,
              activation_quant_offset, tuning_config)  # fmt: skip
    if any(value is not None for value in unused) or act_type != 0:
        raise _PAGE.not_emulated("bias, offsets, activations and tuning")
    if len(x) != 1 or len(weight) != 1 or group_type != 0:
        raise _PAGE.not_emulated("several tensors, or grouping along another axis than M")
    _PAGE.value("split_item of one result", split_item, (2, 3))
    rows, matrices = x[0], weight[0]
    _PAGE.rank("x", rows, (2,))
    _PAGE.rank("weight", matrices, (3,))
    _PAGE.require(rows.shape[1] > 0, "K must not be 0")
    if matrices.dtype in _FLOATS:
        quantised = (scale, antiquant_scale, per_token_scale, x_dtype, weight_dtype)
        _PAGE.require(
            all(value is None for value in quantised),
            "float operands take neither scales nor dtype codes",
        )
        _PAGE.dtype("x", rows, (matrices.dtype,))
        result_dtype = matrices.dtype if output_dtype is None else _OUTPUTS.get(output_dtype)
        _PAGE.require(
            result_dtype is matrices.dtype, f"output_dtype {output_dtype} is not that of x"
        )
        left, right = rows.float(), matrices.float()
    else:
        left, right = _dequantized(
            rows,
            matrices,
            scale=scale,
            antiquant_scale=antiquant_scale,
            per_token_scale=per_token_scale,
            codes=(x_dtype, weight_dtype, scale_dtype, per_token_scale_dtype),
        )
        _PAGE.value("output_dtype of the MX modes", output_dtype, (5, 15))
        result_dtype = _OUTPUTS[output_dtype or 0]
    _PAGE.require(
        right.shape[1] == left.shape[1],
        f"weight has K {right.shape[1]}, x has {left.shape[1]}",
    )
    bounds = _bounds(group_list, group_list_type, right.shape[0], rows.shape[0])
    product = torch.full((rows.shape[0], right.shape[2]), torch.nan, dtype=torch.float32)
    for group, (start, stop) in enumerate(bounds):
        product[start:stop] = left[start:stop] @ right[group]
    return [product.to(result_dtype)]


def _dequantized(
    x: Tensor,
    weight: Tensor,
    *,
    scale: Sequence[Tensor] | None,
    antiquant_scale: Sequence[Tensor] | None,
    per_token_scale: Sequence[Tensor] | None,
    codes: tuple[int | None, int | None, int | None, int | None],
) -> tuple[Tensor, Tensor]:
    """fp32 x [M, K] and weights [E, K, N] of the MX modes."""
    x_dtype, weight_dtype, scale_dtype, per_token_scale_dtype = codes
    is_fp4 = weight_dtype == _E2M1_X2
    _PAGE.dtype("x", x, (torch.float8_e4m3fn,))
    _PAGE.value("x_dtype", x_dtype, (None,))
    _PAGE.value("weight_dtype", weight_dtype, (None, _E2M1_X2))
    _PAGE.dtype("weight", weight, (torch.uint8, torch.int8) if is_fp4 else (torch.float8_e4m3fn,))
    _PAGE.value("scale_dtype", scale_dtype, (None if is_fp4 else _E8M0,))
    _PAGE.value("per_token_scale_dtype", per_token_scale_dtype, (_E8M0,))
    name, other = ("antiquant_scale", "scale") if is_fp4 else ("scale", "antiquant_scale")
    given = {"scale": scale, "antiquant_scale": antiquant_scale}
    _PAGE.require(
        given[name] is not None and given[other] is None and per_token_scale is not None,
        f"weights of {'E2M1' if is_fp4 else 'e4m3'} take their scale as {name}, not as {other}, "
        "and rows take theirs as per_token_scale",
    )
    weight_scale, row_scale = (given[name] or ())[0], (per_token_scale or ())[0]
    num_groups, stored_inner, num_outputs = weight.shape
    inner = 2 * stored_inner if is_fp4 else stored_inner
    if not is_fp4 and not is_transposed(weight):
        raise _PAGE.not_emulated("an e4m3 weight that is not transposed")
    _PAGE.require(is_transposed(weight), "E2M1 weights must be a transposed view of [E, N, K / 2]")
    _PAGE.require(
        not is_fp4 or (stored_inner % _ALIGNED_BYTES == 0 and num_outputs % _ALIGNED_BYTES == 0),
        f"the last two dimensions of weight, {stored_inner} and {num_outputs}, must be multiples "
        f"of {_ALIGNED_BYTES} bytes",
    )
    for label, bytes_ in ((name, weight_scale), ("per_token_scale", row_scale)):
        _PAGE.dtype(label, bytes_, (torch.uint8, torch.int8))
    _PAGE.shape(name, weight_scale, (num_groups, -(-inner // 64), num_outputs, 2))
    _PAGE.require(
        weight_scale.transpose(1, 2).is_contiguous(),
        f"{name} must be transposed as weight is: a view of [E, N, K / 64, 2]",
    )
    _PAGE.shape("per_token_scale", row_scale, (x.shape[0], -(-x.shape[1] // 64), 2))
    left = x.float() * spread_scales(row_scale, x.shape[1])
    stored = weight.transpose(1, 2)
    right = unpacked_e2m1(stored) if is_fp4 else stored.float()
    right = right * spread_scales(weight_scale.transpose(1, 2), inner)
    return left, right.transpose(1, 2)


def _bounds(
    group_list: Tensor | None, kind: int | None, num_groups: int, num_rows: int
) -> list[tuple[int, int]]:
    """First row and last row + 1 of every group."""
    _PAGE.value("group_list_type", kind, (0, 1))
    _PAGE.require(group_list is not None, "group_list is needed when M is grouped")
    assert group_list is not None
    _PAGE.dtype("group_list", group_list, (torch.int64,))
    _PAGE.shape("group_list", group_list, (num_groups,))
    _PAGE.require(num_groups <= _MAX_GROUPS, f"{num_groups} groups, at most {_MAX_GROUPS}")
    numbers = group_list.tolist()
    stops = numbers
    if kind == 1:
        stops, total = [], 0
        for count in numbers:
            total += count
            stops.append(total)
    starts = [0, *stops[:-1]]
    _PAGE.require(
        all(0 <= start <= stop <= num_rows for start, stop in zip(starts, stops, strict=True)),
        f"group_list {numbers} of type {kind} does not fit {num_rows} rows",
    )
    return list(zip(starts, stops, strict=True))
