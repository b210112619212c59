"""Sampling family on Triton kernels; sorting is torch's."""

from __future__ import annotations

from torch import Tensor

from deepinfer.device.op import OpTable
from deepinfer.device.ops import sampling
from deepinfer.device.ops.sampling import (
    LogitControls,
    Logprobs,
    Purpose,
    SampleParams,
    SampleWork,
)
from deepinfer_kernels.sampling import controls_triton, philox_triton, sample_triton


def philox_uniform(
    seeds: Tensor, sample_index: Tensor, positions: Tensor, purpose: Purpose, num: int
) -> Tensor:
    return philox_triton.uniform(seeds, sample_index, positions, int(purpose), num)


def apply_controls(logits: Tensor, controls: LogitControls) -> Tensor:
    if all(control is None for control in controls):
        return logits
    logits = logits.clone()
    if controls.allowed is not None:
        controls_triton.allow(logits, controls.allowed)
    if controls.banned is not None:
        controls_triton.ban(logits, *controls.banned)
    if controls.bias is not None:
        controls_triton.add_bias(logits, *controls.bias)
    if controls.penalties is not None:
        controls_triton.penalise(logits, **controls.penalties._asdict())
    return logits


def filter_logits(logits: Tensor, params: SampleParams, work: SampleWork) -> Tensor:
    return sample_triton.filter_logits(
        logits,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        greedy=work is SampleWork.GREEDY,
        sorts=work is SampleWork.SORTED,
    )


def sample_tokens(
    logits: Tensor,
    params: SampleParams,
    work: SampleWork,
    *,
    purpose: Purpose = Purpose.SAMPLE,
) -> Tensor:
    if work is SampleWork.GREEDY:
        return sample_triton.argmax(logits)
    return sample_triton.draw(
        filter_logits(logits, params, work),
        temperature=params.temperature,
        seeds=params.seeds,
        sample_index=params.sample_index,
        positions=params.positions,
        purpose=int(purpose),
    )


def token_logprobs(logits: Tensor, ids: Tensor, num_top: int) -> Logprobs:
    return Logprobs(*sample_triton.token_logprobs(logits, ids, num_top))


def finite_rows(logits: Tensor) -> Tensor:
    return sample_triton.finite_rows(logits)


def count_tokens(ids: Tensor, slots: Tensor, output_counts: Tensor) -> None:
    controls_triton.count_tokens(ids, slots, output_counts)


def register(table: OpTable, reason: str) -> None:
    """Add this family's implementations to `table`."""
    sorts = f"{reason}; top-k and top-p order tokens by torch's stable sort"
    table.implements(sampling.philox_uniform, reason=reason)(philox_uniform)
    table.implements(sampling.apply_controls, reason=reason)(apply_controls)
    table.implements(sampling.filter_logits, reason=sorts)(filter_logits)
    table.implements(sampling.sample_tokens, reason=sorts)(sample_tokens)
    table.implements(sampling.token_logprobs, reason=sorts)(token_logprobs)
    table.implements(sampling.finite_rows, reason=reason)(finite_rows)
    table.implements(sampling.count_tokens, reason=reason)(count_tokens)
