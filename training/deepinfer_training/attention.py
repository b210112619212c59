"""Attention of whole sequences: a tiled sliding window and the selected compressed rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from deepinfer_training import fake_quant, fused, indexer
from deepinfer_training.architecture import Architecture
from deepinfer_training.indexer import Selection, SelectionMode
from deepinfer_training.sequence_plan import SequencePlan
from deepinfer_training.weights import Weights

# The sink is one column; more keep the rows of the probabilities aligned.
_SINK_COLUMNS = 8


@dataclass(slots=True)
class Compressed:
    """What travels from a KV source to later layers.

    Attributes:
        rows: [B, S, C] compressed rows of the latest source.
        index_keys: [B, S, N] its index keys.
        chosen: [B, T, S] bool rows each query reads.
        candidates: [B, T, S] bool, or None.
        scores: for each index source its scores [B, T, S] fp32.
        attended: for each index source the attention on its rows, summed over heads and layers.
    """

    rows: Tensor | None
    index_keys: Tensor | None
    chosen: Tensor | None
    candidates: Tensor | None
    scores: dict[int, Tensor]
    attended: dict[int, Tensor]

    @classmethod
    def empty(cls) -> Compressed:
        """Before the first source."""
        return cls(None, None, None, None, {}, {})


def queries(x: Tensor, weights: Weights, prefix: str, arch: Architecture) -> tuple[Tensor, Tensor]:
    """Low-rank query input [..., q_lora_rank] and queries before rotation [..., H, C]."""
    low_rank = weights.linear(x, f"{prefix}wq_a.weight")
    low_rank = weights.rmsnorm(low_rank, f"{prefix}q_norm.weight", arch.rms_norm_eps)
    query = weights.linear(low_rank, f"{prefix}wq_b.weight")
    return low_rank, query.unflatten(-1, (arch.num_attention_heads, arch.head_dim))


def window_rows(
    x: Tensor, rotation: tuple[Tensor, Tensor], weights: Weights, prefix: str, arch: Architecture
) -> Tensor:
    """Window KV rows [..., C] as the cache gives them back; x [..., D]."""
    kv = weights.linear(x, f"{prefix}wkv.weight")
    kv = weights.rmsnorm(kv, f"{prefix}kv_norm.weight", arch.rms_norm_eps)
    kv = fused.rotate(kv, *rotation)
    return fake_quant.round_window_row(kv) if weights.numerics.quantize_activations else kv


def output(
    attended: Tensor,
    rotation: tuple[Tensor, Tensor],
    weights: Weights,
    prefix: str,
    arch: Architecture,
) -> Tensor:
    """[N, D] of attended values [..., H, C]: inverse rotation, grouped and final projection."""
    cos, sin = rotation
    turned = fused.rotate(attended, cos.unsqueeze(-2), -sin.unsqueeze(-2))
    groups = arch.o_groups
    grouped = turned.reshape(-1, groups, arch.num_attention_heads * arch.head_dim // groups)
    matrix = weights.matrix(f"{prefix}wo_a.weight").unflatten(0, (groups, -1))
    z = torch.bmm(grouped.transpose(0, 1), matrix.transpose(1, 2)).transpose(0, 1)
    return weights.linear(z.flatten(1), f"{prefix}wo_b.weight")


def sink_columns(weights: Weights, prefix: str) -> Tensor:
    """[H, columns] fp32: the sink logit and columns that take no part."""
    sink = weights.fp32(f"{prefix}attn_sink").unsqueeze(1)
    return pad(sink, (0, _SINK_COLUMNS - 1), value=-math.inf)


def attention(
    x: Tensor,
    layer: int,
    plan: SequencePlan,
    compressed: Compressed,
    weights: Weights,
    arch: Architecture,
    selection: Selection,
    *,
    wants_index_loss: bool,
) -> Tensor:
    """Output [B * T, D] of one layer; `compressed` is updated by sources.

    Args:
        x: [B * T, D] normed input.
        layer: backbone layer.
        plan: the batch.
        compressed: state that travels between layers.
        weights: parameters.
        arch: the model.
        selection: how rows are selected.
        wants_index_loss: keep scores and attention for the indexer's loss.
    """
    num_seqs, length = plan.ids.shape
    prefix, ratio = f"layers.{layer}.attn.", arch.compress_ratios[layer]
    cos, sin = plan.rotation(ratio)
    x = x.view(num_seqs, length, -1)
    low_rank, query = queries(x, weights, prefix, arch)
    query = fused.rotate(query, cos.unsqueeze(1), sin.unsqueeze(1))
    kv = window_rows(x, (cos, sin), weights, prefix, arch)
    if layer in arch.kv_source_layer_ids:
        _compress(x, layer, plan, compressed, weights, arch)
    if layer in arch.index_source_layer_ids:
        needs_scores = wants_index_loss or selection.mode in (
            SelectionMode.SPARSE,
            SelectionMode.RANDOM,
        )
        scores = None
        if needs_scores:
            assert compressed.index_keys is not None  # a source came first
            keys = compressed.index_keys
            scores = indexer.index_scores(x, low_rank, keys, plan, weights, layer, arch)
            if wants_index_loss:
                compressed.scores[layer] = scores
        compressed.chosen, compressed.candidates = indexer.select(
            scores if scores is None else scores.detach(),
            plan.visible[ratio],
            compressed.candidates,
            selection,
            layer,
            arch,
            precise=weights.numerics.precise,
        )
    after_source = layer > arch.kv_source_layer_ids[-1]
    bias = plan.cut_window_bias if after_source else plan.window_bias
    sink = sink_columns(weights, prefix)
    source = arch.index_source(layer)
    attended = _attend(
        query, kv, bias, sink, compressed if ratio else None, plan, arch, weights,
        source if wants_index_loss else None, ratio, selection,
    )  # fmt: skip
    return output(attended, (cos, sin), weights, prefix, arch)


def _compress(
    x: Tensor,
    layer: int,
    plan: SequencePlan,
    compressed: Compressed,
    weights: Weights,
    arch: Architecture,
) -> None:
    """Compressed rows and index keys of a source layer."""
    prefix, ratio = f"layers.{layer}.attn.", arch.compress_ratios[layer]
    pooled = weights.linear_fp32(x, f"{prefix}compressor.wkv.weight")
    if ratio > 1:
        gate = weights.linear_fp32(x, f"{prefix}compressor.wgate.weight")
        share = torch.softmax(gate.unflatten(1, (-1, ratio)), dim=2)
        pooled = (share * pooled.unflatten(1, (-1, ratio))).sum(2)
    pooled = pooled.to(weights.numerics.dtype)
    latent = weights.rmsnorm(pooled, f"{prefix}compressor.norm.weight", arch.rms_norm_eps)
    # An entry stands at the position of its group's first token.
    cos, sin = (table[::ratio] for table in plan.rotation(ratio))
    rows = fused.rotate(latent, cos, sin)
    keys = weights.linear(latent.detach(), f"{prefix}indexer.wk.weight")
    keys = weights.rmsnorm(keys, f"{prefix}indexer.k_norm.weight", arch.rms_norm_eps)
    keys = fused.rotate(keys, cos, sin)
    if weights.numerics.quantize_activations:
        rows, keys = fake_quant.round_compressed_row(rows), fake_quant.round_index_row(keys)
    compressed.rows, compressed.index_keys = rows, keys


def softmax_parts(scores: Tensor, weights: Weights) -> tuple[Tensor, Tensor | None]:
    """Probabilities and what products with them are still to be divided by, if anything.

    The engine rounds exponentials before it divides; torch's softmax divides first, and is faster.

    Args:
        scores: [..., keys + sink columns].
        weights: their numerics decide.
    """
    if not weights.numerics.precise:
        return torch.softmax(scores, dim=-1), None
    real = scores[..., :-_SINK_COLUMNS]
    parts = torch.exp(scores - real.amax(-1, keepdim=True))
    return parts.to(weights.numerics.dtype), parts.sum(-1, keepdim=True)


def product(probability: Tensor, keys: Tensor, weights: Weights) -> Tensor:
    """probability @ keys, in fp32 where the engine's rounding matters."""
    if weights.numerics.precise:
        return probability.float() @ keys.float()
    return probability @ keys


