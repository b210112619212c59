"""Sampling family, in fp32 and integers: an NPU has no fast float64.

npu_top_k_top_p_sample is not used: it draws its own random numbers, and DeepInfer's are a
function of request, position and purpose, equal on every backend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.op import OpTable
from deepinfer.device.ops import sampling
from deepinfer.device.ops.sampling import (
    LogitControls,
    Logprobs,
    Penalties,
    Purpose,
    SampleParams,
    SampleWork,
    SparseBias,
    SparseIds,
)
from deepinfer_ascend950.ops.philox import philox_uniform

_REMOVED = float("-inf")
# Shares of probability are added as integers, so that a sum does not depend on its order.
_SHARE_ONE = 2.0**38


def _pair_index(rows: Tensor, ids: Tensor, width: int) -> Tensor:
    """Flat index of (row, id) pairs; skipped pairs, whose row is -1, point at 0."""
    return torch.where(rows >= 0, rows * width + ids, 0)


def _ban(logits: Tensor, banned: SparseIds) -> Tensor:
    width = logits.shape[1]
    count = torch.zeros(logits.numel(), dtype=torch.int32, device=logits.device)
    present = (banned.rows >= 0).to(torch.int32)
    count = count.scatter_add(0, _pair_index(banned.rows, banned.ids, width), present)
    return logits.masked_fill(count.view_as(logits) > 0, _REMOVED)


def _add_bias(logits: Tensor, bias: SparseBias) -> Tensor:
    added = torch.zeros(logits.numel(), dtype=torch.float32, device=logits.device)
    values = torch.where(bias.rows >= 0, bias.values, 0.0)
    added = added.scatter_add(0, _pair_index(bias.rows, bias.ids, logits.shape[1]), values)
    return logits + added.view_as(logits)


def _penalise(logits: Tensor, penalties: Penalties) -> Tensor:
    slots = penalties.slots.clamp_min(0)
    counts = penalties.output_counts.index_select(0, slots)
    pending = penalties.pending
    if pending.shape[1]:
        present = (pending >= 0).to(counts.dtype)
        counts = counts.scatter_add(1, pending.clamp_min(0), present)
    was_output = counts > 0
    seen = was_output | penalties.prompt_seen.index_select(0, slots)
    repetition = penalties.repetition.unsqueeze(1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    changed = torch.where(seen, repeated, logits)
    changed = changed - counts * penalties.frequency.unsqueeze(1)
    changed = changed - was_output * penalties.presence.unsqueeze(1)
    return torch.where((penalties.slots >= 0).unsqueeze(1), changed, logits)


def apply_controls(logits: Tensor, controls: LogitControls) -> Tensor:
    if controls.allowed is not None:
        logits = logits.masked_fill(~controls.allowed, _REMOVED)
    if logits.numel() == 0:
        return logits
    if controls.banned is not None:
        logits = _ban(logits, controls.banned)
    if controls.bias is not None:
        logits = _add_bias(logits, controls.bias)
    if controls.penalties is not None:
        logits = _penalise(logits, controls.penalties)
    return logits


def _outside_top(logits: Tensor, scaled: Tensor, params: SampleParams) -> Tensor:
    """Tokens that top-k or top-p removes; [N, V] bool."""
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    place = torch.arange(logits.shape[-1], device=logits.device)
    top_k = params.top_k.unsqueeze(1)
    removed = (top_k > 0) & (place >= top_k)
    weights = scaled.gather(1, order).exp().masked_fill(removed, 0.0)
    shares = (weights * _SHARE_ONE).round().long()
    before = torch.cumsum(shares, -1) - shares
    top_p = params.top_p.unsqueeze(1)
    wanted = _share_of(shares.sum(-1, keepdim=True), top_p)
    removed = removed | ((top_p < 1.0) & (before >= wanted))
    removed = removed & (place > 0)
    return torch.zeros_like(removed).scatter(1, order, removed)


def _share_of(total: Tensor, top_p: Tensor) -> Tensor:
    """ceil(total * top_p) for int64 totals below 2^57 and fp32 shares; no float64 is needed.

    A fp32 share is an integer over 2^30 to within rounding; the product is taken in two halves.
    """
    share = (top_p * 2.0**30).round().long()
    high, low = total >> 30, total & ((1 << 30) - 1)
    return high * share + ((low * share + ((1 << 30) - 1)) >> 30)


def filter_logits(logits: Tensor, params: SampleParams, work: SampleWork) -> Tensor:
    temperature = params.temperature.unsqueeze(1)
    is_greedy = temperature == 0
    best = logits.argmax(-1, keepdim=True)
    one_hot = torch.full_like(logits, _REMOVED).scatter(1, best, 0.0)
    if work is SampleWork.GREEDY:
        return one_hot
    scaled = (logits - logits.gather(1, best)) / torch.where(is_greedy, 1.0, temperature)
    removed = scaled.exp() < params.min_p.unsqueeze(1)
    if work is SampleWork.SORTED:
        removed = removed | _outside_top(logits, scaled, params)
    return torch.where(is_greedy, one_hot, scaled.masked_fill(removed, _REMOVED))


def sample_tokens(
    logits: Tensor,
    params: SampleParams,
    work: SampleWork,
    *,
    purpose: Purpose = Purpose.SAMPLE,
) -> Tensor:
    greedy = logits.argmax(-1)
    if work is SampleWork.GREEDY or logits.shape[0] == 0:
        return greedy
    # Every row draws, those of temperature 0 in vain: the host does not know which they are.
    kept = filter_logits(logits, params, work)
    uniform = philox_uniform(
        params.seeds, params.sample_index, params.positions, purpose, logits.shape[-1]
    )
    drawn = (kept - torch.log(-torch.log1p(-uniform))).argmax(-1)
    return torch.where(params.temperature == 0, greedy, drawn)


def token_logprobs(logits: Tensor, ids: Tensor, num_top: int) -> Logprobs:
    column = ids.unsqueeze(1)
    values = torch.log_softmax(logits, -1)
    own = logits.gather(1, column)
    lower_ids = torch.arange(logits.shape[-1], device=logits.device) < column
    ahead = (logits > own) | ((logits == own) & lower_ids)
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    top_ids = order[:, :num_top].contiguous()
    return Logprobs(
        chosen=values.gather(1, column).squeeze(1),
        rank=ahead.sum(-1) + 1,
        top_ids=top_ids,
        top_values=values.gather(1, top_ids),
    )


def finite_rows(logits: Tensor) -> Tensor:
    usable = (logits < float("inf")).all(-1)  # false for NaN too
    return usable & (logits > _REMOVED).any(-1)


def count_tokens(ids: Tensor, slots: Tensor, output_counts: Tensor) -> None:
    present = slots >= 0
    # An id may be anything where the slot is -1.
    index = torch.where(present, slots * output_counts.shape[1] + ids, 0)
    output_counts.view(-1).scatter_add_(0, index, present.to(output_counts.dtype))


def register(table: OpTable) -> None:
    """Add this family's implementations to `table`."""
    own = "torch: the NPU samplers draw random numbers of their own"
    fp32 = "fp32, sums of probability in int64"
    table.implements(
        sampling.philox_uniform, reason="torch: int64 arithmetic", layout="int64 words, fp32"
    )(philox_uniform)
    table.implements(sampling.apply_controls, reason="torch: elementwise", layout="fp32")(
        apply_controls
    )
    table.implements(sampling.filter_logits, reason=own, layout=fp32)(filter_logits)
    table.implements(sampling.sample_tokens, reason=own, layout=fp32)(sample_tokens)
    table.implements(sampling.token_logprobs, reason="torch", layout="fp32")(token_logprobs)
    table.implements(sampling.finite_rows, reason="torch", layout="fp32")(finite_rows)
    table.implements(sampling.count_tokens, reason="torch: scatter_add", layout="int32")(
        count_tokens
    )
