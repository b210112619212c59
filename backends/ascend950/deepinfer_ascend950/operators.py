"""torch_npu's operators as the ops use them: exact arguments in, the useful results out.

Every function builds one call. Layouts: matrices lie as [N, K] and are passed as transposed
views, which the operators tell by strides; scales lie as [..., ceil(K / 64), 2], two e8m0 bytes
for each 64 values, and are transposed as their matrix is.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from deepinfer_ascend950.calls import NpuCalls
from deepinfer_ascend950.schema.dtype_codes import BF16, E2M1_X2, E4M3, E8M0

A8_AMAX_FLOOR = 1e-4
_ALONG_M, _ONE_RESULT, _COUNTS = 0, 3, 1
_CUBLAS_SCALES = 1


class NpuOperators:
    """One function for each way the ops call an operator."""

    def __init__(self, call: NpuCalls) -> None:
        self._call = call

    def mx_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Activations in e4m3, amax floor 1e-4, smallest power of two >= amax / 448.

        Args:
            x: [..., N] float, N at least 32.

        Returns:
            codes [..., N] float8_e4m3fn and scales [..., ceil(N / 64), 2] uint8; what pads the
            last pair is zero.
        """
        result = self._call(
            "npu_dynamic_mx_quant",
            x,
            axis=-1,
            round_mode="rint",
            dst_type=E4M3,
            block_size=32,
            scale_alg=_CUBLAS_SCALES,
            max_low_bound=A8_AMAX_FLOOR,
        )
        return cast("tuple[Tensor, Tensor]", result)

    def mx_matmul(
        self, codes: Tensor, scales: Tensor, matrix: Tensor, matrix_scales: Tensor
    ) -> Tensor:
        """Product of quantised rows and a quantised matrix, in bf16.

        Args:
            codes: [M, K] float8_e4m3fn.
            scales: [M, ceil(K / 64), 2] uint8.
            matrix: [N, K] float8_e4m3fn.
            matrix_scales: [N, ceil(K / 64), 2] uint8.

        Returns:
            [M, N] bf16, summed in fp32.
        """
        result = self._call(
            "npu_quant_matmul",
            codes,
            matrix.transpose(0, 1),
            matrix_scales.transpose(0, 1),
            pertoken_scale=scales,
            pertoken_scale_dtype=E8M0,
            scale_dtype=E8M0,
            output_dtype=BF16,
            group_sizes=[1, 1, 32],
        )
        return cast("Tensor", result)

    def grouped_w4a8(
        self, codes: Tensor, scales: Tensor, matrices: Tensor, matrix_scales: Tensor, counts: Tensor
    ) -> Tensor:
        """Rows sorted by group times the group's E2M1 matrix, in bf16.

        Args:
            codes: [S, K] float8_e4m3fn, K a multiple of 64.
            scales: [S, K / 64, 2] uint8.
            matrices: [E, N, K / 2] uint8, N a multiple of 32.
            matrix_scales: [E, N, K / 64, 2] uint8.
            counts: [E] int64 rows of each group; their sum is at most S.

        Returns:
            [S, N] bf16; rows behind the last group are undefined.
        """
        result = self._call(
            "npu_grouped_matmul",
            [codes],
            [matrices.transpose(1, 2)],
            antiquant_scale=[matrix_scales.transpose(1, 2)],
            per_token_scale=[scales],
            group_list=counts,
            split_item=_ONE_RESULT,
            group_type=_ALONG_M,
            group_list_type=_COUNTS,
            output_dtype=BF16,
            weight_dtype=E2M1_X2,
            per_token_scale_dtype=E8M0,
        )
        return cast("list[Tensor]", result)[0]

    def grouped_w8a8(
        self, codes: Tensor, scales: Tensor, matrices: Tensor, matrix_scales: Tensor, counts: Tensor
    ) -> Tensor:
        """As `grouped_w4a8` with matrices [E, N, K] float8_e4m3fn."""
        result = self._call(
            "npu_grouped_matmul",
            [codes],
            [matrices.transpose(1, 2)],
            scale=[matrix_scales.transpose(1, 2)],
            per_token_scale=[scales],
            group_list=counts,
            split_item=_ONE_RESULT,
            group_type=_ALONG_M,
            group_list_type=_COUNTS,
            output_dtype=BF16,
            scale_dtype=E8M0,
            per_token_scale_dtype=E8M0,
        )
        return cast("list[Tensor]", result)[0]

    def grouped_float(self, x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
        """As `grouped_w4a8` without quantisation: x [S, K] and matrices [E, N, K] of one dtype."""
        result = self._call(
            "npu_grouped_matmul",
            [x],
            [matrices.transpose(1, 2)],
            group_list=counts,
            split_item=_ONE_RESULT,
            group_type=_ALONG_M,
            group_list_type=_COUNTS,
        )
        return cast("list[Tensor]", result)[0]

    def block_diagonal(self, x: Tensor, blocks: Tensor) -> Tensor:
        """x [T, G, K] times blocks [G, K, N], both bf16: [T, G, N] bf16."""
        result = self._call(
            "npu_transpose_batchmatmul",
            x,
            blocks,
            perm_x1=[1, 0, 2],
            perm_x2=[0, 1, 2],
            perm_y=[1, 0, 2],
        )
        return cast("Tensor", result)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm of fp32 x [..., N] with fp32 weight [N], in fp32.

        bf16 x is not passed on: how often the operator rounds it is not documented.
        """
        result = self._call("npu_rms_norm", x, weight, eps)
        return cast("tuple[Tensor, Tensor]", result)[0]

    def mhc_pre(
        self,
        streams: Tensor,
        fn: Tensor,
        scale: Tensor,
        base: Tensor,
        *,
        norm_eps: float,
        hc_eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mixing of streams [T, M, D] bf16 before Sinkhorn, in fp32.

        The operator also collapses the streams, but with the mixing it has just computed;
        V4.1 collapses with the one of the sublayer before, so that output is not used.

        Returns:
            pre [T, M] with its eps, post [T, M], comb logits [T, M, M].
        """
        result = self._call(
            "npu_mhc_pre",
            streams,
            fn,
            scale,
            base,
            norm_eps=norm_eps,
            hc_eps=hc_eps,
            out_flag=1,
            inner_precise=0,
        )
        _, post, logits, _, _, pre = cast("tuple[Tensor, ...]", result)
        return pre, post, logits

    def mhc_sinkhorn(self, logits: Tensor, eps: float, num_iters: int) -> Tensor:
        """Doubly stochastic matrices of logits [T, M, M] fp32."""
        result = self._call("npu_mhc_sinkhorn", logits, eps=eps, num_iters=num_iters, out_flag=0)
        return cast("tuple[Tensor, ...]", result)[0]

    def mhc_post(self, streams: Tensor, comb: Tensor, y: Tensor, post: Tensor) -> Tensor:
        """comb^T @ streams + post * y: [T, M, D] in the dtype of the streams."""
        return cast("Tensor", self._call("npu_mhc_post", streams, comb, y, post))

    def permute(self, rows: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [T, D] sorted by expert, and the slot of every pair.

        Args:
            rows: [T, D] float, T above 0.
            experts: [T, k] int64 in [0, 2^24).

        Returns:
            [T * k, D] and [T * k] int32: pair i of `experts.flatten()` is in slot places[i].
        """
        result = self._call("npu_moe_token_permute", rows, experts)
        return cast("tuple[Tensor, Tensor]", result)

    def combine(self, outputs: Tensor, places: Tensor) -> Tensor:
        """Sum of each row's slots, in the order of k.

        Args:
            outputs: [T * k, D] fp32.
            places: [T, k] int32 slots of each row.

        Returns:
            [T, D] fp32.
        """
        result = self._call(
            "npu_moe_finalize_routing",
            outputs,
            None,
            None,
            None,
            torch.ones_like(places, dtype=torch.float32),
            places.transpose(0, 1).flatten(),
            None,
            drop_pad_mode=0,
            k=places.shape[1],
        )
        return cast("Tensor", result)

    def put_rows(self, target: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Write rows [n, ...] to slots [n] of target; changes it in place."""
        self._call("npu_scatter_nd_update_", target, slots.unsqueeze(1), rows)
