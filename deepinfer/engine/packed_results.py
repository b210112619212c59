"""What the host has to know of a step, in one tensor: one copy instead of six."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.ops.spec import Verified
from deepinfer.engine.step_state import HostLogprobs, SamplerOutput


def num_columns(max_drafts: int) -> int:
    """Columns of packed results with D drafts of a request."""
    return sum(_widths(max_drafts))


def pack_results(
    verified: Verified, num_verified: Tensor, finite: Tensor, draft_ids: Tensor, survival: Tensor
) -> Tensor:
    """Results of the sampling requests side by side.

    Args:
        verified: tokens [N, 1 + D] and accepted drafts [N].
        num_verified: [N] int64.
        finite: [N, 1 + D] bool.
        draft_ids: [N, D] int64.
        survival: [N, D] fp32; packed as the bits of fp64, in which every fp32 is exact.

    Returns:
        [N, 4 + 4 * D] int64.
    """
    columns = (
        verified.token_ids,
        verified.num_accepted.unsqueeze(1),
        num_verified.unsqueeze(1),
        finite.long(),
        draft_ids,
        survival.double().view(torch.int64),
    )
    return torch.cat(columns, dim=1)


def unpack_results(
    packed: Tensor,
    max_drafts: int,
    *,
    logprobs: HostLogprobs | None,
    prompt_logprobs: HostLogprobs | None,
) -> SamplerOutput:
    """Views of packed results.

    Args:
        packed: [N, 4 + 4 * D] int64 in host memory, perhaps not written yet.
        max_drafts: D.
        logprobs: of the sampled tokens.
        prompt_logprobs: of the prompt rows scored.
    """
    tokens, accepted, verified, finite, draft_ids, survival = packed.split(_widths(max_drafts), 1)
    return SamplerOutput(
        token_ids=tokens,
        num_accepted=accepted.squeeze(1),
        num_verified=verified.squeeze(1),
        finite=finite,
        draft_ids=draft_ids,
        survival=survival.view(torch.float64),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _widths(max_drafts: int) -> list[int]:
    return [1 + max_drafts, 1, 1, 1 + max_drafts, max_drafts, max_drafts]
