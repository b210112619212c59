"""The DSpark drafter over anchors of whole sequences: block pass, Markov stage, confidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.device.errors import ConfigError
from deepinfer_training import attention, fused, mhc, moe
from deepinfer_training.architecture import Architecture
from deepinfer_training.fake_quant import Numerics
from deepinfer_training.parameters import Part, initial_parameters, parameter_shapes
from deepinfer_training.weights import Weights


class Anchors(NamedTuple):
    """Where blocks are drafted.

    Attributes:
        positions: [B, A] int64; the token there is known, its successors are drafted.
        documents: [B, T] int64; a block's context ends where it changes.
        rotation: (cos, sin) of the window-only layers, T + G positions or more.
    """

    positions: Tensor
    documents: Tensor
    rotation: tuple[Tensor, Tensor]


class Block(NamedTuple):
    """Result of the block pass.

    Attributes:
        head_hidden: [B, A, G, D] collapsed rows before the final norm.
        base_logits: [B, A, G, V] fp32, without Markov bias.
        loads: [stages, E] fp32 rows routed to each draft expert.
    """

    head_hidden: Tensor
    base_logits: Tensor
    loads: Tensor


def initial_drafter(
    backbone: Mapping[str, Tensor], arch: Architecture, seed: int, device: torch.device
) -> dict[str, Tensor]:
    """Fresh drafter whose blocks start as the backbone's last layers where shapes allow.

    Args:
        backbone: trained backbone parameters.
        arch: the model.
        seed: of what is random.
        device: where the parameters live.
    """
    parameters = initial_parameters(arch, Part.DRAFTER, seed, device)
    shapes = parameter_shapes(arch, Part.DRAFTER)
    stages = arch.num_nextn_predict_layers
    for stage in range(stages):
        layer = arch.num_hidden_layers - stages + stage
        for name, shape in shapes.items():
            source = backbone.get(name.replace(f"mtp.{stage}.", f"layers.{layer}."))
            if not name.startswith(f"mtp.{stage}.") or source is None or source.dim() != len(shape):
                continue
            # A drafter has fewer experts: it takes the first ones.
            kept = source.detach()[: shape[0]]
            if tuple(kept.shape) == shape and not name.endswith("gate.bias"):
                parameters[name] = kept.clone().requires_grad_(True)
    return parameters


def block_pass(
    parameters: Mapping[str, Tensor],
    arch: Architecture,
    ids: Tensor,
    taps: Tensor,
    anchors: Anchors,
    numerics: Numerics,
) -> Block:
    """Draft a block at every anchor, all rows at once.

    Args:
        parameters: of the drafter and the backbone's embedding and head.
        arch: the model.
        ids: [B, T] int64.
        taps: [B, T, taps * D] from the backbone's forward on `ids`.
        anchors: where.
        numerics: what is rounded.
    Source: DSpark, context injection and block pass.
    """
    weights = Weights(parameters, numerics)
    num_seqs, length = ids.shape
    num_anchors, size = anchors.positions.shape[1], arch.dspark_block_size
    window, width, heads = arch.sliding_window, arch.head_dim, arch.num_attention_heads
    device = ids.device
    cos, sin = anchors.rotation
    main = weights.linear(taps, "mtp.0.main_proj.weight")
    main = weights.rmsnorm(main, "mtp.0.main_norm.weight", arch.rms_norm_eps)

    positions = anchors.positions.unsqueeze(-1)
    context = positions - window + torch.arange(window, device=device)  # [B, A, W]
    flat = context.clamp_min(0).flatten(1)
    own = anchors.documents.gather(1, anchors.positions).unsqueeze(-1)
    present = (context >= 0) & (anchors.documents.gather(1, flat).view_as(context) == own)
    absent = torch.cat(
        (~present, torch.zeros((num_seqs, num_anchors, size), dtype=torch.bool, device=device)), -1
    )

    tokens = torch.full((num_seqs, num_anchors, size), arch.dspark_noise_token_id, device=device)
    tokens[..., 0] = ids.gather(1, anchors.positions)
    row_positions = positions + torch.arange(size, device=device)  # [B, A, G]
    rotation = cos[row_positions], sin[row_positions]
    streams = weights.rows(tokens.flatten(), "embed.weight")
    streams = streams.unsqueeze(1).expand(-1, arch.hc_mult, -1).contiguous()
    pre = mhc.first_pre(streams.shape[0], arch, device)
    loads = []
    for stage in range(arch.num_nextn_predict_layers):
        prefix = f"mtp.{stage}."
        attn = f"{prefix}attn."
        mixed = mhc.mix(streams, weights, f"{prefix}hc_attn", arch)
        x = mhc.collapse_norm(streams, pre, weights, f"{prefix}attn_norm.weight", arch)
        x = x.view(num_seqs, num_anchors, size, -1)
        injected = attention.window_rows(main, (cos[:length], sin[:length]), weights, attn, arch)
        near = injected.gather(1, flat.unsqueeze(-1).expand(-1, -1, width))
        near = near.view(num_seqs, num_anchors, window, width)
        keys = torch.cat((near, attention.window_rows(x, rotation, weights, attn, arch)), dim=2)
        _, query = attention.queries(x, weights, attn, arch)
        query = fused.rotate(query, rotation[0].unsqueeze(-2), rotation[1].unsqueeze(-2))
        attended = _attend(query, keys, absent, attention.sink_columns(weights, attn), weights)
        y = attention.output(
            attended.view(num_seqs, num_anchors, size, heads, width), rotation, weights, attn, arch
        )
        streams = mhc.expand(y, streams, mixed)
        mixed_ffn = mhc.mix(streams, weights, f"{prefix}hc_ffn", arch)
        x = mhc.collapse_norm(streams, mixed.pre, weights, f"{prefix}ffn_norm.weight", arch)
        routed = moe.moe(
            x, weights, f"{prefix}ffn.", arch, experts_per_tok=arch.dspark_num_experts_per_tok
        )
        streams = mhc.expand(routed.y, streams, mixed_ffn)
        pre = mixed_ffn.pre
        loads.append(routed.chosen.sum(0).detach())
    hidden = fused.collapse(streams, pre)
    last = f"mtp.{arch.num_nextn_predict_layers - 1}."
    normed = weights.rmsnorm(hidden, f"{last}norm.weight", arch.rms_norm_eps)
    if numerics.precise:
        base = weights.linear_fp32(normed, "head.weight")
    else:
        base = weights.linear(normed, "head.weight").float()
    shape = (num_seqs, num_anchors, size, -1)
    return Block(hidden.view(shape), base.view(shape), torch.stack(loads))


def _attend(query: Tensor, keys: Tensor, absent: Tensor, sink: Tensor, weights: Weights) -> Tensor:
    """[B, A, G, H, C] attended values; every row of a block sees the same keys [B, A, W + G, C]."""
    num_seqs, num_anchors, size, heads, width = query.shape
    numerics = weights.numerics
    dtype = torch.float32 if numerics.precise else numerics.dtype
    flat = query.to(dtype).reshape(num_seqs, num_anchors, size * heads, width) * width**-0.5
    scores = flat @ keys.to(dtype).transpose(-1, -2)
    scores = scores.masked_fill(absent.unsqueeze(2), -torch.inf)
    sinks = sink.to(dtype).repeat(size, 1).expand(num_seqs, num_anchors, -1, -1)
    probability, total = attention.softmax_parts(torch.cat((scores, sinks), dim=-1), weights)
    kept = probability[..., : keys.shape[2]]
    return attention.divided(attention.product(kept, keys, weights), total, numerics.dtype)


def markov_rows(parameters: Mapping[str, Tensor], arch: Architecture, tokens: Tensor,
                numerics: Numerics) -> Tensor:  # fmt: skip
    """Markov embedding [..., rank] of the token before a slot, fp32."""
    name = f"mtp.{arch.num_nextn_predict_layers - 1}.markov_head.embed.weight"
    return Weights(parameters, numerics).rows(tokens, name).float()


def markov_bias(parameters: Mapping[str, Tensor], arch: Architecture, rows: Tensor,
                numerics: Numerics) -> Tensor:  # fmt: skip
    """Bias [..., V] fp32 that Markov embedding rows [..., rank] add to the base logits."""
    name = f"mtp.{arch.num_nextn_predict_layers - 1}.markov_head.head.weight"
    weights = Weights(parameters, numerics)
    return (
        weights.linear_fp32(rows, name) if numerics.precise else weights.linear(rows, name).float()
    )


def confidence_features(parameters: Mapping[str, Tensor], arch: Architecture, head_hidden: Tensor,
                        rows: Tensor, numerics: Numerics) -> Tensor:  # fmt: skip
    """[..., D + rank] fp32 what the confidence head reads: a block row, and the token before it.

    Args:
        parameters: of the drafter.
        arch: the model; says whether the row comes before or after the final norm.
        head_hidden: [..., D] rows before the final norm.
        rows: [..., rank] fp32 Markov embedding of the token before.
        numerics: what is rounded.
    """
    if arch.confidence_head_input == "post_norm":
        name = f"mtp.{arch.num_nextn_predict_layers - 1}.norm.weight"
        head_hidden = Weights(parameters, numerics).rmsnorm(head_hidden, name, arch.rms_norm_eps)
    return torch.cat((head_hidden.float(), rows), dim=-1)


def confidence_logits(parameters: Mapping[str, Tensor], arch: Architecture, features: Tensor,
                      numerics: Numerics) -> Tensor:  # fmt: skip
    """[...] fp32 logit of the confidence for `confidence_features` [..., D + rank]."""
    return Weights(parameters, numerics).linear_fp32(features, confidence_name(arch)).squeeze(-1)


def confidence_name(arch: Architecture) -> str:
    """Name of the confidence head's weight [1, D + rank]."""
    return f"mtp.{arch.num_nextn_predict_layers - 1}.confidence_head.proj.weight"


