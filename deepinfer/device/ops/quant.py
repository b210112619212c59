"""Quant family: matrix products with packed weights, and the quantisers themselves.

Layout is data: whether a product quantises its input follows from the weight's format and the
backend's numerics, never from an argument.
"""

from __future__ import annotations

from torch import Tensor

from deepinfer.device.comparison import Close, Exact, Product
from deepinfer.device.handles import EmbeddingTable, GroupedWeight, LinearWeight
from deepinfer.device.op import op


@op(family="quant", compare=Exact())
def embed(ids: Tensor, table: EmbeddingTable) -> Tensor:
    """Rows of the token embedding.

    Args:
        ids: [T] int64, valid token ids in every row, padding included.
        table: packed [V, D].

    Returns:
        [T, D] activation dtype.

    Contract: a move; zero rows allowed.
    """
    raise NotImplementedError


@op(family="quant", compare=Product())
def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """Product with packed matrices: x @ W^T, outputs of the parts side by side.

    Args:
        x: [T, K] activation dtype.
        weight: packed from matrices [N_i, K].

    Returns:
        [T, sum N_i] in x's dtype. In normative numerics a quantised weight meets an input
        quantised to e4m3 in groups of 32 (amax floor 1e-4), fp32 accumulation, one cast; an
        unquantised weight meets x as it is. In exact numerics everything is fp32.

    Contract: rows are independent; zero rows allowed; padding rows may hold NaN, and a row that
        holds one gives NaN.
    Source: quantised linear of the V4.1 backbone.
    """
    raise NotImplementedError


@op(family="quant", compare=Close(rtol=1e-4, atol=1e-4, origin="fp32 sum order over K terms"))
def linear_f32(x: Tensor, weight: LinearWeight) -> Tensor:
    """Product of x and unquantised matrices with both promoted to fp32, and fp32 output.

    Args:
        x: [T, K] any float dtype.
        weight: packed from F32 or BF16 matrices [N_i, K].

    Returns:
        [T, sum N_i] fp32 (router logits, compressor projections, LM head).

    Contract: rows are independent; zero rows allowed.
    """
    raise NotImplementedError


@op(family="quant", compare=Product())
def grouped_linear(x: Tensor, weight: GroupedWeight) -> Tensor:
    """Block-diagonal product: group g of x meets block g; inputs are never quantised.

    Args:
        x: [T, G, K] activation dtype.
        weight: packed G blocks [N, K], dequantised to the activation dtype.

    Returns:
        [T, G, N] in x's dtype, fp32 accumulation.

    Source: first half of the grouped output projection (wo_a).
    """
    raise NotImplementedError


@op(family="quant", compare=Exact())
def quantize_a8(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes with one ue8m0 scale per 32: amax floor 1e-4, smallest power of two >= amax/448.

    Args:
        x: [..., N] float, N a multiple of 32, finite.

    Returns:
        codes [..., N] float8_e4m3fn (round to nearest even) and scales [..., N / 32] uint8.
    """
    raise NotImplementedError


@op(family="quant", compare=Exact())
def quantize_q4_ue8m0(x: Tensor) -> tuple[Tensor, Tensor]:
    """Packed E2M1 with one ue8m0 scale per 32: amax floor 6 * 2^-126, ties to the even code.

    Args:
        x: [..., N] float, N a multiple of 32, finite.

    Returns:
        bytes [..., N / 2] uint8 (even element in the low nibble), scales [..., N / 32] uint8.
    """
    raise NotImplementedError


@op(family="quant", compare=Exact())
def quantize_q4_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Packed E2M1 with one e4m3 scale per 16: amax floor 6 * 2^-9, scale = e4m3(amax / 6).

    Args:
        x: [..., N] float, N a multiple of 16, finite.

    Returns:
        bytes [..., N / 2] uint8 and scales [..., N / 16] float8_e4m3fn. The division by the
        scale is an IEEE fp32 division.
    """
    raise NotImplementedError
