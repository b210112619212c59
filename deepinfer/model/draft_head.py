"""Head of the drafter: base logits, the sequential Markov stage, confidences."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.handles import LinearWeight
from deepinfer.device.ops.sampling import Purpose, SampleParams, SampleWork
from deepinfer.model.config import ConfidenceInput, V41Config
from deepinfer.model.draft_batch import DraftBatch, Drafts
from deepinfer.model.draft_ops import DraftOps
from deepinfer.model.draft_stage import DraftState
from deepinfer.model.model_ops import ModelOps
from deepinfer.model.packing import Packer
from deepinfer.model.tracing import TraceSink


class DraftHead:
    """From the last stage's rows to drafts; row j of a block predicts position anchor + 1 + j."""

    def __init__(
        self,
        config: V41Config,
        ops: ModelOps,
        draft_ops: DraftOps,
        *,
        backend: Backend,
        weights: Packer,
        lm_head: LinearWeight,
    ) -> None:
        """Bind ops and pack weights; `weights` is at the last `mtp.N.`, the LM head is shared."""
        self._config, self._ops, self._draft_ops = config, ops, draft_ops
        self._lm_head = lm_head
        self._norm = weights.vector("norm.weight")
        self._markov_embedding = backend.pack_embedding(weights.stored("markov_head.embed.weight"))
        self._markov_head = weights.linear("markov_head.head.weight")
        self._confidence = weights.linear("confidence_head.proj.weight")

    def forward(
        self,
        state: DraftState,
        batch: DraftBatch,
        temperatures: Tensor,
        trace: TraceSink | None = None,
    ) -> Drafts:
        """Drafts of the first K rows of each block.

        Args:
            state: after the last stage, [R * B] rows.
            batch: the anchors.
            temperatures: [K] fp32 above 0, calibration of the confidences by place in the block.
            trace: receives hidden rows and results, or None.
        """
        num_seqs, num_drafts = batch.anchor_ids.shape[0], temperatures.shape[0]
        hidden = self._draft_ops.mhc_collapse(state.streams, state.pre)
        if trace is not None:
            trace.record("draft.hidden", hidden)
        rows = hidden.unflatten(0, (num_seqs, self._config.dspark_block_size))
        hidden = rows[:, :num_drafts].flatten(0, 1)
        normed = self._ops.rmsnorm(hidden, self._norm, self._config.rms_norm_eps)
        base = self._ops.linear_f32(normed, self._lm_head).unflatten(0, (num_seqs, num_drafts))
        tokens, logits, features = self._markov(base, batch)
        judged = normed
        if self._config.confidence_head_input is ConfidenceInput.PRE_NORM:
            judged = hidden
        confidence = self._draft_ops.draft_confidence(
            judged, features.flatten(0, 1), self._confidence, temperatures.repeat(num_seqs)
        )
        shape = (num_seqs, num_drafts)
        drafts = Drafts(
            tokens, logits, confidence.logit.view(shape), confidence.probability.view(shape)
        )
        if trace is not None:
            trace.record("draft.tokens", tokens.flatten().unsqueeze(1))
            trace.record("draft.logits", logits.flatten(0, 1))
            trace.record("draft.confidence_logits", confidence.logit.unsqueeze(1))
        return drafts

    def _markov(self, base: Tensor, batch: DraftBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [R, K], biased logits [R, K, V] and features [R, K, r], one place at a time."""
        previous = batch.anchor_ids
        tokens, logits, features = [], [], []
        for place in range(base.shape[1]):
            step = self._draft_ops.markov_step(
                base[:, place], previous, self._markov_embedding, self._markov_head
            )
            previous = self._draw(step.logits, batch, place)
            tokens.append(previous)
            logits.append(step.logits)
            features.append(step.features)
        return torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(features, 1)

    def _draw(self, logits: Tensor, batch: DraftBatch, place: int) -> Tensor:
        # A position is drafted again and again until a token stands there, and each time from a
        # number of its own: confidences of an earlier block have seen what was drawn there, and
        # with the same number again they would know a draft that a plan made from them judges.
        draws = batch.anchor_positions * self._config.dspark_block_size + place
        given = batch.params
        work = SampleWork.GREEDY if given is None else SampleWork.RANDOM
        zeros = logits.new_zeros(logits.shape[0])
        params = SampleParams(
            temperature=zeros if given is None else given.temperature,
            top_k=torch.zeros_like(draws),
            top_p=zeros + 1.0,
            min_p=zeros,
            seeds=torch.zeros_like(draws) if given is None else given.seeds,
            sample_index=torch.zeros_like(draws) if given is None else given.sample_index,
            positions=draws,
        )
        return self._draft_ops.sample_tokens(logits, params, work, purpose=Purpose.DRAFT)
