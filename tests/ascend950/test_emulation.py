"""The emulated operators on hand-made numbers and on the examples of their pages."""

from __future__ import annotations

import pytest
import torch

from deepinfer.device.errors import CapabilityError, ContractError
from deepinfer_ascend950.emulation.batch_matmul import npu_transpose_batchmatmul
from deepinfer_ascend950.emulation.calls import EmulatedCalls
from deepinfer_ascend950.emulation.grouped_matmul import npu_grouped_matmul
from deepinfer_ascend950.emulation.mhc import npu_mhc_post, npu_mhc_pre, npu_mhc_sinkhorn
from deepinfer_ascend950.emulation.moe import npu_moe_finalize_routing, npu_moe_token_permute
from deepinfer_ascend950.emulation.mx_format import (
    e2m1_codes,
    e2m1_values,
    e8m0_values,
    packed_e2m1,
    unpacked_e2m1,
)
from deepinfer_ascend950.emulation.mx_quant import npu_dynamic_mx_quant
from deepinfer_ascend950.emulation.norm import npu_rms_norm
from deepinfer_ascend950.emulation.quant_matmul import npu_quant_matmul
from deepinfer_ascend950.emulation.scatter import npu_scatter_nd_update_

E4M3, E2M1, E8M0, BF16, FP32 = 292, 296, 293, 15, 6
PAGE_INPUT = torch.tensor([[0.0, 8.0, 64.0, 512.0]], dtype=torch.bfloat16)


@pytest.mark.parametrize(("scale_alg", "bound"), [(0, 0.0), (1, 0.0), (1, 0.5)])
def test_mx_quant_gives_the_example_of_its_page(scale_alg: int, bound: float) -> None:
    """aclnnDynamicMxQuantV3: (0, 8, 64, 512) becomes (0, 4, 32, 256) with scale byte 128."""
    codes, scales = npu_dynamic_mx_quant(
        PAGE_INPUT, dst_type=E4M3, scale_alg=scale_alg, max_low_bound=bound
    )
    assert codes.float().tolist() == [[0.0, 4.0, 32.0, 256.0]]
    assert scales.tolist() == [[[128, 0]]]


@pytest.mark.parametrize(
    ("amax", "dst_type", "scale_alg", "exponent"),
    [
        (448.0, E4M3, 0, 0),
        (448.0, E4M3, 1, 0),
        (450.0, E4M3, 0, 0),  # OCP: saturates instead
        (450.0, E4M3, 1, 1),  # cuBLAS: rounds the scale up
        (6.0, E2M1, 2, 0),
        (6.25, E2M1, 0, 0),
        (6.25, E2M1, 2, 1),
        (4.0, E2M1, 2, 0),
    ],
)
def test_scale_algorithms_differ_where_their_formulas_do(
    amax: float, dst_type: int, scale_alg: int, exponent: int
) -> None:
    x = torch.full((1, 32), amax)
    _, scales = npu_dynamic_mx_quant(x, dst_type=dst_type, scale_alg=scale_alg)
    assert scales[0, 0, 0] == exponent + 127


def test_low_bound_raises_the_largest_value() -> None:
    x = torch.full((1, 32), 2.0**-30)
    _, free = npu_dynamic_mx_quant(x, dst_type=E4M3, scale_alg=1)
    _, bound = npu_dynamic_mx_quant(x, dst_type=E4M3, scale_alg=1, max_low_bound=448.0)
    assert (int(free[0, 0, 0]), int(bound[0, 0, 0])) == (127 - 38, 127)


def test_an_odd_number_of_blocks_is_filled_with_a_zero_scale() -> None:
    _, scales = npu_dynamic_mx_quant(torch.ones(2, 96), dst_type=E4M3, scale_alg=1)
    assert scales.shape == (2, 2, 2)
    assert scales[:, 1, 1].tolist() == [0, 0]


