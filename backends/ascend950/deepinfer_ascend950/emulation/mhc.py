"""npu_mhc_pre, npu_mhc_sinkhorn, npu_mhc_post.

Pages: torch_npu 2.13 operator docs of the three; CANN ops-transformer, aclnnMhcPreV2,
aclnnMhcSinkhorn and aclnnMhcPost (Ascend 950PR/950DT). The page of npu_mhc_post in the op-plugin
docs lacks the transposition that the two others state; the two are followed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_ascend950.emulation.documented import OperatorPage

_PRE = OperatorPage("npu_mhc_pre")
_SINKHORN = OperatorPage("npu_mhc_sinkhorn")
_POST = OperatorPage("npu_mhc_post")
_HALVES = (torch.float16, torch.bfloat16)
_STREAMS = (4, 6, 8)
_MAX_WIDTH = 16384


def npu_mhc_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    *,
    gamma: Tensor | None = None,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    out_flag: int = 0,
    inner_precise: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """h_in, h_post, h_res (before Sinkhorn), 1 / rms, x @ phi^T and h_pre of streams [T, n, D]."""
    if gamma is not None or x.dim() != 3:
        raise _PRE.not_emulated("gamma and the layout [B, S, n, D]")
    _PRE.dtype("x", x, _HALVES)
    num_rows, n, width = x.shape
    _PRE.value("n", n, _STREAMS)
    _PRE.require(
        width % 16 == 0 and width <= _MAX_WIDTH,
        f"D is {width}, documented are multiples of 16 up to {_MAX_WIDTH}",
    )
    _PRE.value("out_flag", out_flag, (0, 1))
    _PRE.value("inner_precise", inner_precise, (0,))
    for name, value in (("x", x), ("phi", phi), ("alpha", alpha), ("bias", bias)):
        _PRE.filled(name, value)
    for name, value in (("phi", phi), ("alpha", alpha), ("bias", bias)):
        _PRE.dtype(name, value, (torch.float32,))
    _PRE.shape("phi", phi, (n * n + 2 * n, n * width))
    _PRE.shape("alpha", alpha, (3,))
    _PRE.shape("bias", bias, (n * n + 2 * n,))
    flat = x.float().flatten(1)
    inv_rms = (flat.square().mean(-1) + norm_eps).pow(-0.5)
    h_mix = flat @ phi.T
    w = h_mix * inv_rms.unsqueeze(1)
    h_pre = torch.sigmoid(w[:, :n] * alpha[0] + bias[:n]) + hc_eps
    h_post = 2 * torch.sigmoid(w[:, n : 2 * n] * alpha[1] + bias[n : 2 * n])
    h_res = (w[:, 2 * n :] * alpha[2] + bias[2 * n :]).view(num_rows, n, n)
    h_in = torch.einsum("tn,tnd->td", h_pre, x.float()).to(x.dtype)
    if out_flag == 0:
        inv_rms, h_mix, h_pre = (torch.full_like(t, torch.nan) for t in (inv_rms, h_mix, h_pre))
    return h_in, h_post, h_res, inv_rms, h_mix, h_pre


def npu_mhc_sinkhorn(
    x: Tensor, *, eps: float = 1e-6, num_iters: int = 20, out_flag: int = 0
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Doubly stochastic matrices of logits [T, n, n]."""
    if out_flag != 0:
        raise _SINKHORN.not_emulated("out_flag 1")
    _SINKHORN.rank("x", x, (3, 4))
    _SINKHORN.dtype("x", x, (torch.float32,))
    _SINKHORN.filled("x", x)
    _SINKHORN.value("n", x.shape[-1], _STREAMS)
    _SINKHORN.require(x.shape[-1] == x.shape[-2], f"x {list(x.shape)} holds no square matrices")
    _SINKHORN.require(1 <= num_iters <= 100, f"num_iters is {num_iters}, documented are 1 to 100")
    norm_out = torch.softmax(x, dim=-1) + eps
    norm_out = norm_out / (norm_out.sum(-2, keepdim=True) + eps)
    for _ in range(1, num_iters):
        norm_out = norm_out / (norm_out.sum(-1, keepdim=True) + eps)
        norm_out = norm_out / (norm_out.sum(-2, keepdim=True) + eps)
    return norm_out, None, None


def npu_mhc_post(x: Tensor, h_res: Tensor | None, h_out: Tensor, h_post: Tensor) -> Tensor:
    """h_res^T @ x + h_out (x) h_post for streams x [T, n, D]."""
    if h_res is None or x.dim() != 3:
        raise _POST.not_emulated("h_res None and the layout [B, S, n, D]")
    num_rows, n, width = x.shape
    _POST.dtype("x", x, _HALVES)
    _POST.dtype("h_out", h_out, (x.dtype,))
    _POST.value("n", n, _STREAMS)
    for name, value in (("h_res", h_res), ("h_post", h_post)):
        _POST.dtype(name, value, (torch.float32,))
    _POST.shape("h_res", h_res, (num_rows, n, n))
    _POST.shape("h_out", h_out, (num_rows, width))
    _POST.shape("h_post", h_post, (num_rows, n))
    mapped = torch.bmm(h_res.transpose(1, 2), x.float())
    return (mapped + h_post.unsqueeze(-1) * h_out.float().unsqueeze(1)).to(x.dtype)
