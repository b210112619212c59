"""Products with packed weights: dense, block-diagonal, and one expert per tile of rows.

The weight is the left operand: out^T [N, M] = W [N, K] @ x^T [K, M]. Its rows fill the
instruction's 64 or 128 rows however few tokens there are. Its codes come to shared memory ahead
of their use, are dequantised in the registers from which the instruction reads them, and their
scales are loaded one tile ahead; activations are floats already (`round_a8`), so that no tile
dequantises them again. For many rows a dense matrix is dequantised once, beforehand, instead of in
the tile of every 256 rows. With `block_scaled` the codes and scales of both themselves go to the
tensor cores (SM100 has instructions for them; elsewhere Triton dequantises): the same exact
products, summed in another order.

A row's bits do not depend on its company: K is split by N and K alone, an element's products are
added in the order of k in every tile, and partial sums in order. Only how many rows and weights a
program takes depends on the number of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deepinfer_kernels.compile_case import CompileCase
from deepinfer_kernels.quant.tiles_triton import (
    code_tile,
    plain_tile,
    scale_tile,
    weight_codes,
    weight_values,
)


class Operand(NamedTuple):
    """A matrix and how it is stored.

    Attributes:
        format: `plain` (fp32 or bf16), `mxfp8` (e4m3 codes as uint8) or `mxfp4` (packed uint8).
        data: [.., K] plain and mxfp8, [.., K / 2] mxfp4; contiguous.
        scales: [.., K / 32] uint8 (ue8m0), or None for plain.
    """

    format: str
    data: Tensor
    scales: Tensor | None

    @property
    def inner(self) -> int:
        """K."""
        return self.data.shape[-1] * (2 if self.format == "mxfp4" else 1)

    @property
    def is_fp32(self) -> bool:
        """Whether the product has to be fp32 throughout."""
        return self.data.dtype is torch.float32


class Tile(NamedTuple):
    """Sizes of one program."""

    rows: int
    outputs: int
    inner: int
    num_warps: int
    num_stages: int = 4


# fp32 products are unrolled multiply-adds; larger tiles only compile longer.
_FP32_TILE = Tile(rows=16, outputs=32, inner=32, num_warps=4)
_BF16_TILES = (
    Tile(rows=16, outputs=64, inner=128, num_warps=4),
    Tile(rows=32, outputs=64, inner=128, num_warps=4),
    Tile(rows=64, outputs=64, inner=64, num_warps=4),
    Tile(rows=128, outputs=128, inner=64, num_warps=8),
    Tile(rows=256, outputs=128, inner=64, num_warps=8, num_stages=3),
)
"""The first that holds all rows is taken; an expert's rows are padded to whole tiles."""
_WIDE_OUTPUTS, _WIDE_PROGRAMS = 128, 120
"""Few rows: programs take so many outputs when there are enough programs all the same."""
# Block-scaled instructions take 128 rows of weights.
_SCALED_TILE = Tile(rows=32, outputs=128, inner=128, num_warps=4)


class ManyRows(NamedTuple):
    """How dense products with many rows run; `benchmarks/gpu/gemm_sweep.py` times alternatives.

    Times are of one H200, 2026-11-30, 1,024 rows.

    Attributes:
        rows: from so many on a product runs so, and its matrix is dequantised beforehand.
        tile: sizes of a program. The fastest of the sweep for 32768 x 1280 (166 us); 1792 x 5120
            takes 71 us (68 with 4 warps), 5120 x 8192 takes 215 (199 with 256 outputs, 4 stages).
        descriptors: whether the device copies tiles by itself (TMA), where they are described by
            strides of whole 16 bytes; else threads copy them. With tiles of 256 rows and 128
            outputs: 82 us instead of 87 for 1792 x 5120, 239 instead of 253 for 5120 x 8192.
        groups: of 32 weights in a program of the dequantiser, which takes 33 us for 42M weights.
        num_warps: of a program of the dequantiser.
    """

    rows: int = 512
    tile: Tile = Tile(rows=128, outputs=128, inner=64, num_warps=8, num_stages=3)
    descriptors: bool = True
    groups: int = 32
    num_warps: int = 4


MANY_ROWS = ManyRows()
_SPLIT_OUTPUTS, _SPLIT_INNER = 64, 128
_MIN_PROGRAMS = 160
_MIN_STEPS = 4
"""A split keeps at least this many inner tiles."""


