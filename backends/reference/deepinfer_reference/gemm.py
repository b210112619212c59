"""Arithmetic whose rows do not depend on how many rows there are.

Vendor BLAS picks kernels by shape: fewer than 16 rows, a row count that is no multiple of the
register tile, or a long inner dimension split over threads all change the order of summation.
Rows are therefore padded to a multiple of 16 and the inner dimension is summed in pieces of 512.
From 6 threads on, widths that are no multiple of 8 show the number of rows as well.

Elementwise transcendental functions are vectorised with a scalar tail that rounds differently,
and every part of an array that is split over threads has such a tail. They are applied to whole
vectors, in pieces too small to be split. tests/reference/test_batch_invariance.py holds all of
it to equal bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

ROW_TILE = 16
INNER_PIECE = 512
_COLUMN_TILE = 8
# Batched products over 8 columns take another path than wider ones.
_BATCHED_COLUMN_TILE = 16
# Values that one turn of any vectorised loop takes: four AVX-512 vectors of fp32.
_VECTOR_BLOCK = 64
# torch splits elementwise work from 32768 values on.
_SERIAL_VALUES = 16384


def pad_rows(x: Tensor) -> Tensor:
    """x [M, ...] with zero rows added up to a multiple of the row tile."""
    missing = -x.shape[0] % ROW_TILE
    return pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for an elementwise function of fp32 x [...], without scalar tails."""
    count = x.numel()
    missing = -count % _VECTOR_BLOCK
    if not missing and count <= _SERIAL_VALUES and x.is_contiguous():
        return function(x)
    flat = pad(x.flatten(), (0, missing))
    values = torch.cat([function(piece) for piece in flat.split(_SERIAL_VALUES)])
    return values[:count].view(x.shape)


def padded_matmul(x: Tensor, matrix: Tensor) -> Tensor:
    """x @ matrix in fp32, bit-invariant in the number of rows; padding rows are kept.

    Args:
        x: [M, K] fp32.
        matrix: [K, N] fp32; fastest when contiguous.

    Returns:
        [M rounded up to the row tile, N] fp32; rows from M on are zero.
    """
    width = matrix.shape[1]
    if x.shape[0] == 0:
        return x.new_zeros((0, width))
    if width % _COLUMN_TILE:
        # Copied in every call; of the family's matrices only the confidence head comes here.
        widened = pad(matrix, (0, -width % _COLUMN_TILE))
        return padded_matmul(x, widened)[:, :width].contiguous()
    padded = pad_rows(x)
    return tiled_matmul(padded, matrix, out=x.new_empty((padded.shape[0], width)))


def tiled_matmul(x: Tensor, matrix: Tensor, *, out: Tensor) -> Tensor:
    """x [M, K] @ matrix [K, N] into out [M, N], all fp32; M a multiple of the row tile."""
    inner = matrix.shape[0]
    if inner <= INNER_PIECE:
        return torch.mm(x, matrix, out=out)
    torch.mm(x[:, :INNER_PIECE], matrix[:INNER_PIECE], out=out)
    for start in range(INNER_PIECE, inner, INNER_PIECE):
        stop = start + INNER_PIECE
        out += torch.mm(x[:, start:stop], matrix[start:stop])
    return out


def invariant_matmul(x: Tensor, matrix: Tensor) -> Tensor:
    """x [M, K] @ matrix [K, N] in fp32, bit-invariant in the number of rows: [M, N]."""
    return padded_matmul(x, matrix)[: x.shape[0]]


def batched_matmul(x: Tensor, matrices: Tensor) -> Tensor:
    """x [B, M, K] @ matrices [B, K, N] in fp32, the inner dimension in pieces: [B, M, N]."""
    inner, width = x.shape[2], matrices.shape[2]
    if width % _BATCHED_COLUMN_TILE:
        # Only toy sizes come here; see _COLUMN_TILE.
        widened = pad(matrices, (0, -width % _BATCHED_COLUMN_TILE))
        return batched_matmul(x, widened)[..., :width]
    total = torch.bmm(x[..., :INNER_PIECE], matrices[:, :INNER_PIECE])
    for start in range(INNER_PIECE, inner, INNER_PIECE):
        stop = start + INNER_PIECE
        total += torch.bmm(x[..., start:stop], matrices[:, start:stop])
    return total


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 x rounded to `dtype` and back; nothing for fp32."""
    return x if dtype is torch.float32 else x.to(dtype).float()