def divided(result: Tensor, total: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Second half of `softmax_parts`, after the product."""
    return result.to(dtype) if total is None else (result / total).to(dtype)


def _attend(
    query: Tensor,
    kv: Tensor,
    window_bias: Tensor,
    sink: Tensor,
    compressed: Compressed | None,
    plan: SequencePlan,
    arch: Architecture,
    weights: Weights,
    index_source: int | None,
    ratio: int,
    selection: Selection,
) -> Tensor:
    """Attended values [B, T, H, C]; adds to `compressed.attended[index_source]`."""
    num_seqs, length, heads, width = query.shape
    window = arch.sliding_window
    dtype = torch.float32 if weights.numerics.precise else weights.numerics.dtype
    tiles = kv.view(num_seqs, length // window, window, width)
    before = pad(tiles, (0, 0, 0, 0, 1, 0))[:, :-1]
    window_keys = torch.cat((before, tiles), dim=2)  # [B, tiles, 2 W, C]
    scaled = query.to(dtype) * width**-0.5
    by_tile = scaled.reshape(num_seqs, length // window, window * heads, width)
    scores = by_tile @ window_keys.to(dtype).transpose(-1, -2)
    parts = [scores.view(num_seqs, length, heads, 2 * window) + window_bias.unsqueeze(2)]
    row_scores = None
    if compressed is not None:
        assert compressed.rows is not None
        assert compressed.chosen is not None
        flat = scaled.reshape(num_seqs, length * heads, width)
        row_scores = flat @ compressed.rows.to(dtype).transpose(1, 2)
        row_scores = row_scores.view(num_seqs, length, heads, -1)
        parts.append(row_scores + plan.bias(compressed.chosen).unsqueeze(2))
    parts.append(sink.to(dtype).view(1, 1, heads, -1).expand(num_seqs, length, -1, -1))
    probability, total = softmax_parts(torch.cat(parts, dim=-1), weights)
    near = probability[..., : 2 * window]
    near = near.reshape(num_seqs, length // window, window * heads, 2 * window)
    result = product(near, window_keys, weights).view(num_seqs, length, heads, width)
    if compressed is None or row_scores is None:
        return divided(result, total, query.dtype)
    assert compressed.rows is not None
    far = probability[..., 2 * window : -_SINK_COLUMNS]
    flat_far = far.reshape(num_seqs, length * heads, -1)
    result = result + product(flat_far, compressed.rows, weights).view_as(result)
    result = divided(result, total, query.dtype)
    if index_source is not None:
        with torch.no_grad():
            if selection.mode is not SelectionMode.DENSE:
                # What it would attend to if it saw everything: the indexer's target.
                parts[1] = row_scores + plan.bias(plan.visible[ratio]).unsqueeze(2)
                everything = torch.softmax(torch.cat(parts, dim=-1), dim=-1)
                far = everything[..., 2 * window : -_SINK_COLUMNS]
            elif total is not None:
                far = far / total
            mass = far.sum(2, dtype=torch.float32)
            held = compressed.attended.get(index_source)
            compressed.attended[index_source] = mass if held is None else held + mass
    return result