def test_e2m1_codes_round_ties_to_even_codes() -> None:
    """OCP MX 1.0, section 5.3.3."""
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0, -0.75, -0.0])
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -1.0, -0.0]
    assert e2m1_values(e2m1_codes(values)).tolist() == expected
    assert e2m1_codes(values)[-1] == 8


def test_e2m1_pairs_survive_packing() -> None:
    grid = e2m1_values(torch.arange(16, dtype=torch.uint8))
    assert torch.equal(unpacked_e2m1(packed_e2m1(grid)), grid)


def test_e8m0_bytes_are_powers_of_two() -> None:
    scale = torch.tensor([127, 128, 120, 0], dtype=torch.uint8)
    assert e8m0_values(scale).tolist() == [1.0, 2.0, 2.0**-7, 2.0**-127]


def test_quant_matmul_scales_each_block_of_32() -> None:
    left = torch.ones(1, 64).to(torch.float8_e4m3fn)
    right = torch.ones(3, 64).to(torch.float8_e4m3fn)
    row_scale = torch.tensor([[[127, 128]]], dtype=torch.uint8)
    matrix_scale = torch.tensor([[[127, 127]], [[128, 127]], [[127, 129]]], dtype=torch.uint8)
    product = npu_quant_matmul(
        left,
        right.T,
        matrix_scale.transpose(0, 1),
        pertoken_scale=row_scale,
        pertoken_scale_dtype=E8M0,
        scale_dtype=E8M0,
        output_dtype=FP32,
        group_sizes=[1, 1, 32],
    )
    assert product.tolist() == [[32.0 + 64.0, 64.0 + 64.0, 32.0 + 256.0]]


def test_grouped_matmul_leaves_rows_behind_the_groups_undefined() -> None:
    x = torch.arange(5.0).unsqueeze(1)
    weight = torch.tensor([[[1.0]], [[10.0]]])
    (product,) = npu_grouped_matmul(
        [x], [weight], group_list=torch.tensor([1, 2]), split_item=3, group_type=0,
        group_list_type=1,
    )  # fmt: skip
    assert product[:3, 0].tolist() == [0.0, 10.0, 20.0]
    assert product[3:].isnan().all()


def test_grouped_matmul_reads_counts_and_sums() -> None:
    x, weight = torch.ones(3, 1), torch.tensor([[[1.0]], [[10.0]]])
    (product,) = npu_grouped_matmul(
        [x], [weight], group_list=torch.tensor([1, 3]), split_item=3, group_type=0,
        group_list_type=0,
    )  # fmt: skip
    assert product[:, 0].tolist() == [1.0, 10.0, 10.0]


def test_batch_matmul_permutes_input_and_result() -> None:
    x, weight = torch.randn(5, 2, 3), torch.randn(2, 3, 4)
    result = npu_transpose_batchmatmul(
        x, weight, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
    )
    assert torch.allclose(result, torch.einsum("tgk,gkn->tgn", x, weight), atol=1e-6)


def test_rms_norm_of_three_and_four() -> None:
    y, rstd = npu_rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    assert rstd.item() == pytest.approx(12.5**-0.5)
    assert y.tolist() == [pytest.approx([3.0 * 12.5**-0.5, 8.0 * 12.5**-0.5])]


def test_mhc_pre_follows_its_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 16, generator=generator).to(torch.bfloat16)
    phi = torch.randn(24, 64, generator=generator)
    alpha, bias = torch.tensor([0.5, 0.7, 1.1]), torch.randn(24, generator=generator)
    h_in, h_post, h_res, inv_rms, h_mix, h_pre = npu_mhc_pre(
        x, phi, alpha, bias, norm_eps=1e-6, hc_eps=1e-3, out_flag=1
    )
    flat = x.double().flatten(1)
    rms = (flat.square().sum(1) / 64 + 1e-6).sqrt()
    w = (flat @ phi.double().T) / rms.unsqueeze(1)
    assert torch.allclose(inv_rms.double(), 1 / rms, rtol=1e-5)
    assert torch.allclose(h_mix.double(), flat @ phi.double().T, rtol=1e-4, atol=1e-4)
    assert torch.allclose(h_pre.double(), (w[:, :4] * 0.5 + bias[:4]).sigmoid() + 1e-3, rtol=1e-4)
    assert torch.allclose(h_post.double(), 2 * (w[:, 4:8] * 0.7 + bias[4:8]).sigmoid(), rtol=1e-4)
    assert torch.allclose(
        h_res.double().flatten(1), w[:, 8:] * 1.1 + bias[8:], rtol=1e-4, atol=1e-4
    )
    assert torch.allclose(
        h_in.double(), (h_pre.double().unsqueeze(-1) * x.double()).sum(1), rtol=1e-2, atol=1e-2
    )


