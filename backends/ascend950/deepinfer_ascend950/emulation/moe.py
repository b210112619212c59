"""npu_moe_token_permute and npu_moe_finalize_routing.

Pages: torch_npu 2.13 operator docs, npu_moe_token_permute (Ascend 950PR/950DT listed); Ascend
op-plugin docs, torch_npu.npu_moe_finalize_routing; CANN ops-transformer,
aclnnMoeFinalizeRoutingV2 (Ascend 950PR/950DT).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_ascend950.emulation.documented import OperatorPage

_PERMUTE = OperatorPage("npu_moe_token_permute")
_FINALIZE = OperatorPage("npu_moe_finalize_routing")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_MAX_INDEX = 16777215


def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Rows of tokens [T, H] repeated and sorted by expert, and the place of every (row, k) pair.

    The page promises no order among the rows of one expert; here the last row stands first.
    """
    if num_out_tokens or padded_mode:
        raise _PERMUTE.not_emulated("num_out_tokens and padded_mode")
    _PERMUTE.rank("tokens", tokens, (2,))
    _PERMUTE.dtype("tokens", tokens, _FLOATS)
    _PERMUTE.rank("indices", indices, (1, 2))
    _PERMUTE.dtype("indices", indices, (torch.int32, torch.int64))
    _PERMUTE.shape("indices", indices, (tokens.shape[0], *indices.shape[1:]))
    flat = indices.flatten()
    _PERMUTE.require(
        flat.numel() < _MAX_INDEX and bool(((flat >= 0) & (flat < _MAX_INDEX)).all()),
        f"indices must lie in [0, {_MAX_INDEX})",
    )
    top_k = flat.numel() // max(1, tokens.shape[0])
    backwards = torch.argsort(flat.flip(0), stable=True)
    order = flat.numel() - 1 - backwards
    permuted = tokens[torch.div(order, max(1, top_k), rounding_mode="floor")]
    return permuted, torch.argsort(order).to(torch.int32)


def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    """sum_k scales[i, k] * rows[index[i + k * num_rows]]; mode 0 has the index by columns."""
    if any(value is not None for value in (skip1, skip2, bias)):
        raise _FINALIZE.not_emulated("skip1, skip2 and bias")
    _FINALIZE.value("drop_pad_mode", drop_pad_mode, (0,))
    _FINALIZE.rank("expanded_permuted_rows", expanded_permuted_rows, (2,))
    _FINALIZE.dtype("expanded_permuted_rows", expanded_permuted_rows, _FLOATS)
    _FINALIZE.filled("expanded_permuted_rows", expanded_permuted_rows)
    _FINALIZE.require(scales is not None, "without scales K is 1, whatever the index holds")
    assert scales is not None
    _FINALIZE.rank("scales", scales, (2,))
    _FINALIZE.dtype("scales", scales, _FLOATS)
    num_rows, top_k = scales.shape
    _FINALIZE.dtype("expanded_src_to_dst_row", expanded_src_to_dst_row, (torch.int32,))
    _FINALIZE.shape("expanded_src_to_dst_row", expanded_src_to_dst_row, (num_rows * top_k,))
    _FINALIZE.require(
        expanded_permuted_rows.shape[0] == num_rows * top_k,
        f"{expanded_permuted_rows.shape[0]} rows for {num_rows} x {top_k} scales",
    )
    index = expanded_src_to_dst_row.long()
    _FINALIZE.require(
        bool(((index >= 0) & (index < num_rows * top_k)).all()),
        f"the index must lie in [0, {num_rows * top_k})",
    )
    total = torch.zeros((num_rows, expanded_permuted_rows.shape[1]))
    for rank, column in enumerate(index.view(top_k, num_rows)):
        total += scales[:, rank, None].float() * expanded_permuted_rows[column].float()
    return total.to(expanded_permuted_rows.dtype)
