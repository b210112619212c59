"""Multiply-accumulates of a prefill by formula, from the configuration and the rows alone.

Counted are the matrix products: projections, experts, mixing coefficients, attention, index
scores, Engram and the head of one row. What is small beside them (norms, rotations, pooling,
selection) is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.model.config import V41Config
from deepinfer.model.replay import PrefillRows


@dataclass(frozen=True, slots=True)
class RowWork:
    """Multiply-accumulates of one row in one layer, but for what depends on its position.

    Attributes:
        write: of its cache writes; with them comes the first query projection, but in the last KV
            source, whose rows may end there.
        rest: of its remainder: queries, output, mixing, experts.
    """

    write: int
    rest: int


def row_work(config: V41Config, layer: int) -> RowWork:
    """Work of a row in `layer`; a compressor's index key is shared by the rows of its entry.

    Source: shapes of the V4.1 backbone.
    """
    hidden, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim
    rank, groups_width = config.q_lora_rank, config.o_groups * config.o_lora_rank
    write = hidden * width
    if config.owns_kv(layer):
        ratio = config.ratio(layer)
        write += hidden * width * ratio + width * config.index_head_dim // ratio
    rest = rank * heads * width
    if layer == config.last_kv_source:
        rest += hidden * rank
    else:
        write += hidden * rank
    rest += heads * width * config.o_lora_rank + groups_width * hidden
    if config.runs_index(layer):
        rest += (rank * config.index_head_dim + hidden) * config.index_n_heads
    rest += 2 * config.hc_mix_size * config.hc_mult * hidden
    # The routed experts and the shared one.
    rest += (config.num_experts_per_tok + 1) * 3 * hidden * config.moe_intermediate_size
    rest += hidden * config.n_routed_experts
    return RowWork(write, rest)


def prefill_macs(config: V41Config, num_tokens: int, rows: PrefillRows) -> int:
    """Multiply-accumulates of a prompt that is computed in one step, one row to the head.

    Args:
        config: the model.
        num_tokens: prompt length.
        rows: what each layer runs of it.

    Source: FLOP model of bounded SWA replay; index scores of all visible entries are counted,
        also where candidate blocks would allow fewer, and none where all entries are chosen.
    """
    total = config.vocab_size * config.hidden_size
    for layer in range(config.num_hidden_layers):
        entered, floor = rows.limits(layer - 1)
        started, _ = rows.limits(layer)
        work = row_work(config, layer)
        total += (num_tokens - entered) * work.write + (num_tokens - started) * work.rest
        positions = torch.arange(started, num_tokens)
        keys = (positions - floor + 1).clamp_max(config.sliding_window)
        ratio = config.ratio(layer)
        if ratio:
            visible = torch.div(positions + 1, ratio, rounding_mode="floor")
            keys = keys + visible.clamp_max(config.index_topk)
            if config.runs_index(layer) and num_tokens // ratio > config.index_topk:
                scored = config.index_n_heads * config.index_head_dim
                total += scored * int(visible.sum())
        total += 2 * config.num_attention_heads * config.head_dim * int(keys.sum())
        if layer in config.engram_layer_ids:
            looked_up = config.num_hash_columns * config.engram_head_dim
            streams = (config.hc_mult + 1) * config.hidden_size
            total += (num_tokens - entered) * looked_up * streams
    return total
