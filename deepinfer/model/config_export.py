"""The nested config.json of a configuration, as released checkpoints spell it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.model.config import V41Config

_ROOT_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
_OBJECT_FIELDS = ("quantization_config", "vision_config", "unused_keys")

# What the released config states although only one value exists.
_FIXED_TEXT: dict[str, object] = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}


def nested_json(config: V41Config) -> dict[str, object]:
    """Return the content of config.json; parsing it gives `config` again (but `unused_keys`).

    Args:
        config: the model configuration.
    """
    dumped = config.model_dump(mode="json")
    text = {
        **_FIXED_TEXT,
        **{
            field: value
            for field, value in dumped.items()
            if field not in _ROOT_FIELDS + _OBJECT_FIELDS and value is not None
        },
    }
    root: dict[str, object] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        **{field: dumped[field] for field in _ROOT_FIELDS if dumped[field] is not None},
        "tie_word_embeddings": False,
        "text_config": text,
    }
    if config.vision_config is not None:
        root["vision_config"] = dumped["vision_config"]
    if config.quantization_config is not None:
        quantization = dumped["quantization_config"]
        root["quantization_config"] = {
            key: value for key, value in quantization.items() if value is not None
        }
    return root