def test_sinkhorn_ends_with_columns_that_sum_to_one() -> None:
    logits = torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(1))
    matrices, _, _ = npu_mhc_sinkhorn(logits, eps=1e-6, num_iters=20)
    assert torch.allclose(matrices.sum(-2), torch.ones(6, 4), atol=1e-5)
    assert torch.allclose(matrices.sum(-1), torch.ones(6, 4), atol=1e-3)


def test_mhc_post_uses_the_transposed_residual_matrix() -> None:
    x = torch.eye(4).unsqueeze(0).to(torch.bfloat16)
    h_res = torch.zeros(1, 4, 4)
    h_res[0, 0, 2] = 1.0  # stream 0 goes into stream 2
    y = npu_mhc_post(x, h_res, torch.zeros(1, 4, dtype=torch.bfloat16), torch.zeros(1, 4))
    assert y[0].nonzero().tolist() == [[2, 0]]


def test_token_permute_of_its_pages_example() -> None:
    tokens = torch.tensor([[1, 1], [2, 2], [3, 3], [4, 4]], dtype=torch.float16)
    indices = torch.tensor([[0, 1], [1, 0], [0, 2], [2, 0]])
    permuted, places = npu_moe_token_permute(tokens, indices)
    assert torch.equal(permuted[places.long()], tokens.repeat_interleave(2, 0))
    by_place = indices.flatten()[places.long().argsort()]
    assert by_place.tolist() == sorted(by_place.tolist())


def test_finalize_routing_reads_the_index_by_columns() -> None:
    """aclnnMoeFinalizeRoutingV2: out[i] = sum_k scales[i, k] * rows[index[i + k * num_rows]]."""
    rows = torch.arange(6.0).unsqueeze(1)
    index = torch.tensor([2, 1, 4, 3, 0, 5], dtype=torch.int32)
    scales = torch.tensor([[1.0, 10.0], [1.0, 10.0], [1.0, 10.0]])
    out = npu_moe_finalize_routing(rows, None, None, None, scales, index, None, 0, 2)
    assert out[:, 0].tolist() == [2.0 + 30.0, 1.0 + 0.0, 4.0 + 50.0]


def test_scatter_of_its_pages_shapes() -> None:
    target = torch.zeros(5, 6)
    npu_scatter_nd_update_(target, torch.tensor([[3], [1]]), torch.ones(2, 6) * 7)
    assert target[:, 0].tolist() == [0.0, 7.0, 0.0, 7.0, 0.0]


def test_unknown_operator_names_the_known_ones() -> None:
    with pytest.raises(CapabilityError, match="npu_ffn is not emulated; emulated are npu_dynamic"):
        EmulatedCalls()("npu_ffn")


def test_documented_but_unused_case_is_refused_by_name() -> None:
    with pytest.raises(CapabilityError, match="dst_type 291 is documented but not emulated"):
        npu_dynamic_mx_quant(torch.ones(1, 32), dst_type=291)


def test_broken_constraint_names_value_and_operator() -> None:
    with pytest.raises(ContractError, match=r"npu_mhc_sinkhorn: n is 3, documented are \['4'"):
        npu_mhc_sinkhorn(torch.zeros(1, 3, 3))
