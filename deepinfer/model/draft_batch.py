"""What a draft pass takes and gives; everything stays on the device."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from deepinfer.device.ops.sampling import SampleParams


class DraftBatch(NamedTuple):
    """The anchors of R requests, in any order; all tensors on the device.

    Attributes:
        anchor_ids: [R] int64 last token of each request, valid ids in padding too.
        anchor_positions: [R] int64 its position, the first whose KV is not written yet.
        seq_slots: [R] int64 persistent slot of each request.
        floors: [R] int64 first position with a draft row: 0, or a replay start.
        valid: [R] bool; other requests are padding.
        params: how drafts are drawn: only temperature, seeds and sample indices count, because
            the acceptance test wants the drafter's plain softmax; None drafts greedily.
    """

    anchor_ids: Tensor
    anchor_positions: Tensor
    seq_slots: Tensor
    floors: Tensor
    valid: Tensor
    params: SampleParams | None = None


class Drafts(NamedTuple):
    """K drafts of R requests; rows of padding requests mean nothing.

    Attributes:
        tokens: [R, K] int64; draft k stands for position anchor + 1 + k.
        logits: [R, K, V] fp32 with the Markov bias, which the acceptance test has to see.
        confidence_logits: [R, K] fp32 as the head gives them.
        confidences: [R, K] fp32 calibrated probability that a draft is accepted if those before
            it are; it depends on earlier drafts, never on the draft itself.
    """

    tokens: Tensor
    logits: Tensor
    confidence_logits: Tensor
    confidences: Tensor