class Drafts(NamedTuple):
    """Greedy drafts of every anchor.

    Attributes:
        tokens: [B, A, G] int64.
        confidence_logits: [B, A, G] fp32.
        logits: [B, A, G, V] fp32, Markov bias included.
        features: [B, A, G, D + rank] fp32, what the confidence head reads.
    """

    tokens: Tensor
    confidence_logits: Tensor
    logits: Tensor
    features: Tensor


@torch.no_grad()
def draft_greedily(
    parameters: Mapping[str, Tensor],
    arch: Architecture,
    ids: Tensor,
    taps: Tensor,
    anchors: Anchors,
    numerics: Numerics,
) -> Drafts:
    """Drafts as the engine makes them: each slot is biased by the draft before it.

    Args: as `block_pass`.
    """
    block = block_pass(parameters, arch, ids, taps, anchors, numerics)
    previous = ids.gather(1, anchors.positions)
    tokens, confidences, biased, features = [], [], [], []
    for slot in range(arch.dspark_block_size):
        rows = markov_rows(parameters, arch, previous, numerics)
        logits = block.base_logits[:, :, slot] + markov_bias(parameters, arch, rows, numerics)
        hidden = block.head_hidden[:, :, slot]
        features.append(confidence_features(parameters, arch, hidden, rows, numerics))
        confidences.append(confidence_logits(parameters, arch, features[-1], numerics))
        previous = logits.argmax(-1)
        tokens.append(previous)
        biased.append(logits)
    return Drafts(*(torch.stack(each, 2) for each in (tokens, confidences, biased, features)))


