"""Samples with the widths of DeepSeek-V4.1-Flash and few rows; the suite runs them under --full.

Experts and vocabulary are cut down, so that the reference computes every sample in seconds and
any device has room: 4 of 384 experts, an eighth of the head's rows.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer.device.backend import CacheKind
from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpSpec
from deepinfer.device.ops import attention, engram, indexer, kv, mhc, moe, norm, quant, sampling
from deepinfer.device.ops.mhc import MhcMix
from deepinfer.device.ops.moe import Routing
from deepinfer.device.samples import draws
from deepinfer.device.samples.canonical import (
    CanonicalBatch,
    CanonicalExperts,
    CanonicalGrouped,
    CanonicalLinear,
    CanonicalMhc,
)
from deepinfer.device.samples.registry import Arguments, Builder, Sample, declare_sample
from deepinfer.device.weights import WeightFormat

FULL = 2
"""Level of these samples, see `Sample.level`."""

_HIDDEN, _HEADS, _HEAD_DIM, _ROTATED = 5120, 64, 512, 64
_Q_RANK, _O_GROUPS, _O_RANK = 1280, 8, 1024
_WINDOW, _TOPK = 128, 512
_INDEX_HEADS, _INDEX_DIM = 32, 128
_STREAMS, _ITERS, _EPS, _HC_EPS = 4, 20, 1e-20, 1e-6
_EXPERTS, _CHOSEN, _INNER, _LIMIT = 384, 6, 2304, 10.0
_FEW_EXPERTS = 4
_VOCAB = 129280
_POSITIONS = 4096
_FP8, _BF16 = WeightFormat.FP8_TILE32, WeightFormat.BF16


def _linear(rows: int, inner: int, *outputs: int, fmt: WeightFormat) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        x = draws.normal(generator, rows, inner, dtype=draws.activation_dtype(numerics))
        parts = tuple(draws.matrix(generator, n, inner, fmt) for n in outputs)
        return {"x": x, "weight": CanonicalLinear(parts)}

    return build


def _grouped(generator: torch.Generator, numerics: Numerics) -> Arguments:
    inner = _HEADS * _HEAD_DIM // _O_GROUPS
    x = draws.normal(generator, 16, _O_GROUPS, inner, dtype=draws.activation_dtype(numerics))
    weight = draws.matrix(generator, _O_GROUPS * _O_RANK, inner, _FP8)
    return {"x": x, "weight": CanonicalGrouped(weight, _O_GROUPS)}


def _norm(generator: torch.Generator, numerics: Numerics) -> Arguments:
    x = draws.normal(generator, 64, _HIDDEN, dtype=draws.activation_dtype(numerics))
    return {"x": x, "weight": draws.norm_weight(generator, _HIDDEN), "eps": _EPS}


def _positions(generator: torch.Generator, rows: int) -> torch.Tensor:
    return draws.integers(generator, _POSITIONS, rows)


def _rope(generator: torch.Generator, numerics: Numerics) -> Arguments:
    dtype = draws.activation_dtype(numerics)
    return {
        "x": draws.normal(generator, 32, _HEADS, _HEAD_DIM, dtype=dtype),
        "positions": _positions(generator, 32),
        "rope_table": draws.rope_table(_POSITIONS, _ROTATED),
        "inverse": False,
    }


def _store(kind: CacheKind, width: int) -> Builder:
    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        return {
            "x": draws.normal(generator, 48, width, dtype=draws.activation_dtype(numerics)),
            "positions": _positions(generator, 48),
            "slots": torch.randperm(256, generator=generator)[:48],
            "rope_table": draws.rope_table(_POSITIONS, _ROTATED),
            "cache": draws.cache(generator, numerics, kind=kind, num_rows=256, width=width),
        }

    return build


def _attention(generator: torch.Generator, numerics: Numerics) -> Arguments:
    rows, dtype = 8, draws.activation_dtype(numerics)

    def slots(width: int, num_rows: int) -> torch.Tensor:
        return torch.stack(
            [torch.randperm(num_rows, generator=generator)[:width] for _ in range(rows)]
        )

    def cache(kind: CacheKind, num_rows: int) -> object:
        return draws.cache(generator, numerics, kind=kind, num_rows=num_rows, width=_HEAD_DIM)

    return {
        "q": draws.normal(generator, rows, _HEADS, _HEAD_DIM, dtype=dtype),
        "window": cache(CacheKind.WINDOW, 256),
        "window_slots": slots(_WINDOW, 256),
        "compressed": cache(CacheKind.COMPRESSED, 1024),
        "compressed_slots": slots(_TOPK, 1024),
        "sink": draws.vector(draws.normal(generator, _HEADS)),
        "scale": _HEAD_DIM**-0.5,
    }


def _streams(generator: torch.Generator, numerics: Numerics, rows: int) -> torch.Tensor:
    dtype = draws.activation_dtype(numerics)
    return draws.normal(generator, rows, _STREAMS, _HIDDEN, dtype=dtype)


def _mix(generator: torch.Generator, numerics: Numerics) -> Arguments:
    outputs, inner = (2 + _STREAMS) * _STREAMS, _STREAMS * _HIDDEN
    return {
        "streams": _streams(generator, numerics, 32),
        "weights": CanonicalMhc(
            fn=draws.vector(draws.normal(generator, outputs, inner) * inner**-0.5),
            scale=draws.vector(torch.tensor([1.0, 0.7, 1.3])),
            base=draws.vector(0.5 * draws.normal(generator, outputs)),
        ),
        "norm_eps": _EPS,
        "hc_eps": _HC_EPS,
        "num_iters": _ITERS,
    }


def _mixing(generator: torch.Generator, rows: int) -> MhcMix:
    gates = torch.sigmoid(draws.normal(generator, 2, rows, _STREAMS))
    comb = torch.softmax(draws.normal(generator, rows, _STREAMS, _STREAMS), dim=-1)
    return MhcMix(gates[0], 2.0 * gates[1], comb)


def _collapse(generator: torch.Generator, numerics: Numerics) -> Arguments:
    return {
        "streams": _streams(generator, numerics, 32),
        "pre": _mixing(generator, 32).pre,
        "weight": draws.norm_weight(generator, _HIDDEN),
        "eps": _EPS,
    }


def _expand(generator: torch.Generator, numerics: Numerics) -> Arguments:
    mix, dtype = _mixing(generator, 32), draws.activation_dtype(numerics)
    return {
        "y": draws.normal(generator, 32, _HIDDEN, dtype=dtype),
        "streams": _streams(generator, numerics, 32),
        "post": mix.post,
        "comb": mix.comb,
    }


def _gate(generator: torch.Generator, numerics: Numerics) -> Arguments:
    return {
        "x": draws.normal(generator, 32, _HIDDEN, dtype=draws.activation_dtype(numerics)),
        "weight": CanonicalLinear((draws.matrix(generator, _EXPERTS, _HIDDEN, _BF16),)),
        "bias": draws.vector(0.1 * draws.normal(generator, _EXPERTS)),
        "num_experts_per_tok": _CHOSEN,
        "route_scale": 1.5,
    }


def _experts(generator: torch.Generator, numerics: Numerics) -> Arguments:
    rows, k = 24, 2
    ids = torch.stack([torch.randperm(_FEW_EXPERTS, generator=generator)[:k] for _ in range(rows)])
    routing = Routing(ids, torch.rand(rows, k, generator=generator) + 0.25)
    x = draws.normal(generator, rows, _HIDDEN, dtype=draws.activation_dtype(numerics))
    valid = torch.ones(rows, dtype=torch.bool)

    def stack(outputs: int, inner: int) -> tuple[object, ...]:
        return tuple(
            draws.matrix(generator, outputs, inner, WeightFormat.MXFP4) for _ in range(_FEW_EXPERTS)
        )

    experts = (stack(_INNER, _HIDDEN), stack(_INNER, _HIDDEN), stack(_HIDDEN, _INNER))
    return {
        "batch": CanonicalBatch(x, routing, torch.arange(_FEW_EXPERTS), valid),
        "weights": CanonicalExperts(*experts),  # type: ignore[arg-type]
        "swiglu_limit": _LIMIT,
    }


def _index_scores(generator: torch.Generator, numerics: Numerics) -> Arguments:
    dtype, per_block, num_blocks = draws.activation_dtype(numerics), 32, 64
    visible = torch.tensor([2047, 2048, 1500, 33])
    q = draws.normal(generator, 4, _INDEX_HEADS, _INDEX_DIM, dtype=dtype)
    weights = draws.normal(generator, 4, _INDEX_HEADS, dtype=dtype)
    blocks = torch.stack([torch.randperm(128, generator=generator)[:num_blocks] for _ in range(2)])
    return {
        "q": draws.representable(q, CacheKind.INDEX, numerics).to(dtype),
        "head_weights": weights * (_INDEX_HEADS * _INDEX_DIM) ** -0.5,
        "cache": draws.cache(
            generator, numerics, kind=CacheKind.INDEX, num_rows=128 * per_block, width=_INDEX_DIM
        ),
        "block_table": blocks,
        "row_seq": torch.tensor([0, 0, 1, 1]),
        "visible": visible,
        "entries_per_block": per_block,
        "max_visible": 2048,
        "max_query_len": 2,
    }


def _visible_scores(generator: torch.Generator, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    visible = torch.tensor([columns, columns - 1, columns // 2, 40])
    scores = draws.normal(generator, 4, columns)
    hidden = torch.arange(columns) >= visible.unsqueeze(1)
    return scores.masked_fill(hidden, -torch.inf), visible


def _topk(generator: torch.Generator, numerics: Numerics) -> Arguments:
    scores, visible = _visible_scores(generator, 32768)
    return {"scores": scores, "visible": visible, "k": _TOPK}


def _candidates(generator: torch.Generator, numerics: Numerics) -> Arguments:
    scores, visible = _visible_scores(generator, 32768)
    return {"scores": scores, "visible": visible, "num_blocks": 2048, "block_size": 8}


def _inject(generator: torch.Generator, numerics: Numerics) -> Arguments:
    dtype = draws.activation_dtype(numerics)
    return {
        "streams": _streams(generator, numerics, 16),
        "kv": draws.normal(generator, 16, (_STREAMS + 1) * _HIDDEN, dtype=dtype),
        "query_key_weight": draws.vector(1.0 + 0.2 * draws.normal(generator, _STREAMS, _HIDDEN)),
        "dead": None,
        "eps": _EPS,
    }


def _logprobs(generator: torch.Generator, numerics: Numerics) -> Arguments:
    logits = 3.0 * draws.normal(generator, 4, _VOCAB)
    return {"logits": logits, "ids": draws.integers(generator, _VOCAB, 4), "num_top": 20}


_SAMPLES: tuple[tuple[OpSpec[..., Any], str, Builder], ...] = (
    (norm.rmsnorm, "flash", _norm),
    (quant.linear, "flash-wq_a+wkv", _linear(32, _HIDDEN, _Q_RANK, _HEAD_DIM, fmt=_FP8)),
    (quant.linear, "flash-wq_b", _linear(16, _Q_RANK, _HEADS * _HEAD_DIM, fmt=_FP8)),
    (quant.linear_f32, "flash-head/8", _linear(16, _HIDDEN, _VOCAB // 8, fmt=_BF16)),
    (quant.grouped_linear, "flash-wo_a", _grouped),
    (attention.rope, "flash", _rope),
    (attention.sparse_attention, "flash", _attention),
    (kv.rope_store, "flash-window", _store(CacheKind.WINDOW, _HEAD_DIM)),
    (kv.rope_store, "flash-compressed", _store(CacheKind.COMPRESSED, _HEAD_DIM)),
    (kv.rope_store, "flash-index", _store(CacheKind.INDEX, _INDEX_DIM)),
    (mhc.mhc_mix, "flash", _mix),
    (mhc.mhc_collapse_norm, "flash", _collapse),
    (mhc.mhc_expand, "flash", _expand),
    (moe.moe_gate, "flash", _gate),
    (moe.moe_experts, "flash-4-experts", _experts),
    (indexer.index_scores, "flash", _index_scores),
    (indexer.select_topk, "flash", _topk),
    (indexer.select_candidates, "flash", _candidates),
    (engram.engram_inject, "flash", _inject),
    (sampling.token_logprobs, "flash", _logprobs),
)
for _spec, _name, _build in _SAMPLES:
    declare_sample(_spec, Sample(_name, _build, level=FULL))