@triton.jit
def _accumulate(
    w_base, w_scales, x_base, x_scales, n, n_inside, x_row, x_inside, k_begin, k_end,
    K: tl.constexpr, W: tl.constexpr, X: tl.constexpr, DTYPE: tl.constexpr,
    SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """fp32 [BN, BM] of W rows n times x rows over k_begin .. k_end."""
    acc = tl.zeros([BN, BM], dtype=tl.float32)
    # Scales are too few bytes to be copied asynchronously: they are loaded a tile ahead.
    scales = tl.zeros([BN, BK // 32], dtype=tl.uint8)
    if W != "plain" and not SCALED:
        scales = scale_tile(w_scales, n, n_inside, k_begin, K, BK)
    for k0 in range(k_begin, k_end, BK):
        if SCALED:
            acc = tl.dot_scaled(
                code_tile(w_base, n, n_inside, k0, K, W, BK),
                scale_tile(w_scales, n, n_inside, k0, K, BK),
                "e2m1" if W == "mxfp4" else "e4m3",
                tl.trans(code_tile(x_base, x_row, x_inside, k0, K, X, BK)),
                scale_tile(x_scales, x_row, x_inside, k0, K, BK),
                "e4m3",
                acc,
            )
        else:
            x = plain_tile(x_base, x_row, x_inside, k0, K, BK, DTYPE)
            if W == "plain":
                w = plain_tile(w_base, n, n_inside, k0, K, BK, DTYPE)
            else:
                next_scales = scale_tile(w_scales, n, n_inside, k0 + BK, K, BK)
                codes = weight_codes(w_base, n, n_inside, k0, K, W, BK)
                w = weight_values(codes, scales, W, BN, BK, DTYPE)
                scales = next_scales
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["M"])
def _gemm(
    x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, out_ptr, M, N, num_groups, k_per_split,
    K: tl.constexpr, W: tl.constexpr, X: tl.constexpr, DTYPE: tl.constexpr,
    SCALED: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    split = tl.program_id(2) % SPLITS
    group = (tl.program_id(2) // SPLITS).to(tl.int64)
    # Row t of group g is row t * num_groups + g of x; weights lie group after group.
    x_row = m.to(tl.int64) * num_groups + group
    w_row = group * N + n
    k_begin = split * k_per_split
    acc = _accumulate(
        w_ptr, w_scales_ptr, x_ptr, x_scales_ptr, w_row, n < N, x_row, m < M,
        k_begin, tl.minimum(k_begin + k_per_split, K), K, W, X, DTYPE, SCALED, BM,
        BN, BK,
    )  # fmt: skip
    out = out_ptr + (split * M * num_groups + x_row)[None, :] * N + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


@triton.jit(do_not_specialize=["M"])
def _gemm_described(
    x_tiles, w_tiles, out_ptr, M, N, k_per_split, K: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`_gemm` of two described bf16 matrices; what lies outside of them reads as zero."""
    m0, n0, split = tl.program_id(0) * BM, tl.program_id(1) * BN, tl.program_id(2)
    k_begin = split * k_per_split
    acc = tl.zeros([BN, BM], dtype=tl.float32)
    for k0 in range(k_begin, tl.minimum(k_begin + k_per_split, K), BK):
        w = w_tiles.load([n0, k0])
        x = x_tiles.load([m0, k0])
        acc = tl.dot(w, tl.trans(x), acc)
    m, n = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
    out = out_ptr + (split * M + m.to(tl.int64))[None, :] * N + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


@triton.jit(do_not_specialize=["num_groups"])
def _dequantize(
    w_ptr, w_scales_ptr, out_ptr, num_groups, W: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    # A group is a row of 32 here: a matrix lies in memory group after group.
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = group < num_groups
    codes = weight_codes(w_ptr, group, inside, 0, 32, W, 32)
    scales = scale_tile(w_scales_ptr, group, inside, 0, 32, 32)
    tl.store(
        out_ptr + group[:, None] * 32 + tl.arange(0, 32)[None, :],
        weight_values(codes, scales, W, GROUPS, 32, tl.bfloat16),
        mask=inside[:, None],
    )


@triton.jit(do_not_specialize=["count"])
def _add_splits(partial_ptr, out_ptr, count, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for split in range(SPLITS):
        total += tl.load(partial_ptr + split * count.to(tl.int64) + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _expert_gemm(
    x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, out_ptr, tile_experts_ptr, slot_rows_ptr, N,
    K: tl.constexpr, GATHER: tl.constexpr, W: tl.constexpr, X: tl.constexpr, DTYPE: tl.constexpr,
    SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    expert = tl.load(tile_experts_ptr + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        slot = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
        row = tl.load(slot_rows_ptr + slot)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        acc = _accumulate(
            w_ptr, w_scales_ptr, x_ptr, x_scales_ptr, expert * N + n, n < N,
            row if GATHER else slot, row >= 0, 0, K, K, W, X, DTYPE, SCALED, BM, BN,
            BK,
        )  # fmt: skip
        out = out_ptr + slot[None, :] * N + n[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None])


def dequantize(w: Operand) -> Operand:
    """A quantised matrix [.., N, K] with its values in bf16, which holds them exactly."""
    shape = (*w.data.shape[:-1], w.inner)
    values = torch.empty(shape, dtype=torch.bfloat16, device=w.data.device)
    num_groups = values.numel() // 32
    _dequantize[(triton.cdiv(num_groups, MANY_ROWS.groups),)](
        w.data, w.scales, values, num_groups, W=w.format, GROUPS=MANY_ROWS.groups,
        num_warps=MANY_ROWS.num_warps,
    )  # fmt: skip
    return Operand("plain", values, None)


def _num_splits(outputs: int, inner: int) -> int:
    """Parts of K that are summed on their own: of the matrix alone, not of the rows."""
    programs = triton.cdiv(outputs, _SPLIT_OUTPUTS)
    most = triton.cdiv(inner, _SPLIT_INNER * _MIN_STEPS)
    return max(1, min(_MIN_PROGRAMS // programs, most))


def _tile(x: Operand, w: Operand, num_rows: int, *, block_scaled: bool) -> tuple[Tile, bool]:
    """Tile of a product, and whether codes and scales go to the tensor cores as they are."""
    if x.is_fp32 or w.is_fp32:
        return _FP32_TILE, False
    if block_scaled and "plain" not in (x.format, w.format):
        return _SCALED_TILE, True
    if x.format != "plain":
        raise ValueError(
            f"activations are {x.format}; only block-scaled products take codes: round_a8 gives "
            "the values"
        )
    return row_tile(num_rows), False


def row_tile(num_rows: int) -> Tile:
    """Smallest tile for so many rows, or the largest there is."""
    return next((tile for tile in _BF16_TILES if num_rows <= tile.rows), _BF16_TILES[-1])


def gemm(
    x: Operand,
    w: Operand,
    dtype: torch.dtype,
    *,
    block_scaled: bool = False,
    splits: int | None = None,
) -> Tensor:
    """x @ W^T, or block by block.

    Args:
        x: data [M, K], or [M, G, K] for G blocks.
        w: data [N, K], or [G, N, K].
        dtype: of the result.
        block_scaled: give codes and scales to the tensor cores where both are quantised.
        splits: pieces of K. None: as many as N and K alone say, so that a row's bits do not depend
            on its company; a number measures what that costs.

    Returns:
        [M, N] or [M, G, N]; fp32 accumulation, one cast. Both operands are fp32 throughout if
        either is.
    """
    grouped = w.data.dim() == 3
    num_groups = w.data.shape[0] if grouped else 1
    num_rows, outputs, inner = x.data.shape[0], w.data.shape[-2], w.inner
    shape = (num_rows, num_groups, outputs) if grouped else (num_rows, outputs)
    out = torch.empty(shape, dtype=dtype, device=x.data.device)
    if out.numel() == 0:
        return out
    tile, scaled = _tile(x, w, num_rows, block_scaled=block_scaled)
    splits = splits or _num_splits(outputs * num_groups, inner)
    described = False
    if num_rows >= MANY_ROWS.rows and tile is _BF16_TILES[-1]:
        tile = MANY_ROWS.tile
        w = w if w.format == "plain" else dequantize(w)
        described = MANY_ROWS.descriptors and _have_descriptors(x.data, w.data)
    wide_programs = triton.cdiv(outputs, _WIDE_OUTPUTS) * num_groups * splits
    if tile is _BF16_TILES[0] and wide_programs >= _WIDE_PROGRAMS:
        tile = tile._replace(outputs=_WIDE_OUTPUTS)
    if splits == 1:
        _launch(x, w, out, tile, splits, scaled=scaled, described=described)
        return out
    # Partial sums are added by a kernel of their own. A loop over the parts around the one over k
    # would have to find out where a part begins from its own index: Triton 3.6 forgets a number
    # that the outer loop carries, and all parts are the first.
    partial = torch.empty((splits, *shape), dtype=torch.float32, device=out.device)
    _launch(x, w, partial, tile, splits, scaled=scaled, described=described)
    _add_splits[(triton.cdiv(out.numel(), 1024),)](
        partial, out, out.numel(), SPLITS=splits, BLOCK=1024
    )
    return out


def _have_descriptors(*operands: Tensor) -> bool:
    """Whether all are matrices with rows that begin at multiples of 16 bytes."""
    return all(
        data.dim() == 2
        and data.shape[1] * data.element_size() % 16 == 0
        and data.data_ptr() % 16 == 0
        for data in operands
    )


def _launch(
    x: Operand,
    w: Operand,
    out: Tensor,
    tile: Tile,
    splits: int,
    *,
    scaled: bool,
    described: bool,
) -> None:
    """The product, or its partial sums: `out` has one result for each of `splits` parts of K."""
    num_groups = w.data.shape[0] if w.data.dim() == 3 else 1
    num_rows, outputs, inner = x.data.shape[0], w.data.shape[-2], w.inner
    steps = triton.cdiv(triton.cdiv(inner, _SPLIT_INNER), splits)
    grid = (
        triton.cdiv(num_rows, tile.rows),
        triton.cdiv(outputs, tile.outputs),
        num_groups * splits,
    )
    if described:
        _gemm_described[grid](
            TensorDescriptor.from_tensor(x.data, [tile.rows, tile.inner]),
            TensorDescriptor.from_tensor(w.data, [tile.outputs, tile.inner]),
            out, num_rows, outputs, steps * _SPLIT_INNER, K=inner, BM=tile.rows, BN=tile.outputs,
            BK=tile.inner, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        return
    _gemm[grid](
        x.data, x.scales, w.data, w.scales, out, num_rows, outputs, num_groups,
        steps * _SPLIT_INNER, K=inner, W=w.format, X=x.format,
        DTYPE=tl.float32 if tile is _FP32_TILE else tl.bfloat16, SCALED=scaled, SPLITS=splits,
        BM=tile.rows, BN=tile.outputs, BK=tile.inner, num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip


def expert_gemm(
    x: Operand,
    w: Operand,
    tile_experts: Tensor,
    slot_rows: Tensor,
    *,
    gather: bool,
    dtype: torch.dtype,
    block_scaled: bool = False,
) -> Tensor:
    """Each tile of slots times its expert's matrix.

    Args:
        x: data [T, K] if `gather`, else [S, K] in slot order.
        w: data [E, N, K] (plain, mxfp8) or [E, N, K / 2] (mxfp4).
        tile_experts: [tiles] int32 expert of each tile; -1: the tile is not used.
        slot_rows: [S] int32 row of each slot; -1 for padding.
        gather: read row slot_rows[s] for slot s.
        dtype: of the result.
        block_scaled: give codes and scales to the tensor cores where both are quantised.

    Returns:
        [S, N]; padding slots of used tiles are zero, unused tiles are unspecified.
    """
    num_slots, outputs = slot_rows.shape[0], w.data.shape[1]
    out = torch.empty((num_slots, outputs), dtype=dtype, device=x.data.device)
    if out.numel() == 0:
        return out
    rows = num_slots // tile_experts.shape[0]
    tile, scaled = _tile(x, w, rows, block_scaled=block_scaled)
    grid = (tile_experts.shape[0], triton.cdiv(outputs, tile.outputs))
    _expert_gemm[grid](
        x.data, x.scales, w.data, w.scales, out, tile_experts, slot_rows, outputs,
        K=w.inner, GATHER=gather, W=w.format, X=x.format,
        DTYPE=tl.float32 if tile is _FP32_TILE else tl.bfloat16, SCALED=scaled, BM=rows,
        BN=tile.outputs, BK=tile.inner, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def dequantize_truth(operand: Operand) -> Tensor:
    """fp32 values [.., K] of an operand, in plain torch."""
    if operand.format == "plain":
        return operand.data.float()
    assert operand.scales is not None
    factor = torch.exp2(operand.scales.float() - 127.0).repeat_interleave(32, -1)
    if operand.format == "mxfp8":
        return operand.data.view(torch.float8_e4m3fn).float() * factor
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat((grid, -grid)).to(operand.data.device)
    packed = operand.data.int()
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return values[codes] * factor


def gemm_truth(x: Operand, w: Operand, dtype: torch.dtype) -> Tensor:
    """`gemm` in plain torch, fp64 products."""
    left, right = dequantize_truth(x).double(), dequantize_truth(w).double()
    if right.dim() == 3:
        return torch.einsum("mgk,gnk->mgn", left, right).to(dtype)
    return (left @ right.T).to(dtype)


_SIGNATURE = {
    "x_ptr": "*u8", "x_scales_ptr": "*u8", "w_ptr": "*u8", "w_scales_ptr": "*u8",
    "out_ptr": "*bf16", "M": "i32", "N": "i32", "num_groups": "i32",
    "k_per_split": "i32",
}  # fmt: skip
_BLOCK_SCALED = {90: ("wgmma",), 100: ("kind::mxf8f6f4.block_scale",)}
_TENSOR_CORES = {90: ("wgmma",), 100: ("tcgen05.mma",)}


def _constants(
    w: str, x: str, tile: Tile, *, fp32: bool = False, scaled: bool = False
) -> dict[str, object]:
    return {
        "K": 5120, "W": w, "X": x, "DTYPE": tl.float32 if fp32 else tl.bfloat16, "SCALED": scaled,
        "BM": tile.rows, "BN": tile.outputs, "BK": tile.inner,
    }  # fmt: skip


def many_rows_case(tile: Tile, *, described: bool) -> CompileCase:
    """The product of many rows with a dequantised matrix."""
    if not described:
        signature = {**_ROUNDED, "w_ptr": "*bf16"}
        return _case("_gemm", signature, "plain", tile, SPLITS=1)
    signature = {
        "x_tiles": f"tensordesc<bf16[{tile.rows},{tile.inner}]>",
        "w_tiles": f"tensordesc<bf16[{tile.outputs},{tile.inner}]>",
        "out_ptr": "*bf16", "M": "i32", "N": "i32", "k_per_split": "i32",
    }  # fmt: skip
    constants = {"K": 5120, "BM": tile.rows, "BN": tile.outputs, "BK": tile.inner}
    required = {arch: (*words, "cp.async.bulk.tensor") for arch, words in _TENSOR_CORES.items()}
    return CompileCase(
        "_gemm_described", signature, constants, required=required, num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip


def dequantize_case(groups: int, num_warps: int, w: str = "mxfp8") -> CompileCase:
    """The dequantiser."""
    signature = {"w_ptr": "*u8", "w_scales_ptr": "*u8", "out_ptr": "*bf16", "num_groups": "i32"}
    return CompileCase("_dequantize", signature, {"W": w, "GROUPS": groups}, num_warps=num_warps)


def _case(
    kernel: str, signature: dict[str, str], w: str, tile: Tile, **constants: object
) -> CompileCase:
    return CompileCase(
        kernel, signature, {**_constants(w, "plain", tile), **constants}, required=_TENSOR_CORES,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


_EXPERT_SIGNATURE = {
    "x_ptr": "*u8", "x_scales_ptr": "*u8", "w_ptr": "*u8", "w_scales_ptr": "*u8",
    "out_ptr": "*bf16", "tile_experts_ptr": "*i32", "slot_rows_ptr": "*i32", "N": "i32",
}  # fmt: skip
_ROUNDED = {**_SIGNATURE, "x_ptr": "*bf16"}
COMPILE_CASES = (
    *(_case("_gemm", _ROUNDED, "mxfp8", tile, SPLITS=4) for tile in _BF16_TILES),
    _case("_gemm", _ROUNDED, "mxfp8", _BF16_TILES[0], SPLITS=1, BN=_WIDE_OUTPUTS),
    _case("_gemm", {**_ROUNDED, "w_ptr": "*bf16"}, "plain", _BF16_TILES[0], SPLITS=1),
    *(many_rows_case(MANY_ROWS.tile, described=way) for way in (False, True)),
    CompileCase(
        "_gemm", {**_SIGNATURE, "x_ptr": "*fp32", "w_ptr": "*fp32", "out_ptr": "*fp32"},
        {**_constants("plain", "plain", _FP32_TILE, fp32=True), "SPLITS": 1},
    ),
    *(
        _case("_expert_gemm", {**_EXPERT_SIGNATURE, "x_ptr": "*bf16"}, "mxfp4", tile, GATHER=True)
        for tile in _BF16_TILES
    ),
    *(
        CompileCase(
            "_gemm", _SIGNATURE, {**_constants(w, "mxfp8", _SCALED_TILE, scaled=True), "SPLITS": 1},
            required=_BLOCK_SCALED,
            max_spill_bytes=16,  # on SM90, where this form is for checking only
        )
        for w in ("mxfp8", "mxfp4")
    ),
    CompileCase(
        "_expert_gemm", _EXPERT_SIGNATURE,
        {
            **_constants("mxfp4", "mxfp8", _SCALED_TILE._replace(rows=16), scaled=True),
            "GATHER": True,
        },
        required=_BLOCK_SCALED,
    ),
    *(dequantize_case(MANY_ROWS.groups, MANY_ROWS.num_warps, w) for w in ("mxfp8", "mxfp4")),
    CompileCase(
        "_add_splits", {"partial_ptr": "*fp32", "out_ptr": "*bf16", "count": "i32"},
        {"SPLITS": 4, "BLOCK": 1024},
    ),
)  # fmt: skip
