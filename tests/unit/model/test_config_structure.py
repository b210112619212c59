"""Every structural rule refuses a configuration that breaks it, with names and values."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.device.errors import ConfigError
from deepinfer.model.config import V41Config

Raw = dict[str, Any]

_BROKEN: list[tuple[Raw, str]] = [
    ({"compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1]}, r"8 entries, at least 9.*num_nextn"),
    ({"compress_ratios": [0, 3, 3, 3, 1, 1, 1, 1, 0]}, r"only 0, 1 and 2 .*compress_ratios=\(0, 3"),
    ({"compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 1]}, "draft layers have ratio 0"),
    (
        {"compress_ratios": [0, 2, 2, 2, 1, 2, 1, 1, 0]},
        "layer 5 has ratio 2, its KV source 4 ",
    ),
    ({"kv_source_layer_ids": [3, 1, 4]}, r"kv_source_layer_ids is ascending.*\(3, 1, 4\)"),
    ({"kv_source_layer_ids": [1, 3, 9]}, "kv_source_layer_ids names layers of the backbone"),
    ({"kv_source_layer_ids": [0, 1, 3, 4]}, r"names layers \[0\] whose compress ratio is 0"),
    ({"kv_source_layer_ids": [3, 4]}, "layer 1 is the first with compress ratio > 0"),
    ({"kv_source_layer_ids": [1, 3]}, "layer 4 has ratio 1, its KV source 3 has 2"),
    ({"index_source_layer_ids": [1, 4, 6]}, r"every KV source is an index source, \[3\]"),
    ({"candidate_source_layer_id": 3}, "candidate source is the last KV source.*=3"),
    ({"candidate_source_layer_id": 6}, "candidate source is the last KV source.*=6"),
    (
        {"candidate_topk_blocks": 2},
        "reach only 9 positions.*candidate_topk_blocks=2.*index_topk=16",
    ),
    ({"candidate_block_size": 0}, "needs candidate_block_size"),
    ({"index_topk": 0}, "needs index_topk"),
    ({"compress_rope_theta": None}, "needs compress_rope_theta"),
    ({"engram_layer_ids": [0, 3]}, "never on layer 0"),
    (
        {"engram_layer_ids": [1, 4]},
        r"Engram layers \[4\] are not before the last KV source, layer 4",
    ),
    ({"engram_num_embeddings": [1588]}, "one table size for each Engram layer"),
    ({"engram_num_embeddings": [1587, 1788]}, "layer 1 reaches 1588 rows, its table has 1587"),
    ({"engram_max_ngram_size": 1}, "n-grams of two tokens"),
    ({"engram_compressed_vocab_size": 0}, "needs engram_compressed_vocab_size"),
    ({"o_groups": 3}, "o_groups divides the heads.*o_groups=3"),
    ({"qk_rope_head_dim": 31}, "qk_rope_head_dim is even"),
    ({"qk_rope_head_dim": 130}, "at most head_dim"),
    ({"index_head_dim": 16}, "at most index_head_dim"),
    ({"num_experts_per_tok": 17}, "num_experts_per_tok=17, n_routed_experts=16"),
    ({"dspark_num_experts_per_tok": 9}, "dspark_num_experts_per_tok=9"),
    ({"dspark_block_size": 32}, "sliding_window=32, dspark_block_size=32"),
    ({"dspark_target_layer_ids": [5, 6, 8]}, "dspark_target_layer_ids names layers"),
    ({"dspark_target_layer_ids": [3, 6]}, r"layers \[3\] are draft taps with Engram"),
    ({"dspark_markov_rank": 0}, "needs dspark_markov_rank"),
    ({"image_token_id": 4096}, "image_token_id=4096, vocab_size=4096"),
    ({"engram_pad_token_id": 5000}, "engram_pad_token_id=5000"),
    ({"hidden_size": 240}, "multiples of 32: hidden_size=240"),
    ({"moe_intermediate_size": 48}, "multiples of 32: moe_intermediate_size=48"),
    ({"o_lora_rank": 4}, r"multiples of 32: o_groups \* o_lora_rank=16"),
]


@pytest.mark.parametrize(("change", "message"), _BROKEN)
def test_broken_rule_is_named(tiny_raw: Raw, change: Raw, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        V41Config.from_json({**tiny_raw, **change})


def test_last_source_has_ratio_one(tiny_raw: Raw) -> None:
    change = {
        "compress_ratios": [0, 2, 2, 2, 2, 2, 2, 2, 0],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3],
        "candidate_source_layer_id": -1,
        "engram_layer_ids": [],
    }
    with pytest.raises(ConfigError, match="last KV source, layer 3, has ratio 1"):
        V41Config.from_json({**tiny_raw, **change})


def test_plain_storage_takes_any_width(tiny_raw: Raw) -> None:
    raw = {**tiny_raw, "hidden_size": 240, "quantization_config": None}
    assert V41Config.from_json(raw).hidden_size == 240