@dataclass(frozen=True, slots=True)
class DraftObjective:
    """What is minimised, beside the confidence's cross entropy.

    Attributes:
        cross_entropy: weight of the true token's cross entropy.
        distance: weight of the L1 distance to the target's distribution, what rejection sampling
            refuses twice over.
        sharp_distance: weight of the same between both distributions at `sharp_temperature`: the
            lower, the nearer to whether greedy decoding agrees.
        sharp_temperature: above 0.
    """

    cross_entropy: float = 0.1
    distance: float = 0.9
    sharp_distance: float = 0.0
    sharp_temperature: float = 0.4

    def __post_init__(self) -> None:
        for field in fields(self):
            if not (value := getattr(self, field.name)) >= 0.0:
                raise ConfigError(f"{field.name} is {value}; expected a number from 0")
        if self.sharp_temperature == 0.0:
            raise ConfigError("sharp_temperature is 0; expected a number above 0")


class DraftLoss(NamedTuple):
    """Losses of a batch of anchors and what they say about acceptance.

    Attributes:
        total: what is minimised.
        cross_entropy: weighted mean over slots.
        total_variation: weighted mean of the L1 distance to the target's distribution.
        confidence: weighted mean of the confidence head's cross entropy.
        acceptance: [G] mean overlap with the target's distribution, per slot.
        loads: [stages, E].
    """

    total: Tensor
    cross_entropy: Tensor
    total_variation: Tensor
    confidence: Tensor
    acceptance: Tensor
    loads: Tensor


