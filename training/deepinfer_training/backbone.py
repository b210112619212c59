"""The backbone's forward over whole packed sequences, for training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from deepinfer_training import attention, engram, indexer, mhc, moe
from deepinfer_training.architecture import Architecture
from deepinfer_training.attention import Compressed
from deepinfer_training.fake_quant import Numerics
from deepinfer_training.indexer import Selection
from deepinfer_training.sequence_plan import SequencePlan
from deepinfer_training.weights import Weights


class BackboneOutput(NamedTuple):
    """Result of a forward.

    Attributes:
        hidden: [B, T, D] after the final norm.
        taps: [B, T, taps * D] what the drafter's projection receives.
        loads: [L, E] fp32 tokens routed to each expert.
        balance: sequence-wise balance loss, mean over layers.
        index_loss: divergence of the indexers, summed over sources; 0 unless wanted.
        caught: [sources] share of attention that the index top-k catches; empty unless wanted.
    """

    hidden: Tensor
    taps: Tensor
    loads: Tensor
    balance: Tensor
    index_loss: Tensor
    caught: Tensor


def forward(
    parameters: Mapping[str, Tensor],
    arch: Architecture,
    plan: SequencePlan,
    numerics: Numerics,
    selection: Selection,
    *,
    wants_index_loss: bool = False,
    streams_sink: list[Tensor] | None = None,
) -> BackboneOutput:
    """Run the backbone; issues device work only, so that it can be captured.

    Args:
        parameters: trainable parameters of the backbone.
        arch: the model.
        plan: the batch.
        numerics: what is rounded.
        selection: which compressed rows are read.
        wants_index_loss: compute the indexer's loss too.
        streams_sink: receives the streams [B * T, m, D] entering every layer, and the last ones.
    Source: backbone forward of V4.1.
    """
    weights = Weights(parameters, numerics)
    num_seqs, length = plan.ids.shape
    num_rows = num_seqs * length
    streams = weights.rows(plan.ids.flatten(), "embed.weight")
    streams = streams.unsqueeze(1).expand(-1, arch.hc_mult, -1).contiguous()
    pre = mhc.first_pre(num_rows, arch, streams.device)
    compressed = Compressed.empty()
    valid = plan.valid.flatten().unsqueeze(1)
    loads, balance, taps = [], streams.new_zeros((), dtype=torch.float32), []
    for layer in range(arch.num_hidden_layers):
        prefix = f"layers.{layer}."
        if streams_sink is not None:
            streams_sink.append(streams)
        if layer in arch.engram_layer_ids:
            rows = plan.engram_rows[arch.engram_layer_ids.index(layer)].flatten(0, 1)
            streams = engram.inject(streams, rows, weights, f"{prefix}engram.", arch)
        if layer in arch.dspark_target_layer_ids:
            taps.append(streams.float().mean(1).to(streams.dtype))
        mixed = mhc.mix(streams, weights, f"{prefix}hc_attn", arch)
        x = mhc.collapse_norm(streams, pre, weights, f"{prefix}attn_norm.weight", arch)
        y = attention.attention(
            x, layer, plan, compressed, weights, arch, selection,
            wants_index_loss=wants_index_loss,
        )  # fmt: skip
        streams = mhc.expand(y, streams, mixed)
        mixed_ffn = mhc.mix(streams, weights, f"{prefix}hc_ffn", arch)
        x = mhc.collapse_norm(streams, mixed.pre, weights, f"{prefix}ffn_norm.weight", arch)
        routed = moe.moe(
            x, weights, f"{prefix}ffn.", arch, experts_per_tok=arch.num_experts_per_tok
        )
        streams = mhc.expand(routed.y, streams, mixed_ffn)
        pre = mixed_ffn.pre
        loads.append((routed.chosen * valid).sum(0).detach())
        balance = balance + moe.balance_loss(routed, num_seqs, arch.num_experts_per_tok)
    if streams_sink is not None:
        streams_sink.append(streams)
    hidden = mhc.collapse_norm(streams, pre, weights, "norm.weight", arch)
    index_loss, caught = hidden.new_zeros((), dtype=torch.float32), []
    for source, scores in compressed.scores.items():
        visible = plan.visible[arch.compress_ratios[source]]
        attended = compressed.attended[source]
        loss, share = indexer.indexer_loss(scores, attended, visible, plan.valid, arch)
        index_loss = index_loss + loss
        caught.append(share)
    return BackboneOutput(
        hidden.view(num_seqs, length, -1),
        torch.cat(taps, dim=-1).view(num_seqs, length, -1) if taps else hidden.new_zeros(0),
        torch.stack(loads),
        balance / arch.num_hidden_layers,
        index_loss,
        torch.stack(caught) if caught else hidden.new_zeros(0),
    )


def logits(parameters: Mapping[str, Tensor], hidden: Tensor, numerics: Numerics) -> Tensor:
    """fp32 logits [..., V] of final hidden rows [..., D]."""
    weights = Weights(parameters, numerics)
    if numerics.precise:
        return weights.linear_fp32(hidden, "head.weight")
    return linear(hidden, weights.matrix("head.weight")).float()
