"""Reference of the sampling family; probabilities and noise in float64, results in fp32."""

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
from deepinfer_reference.ops.philox import philox_uniform

_REMOVED = float("-inf")


def _ban(logits: Tensor, banned: SparseIds) -> Tensor:
    present = banned.rows >= 0
    removed = torch.zeros_like(logits, dtype=torch.bool)
    removed[banned.rows[present], banned.ids[present]] = True
    return logits.masked_fill(removed, _REMOVED)


def _add_bias(logits: Tensor, bias: SparseBias) -> Tensor:
    present = bias.rows >= 0
    where = (bias.rows[present], bias.ids[present])
    return logits.index_put(where, bias.values[present], accumulate=True)


def _penalise(logits: Tensor, penalties: Penalties) -> Tensor:
    present = (penalties.slots >= 0).unsqueeze(1)
    slots = penalties.slots.clamp_min(0)
    counts = penalties.output_counts[slots]
    pending = penalties.pending
    counts = counts.scatter_add(1, pending.clamp_min(0), (pending >= 0).to(counts.dtype))
    was_output = counts > 0
    seen = was_output | penalties.prompt_seen[slots]
    repetition = penalties.repetition.unsqueeze(1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    changed = torch.where(seen, repeated, logits)
    changed = changed - counts * penalties.frequency.unsqueeze(1)
    changed = changed - was_output * penalties.presence.unsqueeze(1)
    return torch.where(present, changed, logits)


def apply_controls(logits: Tensor, controls: LogitControls) -> Tensor:
    if controls.allowed is not None:
        logits = logits.masked_fill(~controls.allowed, _REMOVED)
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
    # Already relative to the row maximum, so exp cannot overflow.
    weights = scaled.gather(1, order).double().exp().masked_fill(removed, 0.0)
    before = torch.nn.functional.pad(torch.cumsum(weights, -1)[:, :-1], (1, 0))
    top_p = params.top_p.unsqueeze(1).double()
    # At 1 nothing may go, although a rounded sum could reach the total early.
    removed |= (top_p < 1.0) & (before >= top_p * weights.sum(-1, keepdim=True))
    removed[:, 0] = False
    return torch.zeros_like(removed).scatter(1, order, removed)


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
        removed |= _outside_top(logits, scaled, params)
    return torch.where(is_greedy, one_hot, scaled.masked_fill(removed, _REMOVED))


def sample_tokens(
    logits: Tensor,
    params: SampleParams,
    work: SampleWork,
    *,
    purpose: Purpose = Purpose.SAMPLE,
) -> Tensor:
    tokens = logits.argmax(-1)
    if work is SampleWork.GREEDY:
        return tokens
    drawn = params.temperature.nonzero().flatten()
    rows = SampleParams(*(column[drawn] for column in params))
    kept = filter_logits(logits[drawn], rows, work).double()
    noisy = kept + gumbel_noise(rows, purpose, logits.shape[-1])
    return tokens.index_copy(0, drawn, noisy.argmax(-1))


def gumbel_noise(params: SampleParams, purpose: Purpose, num: int) -> Tensor:
    """[N, num] float64 Gumbel noise of rows with parameters [N]."""
    uniform = philox_uniform(params.seeds, params.sample_index, params.positions, purpose, num)
    return -torch.log(-torch.log1p(-uniform.double()))


def token_logprobs(logits: Tensor, ids: Tensor, num_top: int) -> Logprobs:
    column = ids.unsqueeze(1)
    values = torch.log_softmax(logits.double(), -1)
    own = logits.gather(1, column)
    lower_ids = torch.arange(logits.shape[-1], device=logits.device) < column
    ahead = (logits > own) | ((logits == own) & lower_ids)
    if num_top:
        order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
        top_ids = order[:, :num_top].contiguous()
    else:
        top_ids = ids.new_empty(ids.shape[0], 0)
    return Logprobs(
        chosen=values.gather(1, column).squeeze(1).float(),
        rank=ahead.sum(-1) + 1,
        top_ids=top_ids,
        top_values=values.gather(1, top_ids).float(),
    )


def finite_rows(logits: Tensor) -> Tensor:
    usable = (logits < float("inf")).all(-1)  # false for NaN too
    return usable & (logits > _REMOVED).any(-1)


def count_tokens(ids: Tensor, slots: Tensor, output_counts: Tensor) -> None:
    present = slots >= 0
    where = (slots[present], ids[present])
    output_counts.index_put_(where, output_counts.new_ones(()), accumulate=True)


def register(table: OpTable) -> None:
    """Add this family's implementations to `table`."""
    table.implements(sampling.philox_uniform)(philox_uniform)
    table.implements(sampling.apply_controls)(apply_controls)
    table.implements(sampling.filter_logits)(filter_logits)
    table.implements(sampling.sample_tokens)(sample_tokens)
    table.implements(sampling.token_logprobs)(token_logprobs)
    table.implements(sampling.finite_rows)(finite_rows)
    table.implements(sampling.count_tokens)(count_tokens)