def draft_loss(
    parameters: Mapping[str, Tensor],
    arch: Architecture,
    ids: Tensor,
    taps: Tensor,
    target_logits: Tensor,
    anchors: Anchors,
    numerics: Numerics,
    objective: DraftObjective,
) -> DraftLoss:
    """Loss of drafting the true continuation of every anchor.

    Args:
        parameters: of the drafter and the backbone's embedding and head.
        arch: the model.
        ids: [B, T] int64; anchors lie at most at T - block size - 1.
        taps: as in `block_pass`.
        target_logits: [B, A, G, V] fp32 of the frozen target at the anchor and the tokens after it.
        anchors: where.
        numerics: what is rounded.
        objective: weights.
    Source: DSpark training recipe: 0.1 CE + 0.9 L1 + BCE of the confidence, decaying by slot.
    """
    size = arch.dspark_block_size
    block = block_pass(parameters, arch, ids, taps, anchors, numerics)
    offsets = torch.arange(size, device=ids.device)
    before = (anchors.positions.unsqueeze(-1) + offsets).flatten(1)
    previous = ids.gather(1, before).view(*anchors.positions.shape, size)
    label = ids.gather(1, before + 1).view_as(previous)
    own = anchors.documents.gather(1, anchors.positions).unsqueeze(-1)
    same = anchors.documents.gather(1, before + 1).view_as(previous) == own
    valid = (same & (label != arch.pad_token_id)).float().cumprod(-1)
    weight = valid * torch.exp(-offsets / 4.0)
    weight = weight / weight.sum().clamp_min(1.0)

    rows = markov_rows(parameters, arch, previous, numerics)
    logits = block.base_logits + markov_bias(parameters, arch, rows, numerics)
    log_share = torch.log_softmax(logits, dim=-1)
    target = torch.softmax(target_logits, dim=-1)
    cross_entropy = -log_share.gather(-1, label.unsqueeze(-1)).squeeze(-1)
    distance = (log_share.exp() - target).abs().sum(-1)
    overlap = 1.0 - 0.5 * distance.detach()
    # The head must not shape the rows it reads.
    with torch.no_grad():
        features = confidence_features(parameters, arch, block.head_hidden, rows, numerics)
    logit = confidence_logits(parameters, arch, features, numerics)
    surprise = torch.nn.functional.binary_cross_entropy_with_logits(
        logit, overlap.clamp(0.0, 1.0), reduction="none"
    )
    parts = [(each * weight).sum() for each in (cross_entropy, distance, surprise)]
    acceptance = (overlap * valid).sum((0, 1)) / valid.sum((0, 1)).clamp_min(1.0)
    total = objective.cross_entropy * parts[0] + objective.distance * parts[1] + parts[2]
    if objective.sharp_distance:
        warmth = objective.sharp_temperature
        sharp = torch.softmax(logits / warmth, dim=-1) - torch.softmax(target_logits / warmth, -1)
        total = total + objective.sharp_distance * (sharp.abs().sum(-1) * weight).sum()
    return DraftLoss(total, parts[0], parts[1], parts[2], acceptance, block.loads)
