"""The ops of the backbone, bound once: a missing op refuses before any weight is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepinfer.device.errors import CapabilityError
from deepinfer.device.op import OpSpec, OpTable
from deepinfer.device.ops import (
    attention,
    compress,
    engram,
    indexer,
    kv,
    mhc,
    moe,
    norm,
    quant,
    state,
)

_NEEDED = (
    attention.rope,
    attention.sparse_attention,
    compress.compress_pair,
    engram.engram_fetch_start,
    engram.engram_fetch_wait,
    engram.engram_inject,
    engram.ngram_hash,
    indexer.index_select,
    kv.copy_rows,
    kv.entry_slots,
    kv.rope_store,
    mhc.mhc_boundary,
    mhc.mhc_collapse_norm,
    mhc.mhc_expand,
    mhc.mhc_mix,
    moe.moe_combine,
    moe.moe_dispatch,
    moe.moe_experts,
    moe.moe_gate,
    moe.swiglu,
    norm.rmsnorm,
    quant.embed,
    quant.grouped_linear,
    quant.linear,
    quant.linear_f32,
    state.compress_plan,
    state.row_layout,
    state.window_plan,
)


def require_ops(table: OpTable, needed: Iterable[OpSpec[..., Any]], *, purpose: str) -> None:
    """Return when `table` has every op of `needed`.

    Raises:
        CapabilityError: ops are missing; all of them are named with dtype and device.
    """
    missing = [f"{spec.family}/{spec.name}" for spec in needed if spec not in table]
    if missing:
        raise CapabilityError(
            f"backend {table.backend} cannot {purpose}: it lacks the ops "
            f"{', '.join(missing)} for {table.dtype} on device {table.device}; choose "
            "another backend or implement them (deepinfer backends --explain)"
        )


class ModelOps:
    """Every op the backbone calls, as attributes with their exact signatures."""

    def __init__(self, table: OpTable) -> None:
        """Bind the ops of `table`.

        Raises:
            CapabilityError: ops are missing; all of them are named with dtype and device.
        """
        require_ops(table, _NEEDED, purpose="run this model")
        self.rope = table[attention.rope]
        self.sparse_attention = table[attention.sparse_attention]
        self.compress_pair = table[compress.compress_pair]
        self.engram_fetch_start = table[engram.engram_fetch_start]
        self.engram_fetch_wait = table[engram.engram_fetch_wait]
        self.engram_inject = table[engram.engram_inject]
        self.ngram_hash = table[engram.ngram_hash]
        self.index_select = table[indexer.index_select]
        self.copy_rows = table[kv.copy_rows]
        self.entry_slots = table[kv.entry_slots]
        self.rope_store = table[kv.rope_store]
        self.mhc_boundary = table[mhc.mhc_boundary]
        self.mhc_collapse_norm = table[mhc.mhc_collapse_norm]
        self.mhc_expand = table[mhc.mhc_expand]
        self.mhc_mix = table[mhc.mhc_mix]
        self.moe_combine = table[moe.moe_combine]
        self.moe_dispatch = table[moe.moe_dispatch]
        self.moe_experts = table[moe.moe_experts]
        self.moe_gate = table[moe.moe_gate]
        self.swiglu = table[moe.swiglu]
        self.rmsnorm = table[norm.rmsnorm]
        self.embed = table[quant.embed]
        self.grouped_linear = table[quant.grouped_linear]
        self.linear = table[quant.linear]
        self.linear_f32 = table[quant.linear_f32]
        self.compress_plan = table[state.compress_plan]
        self.row_layout = table[state.row_layout]
        self.window_plan = table[state.window_plan]
