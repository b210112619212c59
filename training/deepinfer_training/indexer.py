"""Which compressed rows a query reads: scores, top-k, candidate blocks, and the indexer's loss."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from deepinfer_training import fake_quant, fused
from deepinfer_training.architecture import Architecture
from deepinfer_training.sequence_plan import SequencePlan
from deepinfer_training.weights import Weights


class SelectionMode(enum.Enum):
    """Dense reads all visible rows; none and random are controls of an evaluation."""

    DENSE = "dense"
    SPARSE = "sparse"
    NONE = "none"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Selection:
    """How rows are selected.

    Attributes:
        mode: by what.
        topk: rows of one query.
        candidate_blocks: blocks that the candidate source publishes.
    """

    mode: SelectionMode
    topk: int
    candidate_blocks: int

    @classmethod
    def of(cls, arch: Architecture, mode: SelectionMode) -> Selection:
        """Selection as the architecture states it."""
        return cls(mode, arch.index_topk, arch.candidate_topk_blocks)


def index_scores(
    x: Tensor,
    low_rank: Tensor,
    keys: Tensor,
    plan: SequencePlan,
    weights: Weights,
    layer: int,
    arch: Architecture,
) -> Tensor:
    """Scores [B, T, S] fp32 of every query against index keys [B, S, N].

    Inputs are detached: the indexer learns from its own loss only.
    """
    num_seqs, length = plan.ids.shape
    heads, width = arch.index_n_heads, arch.index_head_dim
    prefix = f"layers.{layer}.attn.indexer."
    query = weights.linear(low_rank.detach(), f"{prefix}wq_b.weight")
    query = query.view(num_seqs, length, heads, width)
    cos, sin = plan.rotation(arch.compress_ratios[layer])
    query = fused.rotate(query, cos.unsqueeze(1), sin.unsqueeze(1))
    if weights.numerics.quantize_activations:
        query = fake_quant.round_index_row(query)
    head_weights = weights.linear(x.detach(), f"{prefix}weights_proj.weight")
    head_weights = head_weights.view(num_seqs, length, heads) * (width**-0.5 * heads**-0.5)
    dots = query.reshape(num_seqs, length * heads, width) @ keys.transpose(1, 2)
    scores = fused.index_scores(dots.view(num_seqs, length, heads, -1), head_weights)
    if weights.numerics.precise:
        scores = scores.to(weights.numerics.dtype).float()
    return scores


def _best(scores: Tensor, count: int, precise: bool) -> Tensor:
    """Mask of the best `count` columns of each row; -inf is never chosen."""
    count = min(count, scores.shape[-1])
    if precise:  # the engine takes the lowest index among equals
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
        kept = scores.gather(-1, order) > -math.inf
    else:
        values, order = scores.topk(count, dim=-1)
        kept = values > -math.inf
    return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter_(
        -1, order, kept
    )


@torch.no_grad()
def select(
    scores: Tensor | None,
    visible: Tensor,
    candidates: Tensor | None,
    selection: Selection,
    layer: int,
    arch: Architecture,
    *,
    precise: bool,
) -> tuple[Tensor, Tensor | None]:
    """Rows each query reads, and the candidates that later layers search.

    Args:
        scores: [B, T, S] fp32; None where the mode needs none.
        visible: [B, T, S] bool.
        candidates: [B, T, S] bool of an earlier candidate source, or None.
        selection: mode and sizes.
        layer: index source.
        arch: the model.
        precise: break ties as the engine does.

    Returns:
        [B, T, S] bool chosen, and candidates.
    """
    if selection.mode is SelectionMode.DENSE:
        return visible, candidates
    if selection.mode is SelectionMode.NONE or scores is None:
        return torch.zeros_like(visible), candidates
    if selection.mode is SelectionMode.RANDOM:
        scores = torch.rand_like(scores)
    scores = scores.masked_fill(~visible, -math.inf)
    source = arch.candidate_source_layer_id
    if layer == source:
        candidates = _candidates(scores, visible, selection, arch, precise)
    elif layer > source >= 0 and candidates is not None:
        scores = scores.masked_fill(~candidates, -math.inf)
    return _best(scores, selection.topk, precise), candidates


def _candidates(
    scores: Tensor, visible: Tensor, selection: Selection, arch: Architecture, precise: bool
) -> Tensor:
    size, rows = arch.candidate_block_size, scores.shape[-1]
    num_blocks = -(-rows // size)
    padded = pad(scores, (0, num_blocks * size - rows), value=-math.inf)
    best = padded.unflatten(-1, (num_blocks, size)).amax(-1)
    # The newest block is always kept; documents need not start at row 0, so look at the mask.
    numbers = torch.arange(1, rows + 1, dtype=torch.int32, device=scores.device)
    newest = (visible * numbers).amax(-1)
    block = torch.arange(num_blocks, device=scores.device)
    is_newest = (block == ((newest - 1) // size).unsqueeze(-1)) & (newest > 0).unsqueeze(-1)
    kept = _best(best.masked_fill(is_newest, math.inf), selection.candidate_blocks, precise)
    return kept.repeat_interleave(size, dim=-1)[..., :rows]


def indexer_loss(
    scores: Tensor, attended: Tensor, visible: Tensor, valid: Tensor, arch: Architecture
) -> tuple[Tensor, Tensor]:
    """Divergence of one source's scores from the attention that reads its selection.

    Args:
        scores: [B, T, S] fp32.
        attended: [B, T, S] fp32 attention on the rows, summed over heads and reading layers;
            carries no gradient.
        visible: [B, T, S] bool.
        valid: [B, T] bool.
        arch: the model.

    Returns:
        KL(attention || softmax of scores), mean over queries with more rows than top-k; and the
        share of the attention that the top-k scores catch, of the same queries.
    """
    crowded = ((visible.sum(-1) > arch.index_topk) & valid).float()
    queries = crowded.sum().clamp_min(1.0)
    target = attended / attended.sum(-1, keepdim=True).clamp_min(1e-9)
    log_share = torch.log_softmax(scores.masked_fill(~visible, -1e9), dim=-1)
    divergence = (torch.xlogy(target, target) - target * log_share).sum(-1)
    with torch.no_grad():
        masked = scores.masked_fill(~visible, -math.inf)
        best = masked.topk(min(arch.index_topk, masked.shape[-1]), dim=-1).indices
        caught = (target.gather(-1, best).sum(-1) * crowded).sum() / queries
    return (divergence * crowded).sum() / queries, caught
