"""Names of config.json: aliases of the flat spelling, fixed choices, and keys without effect."""

from __future__ import annotations

from typing import Final

# Flat spelling (the release's own inference config) -> spelling of text_config.
FLAT_ALIASES: Final[dict[str, str]] = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim",
    "window_size": "sliding_window",
    "norm_eps": "rms_norm_eps",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "n_activated_experts": "num_experts_per_tok",
    "moe_inter_dim": "moe_intermediate_size",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "engram_pad_id": "engram_pad_token_id",
    "n_mtp_layers": "num_nextn_predict_layers",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
}

# Flat spelling -> field of the rope_scaling object.
FLAT_ROPE: Final[dict[str, str]] = {
    "rope_factor": "factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_seq_len": "original_max_position_embeddings",
}

# Flat spelling -> field of quantization_config.
FLAT_QUANTIZATION: Final[dict[str, str]] = {
    "quant_method": "quant_method",
    "activation_scheme": "activation_scheme",
    "weight_block_size": "weight_block_size",
    "scale_fmt": "scale_fmt",
    "expert_dtype": "expert_dtype",
}

# Flat spelling (after the prefix vision_) -> spelling of vision_config.
FLAT_VISION: Final[dict[str, str]] = {
    "n_layers": "num_hidden_layers",
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "inter_dim": "intermediate_size",
}

# Keys that select a variant of the maths of which only one is built: key -> accepted values.
FIXED_VALUES: Final[dict[str, tuple[object, ...]]] = {
    "hidden_act": ("silu",),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "n_shared_experts": (1,),
    "num_key_value_heads": (1,),
    "num_hash_layers": (0, None),
    "gate_temp": (1.0, None),
    "q_head_norm": (False, None),
    "hc_pre_from_prev_sublayer": (True, None),
    "tie_word_embeddings": (False,),
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "enable_confidence_head": (True, None),
    "confidence_head_with_markov": (True, None),
    "sample_from_anchor": (True, None),
    "dspark_markov_head_type": ("vanilla", None),
    "dspark_draft_topk": (None,),
}

# Keys that name the model and its tools; model_type is checked, the others say nothing more.
IDENTITY_KEYS: Final[frozenset[str]] = frozenset(
    {"architectures", "dtype", "model_type", "torch_dtype", "transformers_version"}
)

# Keys of training or of other engines that change nothing here; they are reported as not used.
UNUSED_KEYS: Final[frozenset[str]] = frozenset({"initializer_range", "use_cache"})

MODEL_TYPES: Final[frozenset[str]] = frozenset({"deepseek_v41", "deepseek_v41_text"})
