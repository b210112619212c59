"""Parsing of config.json: spellings, defaults, refusals of single fields."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from deepinfer.device.errors import CheckpointError, ConfigError
from deepinfer.model.config import ConfidenceInput, ExpertDtype, LayerMode, V41Config

Raw = dict[str, Any]


def test_nested_fields_reach_the_config(flash: V41Config) -> None:
    assert flash.hidden_size == 5120
    assert flash.engram_num_embeddings == (384006168, 384016682)
    assert flash.rms_norm_eps == 1e-20
    assert flash.image_token_id == 129264
    assert flash.rope_scaling is not None
    assert flash.rope_scaling.original_max_position_embeddings == 65536
    assert flash.quantization_config is not None
    assert flash.quantization_config.expert_dtype is ExpertDtype.FP4


def test_flat_aliases_give_the_same_config(flash: V41Config, flash_raw: Raw) -> None:
    renamed = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "qk_rope_head_dim": "rope_head_dim",
        "sliding_window": "window_size",
        "rms_norm_eps": "norm_eps",
        "kv_source_layer_ids": "kv_source_layers",
        "index_source_layer_ids": "index_source_layers",
        "candidate_source_layer_id": "candidate_source_layer",
        "num_experts_per_tok": "n_activated_experts",
        "moe_intermediate_size": "moe_inter_dim",
        "scoring_func": "score_func",
        "routed_scaling_factor": "route_scale",
        "engram_pad_token_id": "engram_pad_id",
        "num_nextn_predict_layers": "n_mtp_layers",
        "dspark_num_experts_per_tok": "dspark_n_activated_experts",
    }
    text = flash_raw["text_config"]
    rope = text.pop("rope_scaling")
    del text["model_type"], text["norm_topk_prob"]
    flat = {renamed.get(key, key): value for key, value in text.items()}
    flat |= {
        "image_token_id": 129264,
        "rope_factor": rope["factor"],
        "beta_fast": rope["beta_fast"],
        "beta_slow": rope["beta_slow"],
        "original_seq_len": rope["original_max_position_embeddings"],
        "expert_dtype": "fp4",
    }
    parsed = V41Config.from_json(flat)
    expected = flash.model_copy(
        update={"vision_config": None, "unused_keys": (), "quantization_config": None}
    )
    assert parsed.model_copy(update={"quantization_config": None}) == expected
    assert parsed.quantization_config == flash.quantization_config


def test_flat_vision_fields_are_gathered(tiny_raw: Raw) -> None:
    config = V41Config.from_json({**tiny_raw, "vision_n_layers": 2, "vision_patch_size": 14})
    assert config.vision_config == {"num_hidden_layers": 2, "patch_size": 14}


def test_written_json_parses_to_the_same_config(flash: V41Config) -> None:
    again = V41Config.from_json(json.loads(json.dumps(flash.to_json())))
    assert again.model_dump(exclude={"unused_keys"}) == flash.model_dump(exclude={"unused_keys"})


def test_unquantised_config_has_no_scheme(tiny_raw: Raw) -> None:
    for absent in ({**tiny_raw, "quantization_config": None}, _without(tiny_raw)):
        assert V41Config.from_json(absent).quantization_config is None


def _without(raw: Raw) -> Raw:
    return {key: value for key, value in raw.items() if key != "quantization_config"}


def test_flash_layer_table(flash: V41Config) -> None:
    modes = [role.mode for role in flash.layer_table]
    assert [modes.count(mode) for mode in LayerMode] == [2, 4, 4, 30]
    rows = {role.layer: role for role in flash.layer_table}
    assert (rows[1].kv_source, rows[1].index_source, rows[1].has_engram) == (None, None, True)
    assert (rows[7].ratio, rows[7].kv_source, rows[7].index_source) == (2, 2, 2)
    assert rows[20].is_candidate_source
    assert rows[24].mode is LayerMode.REINDEX
    assert (rows[27].mode, rows[27].kv_source, rows[27].index_source) == (LayerMode.REUSE, 20, 24)
    assert (rows[39].ratio, rows[39].index_source) == (1, 36)


def test_last_kv_source_cuts_three_segments(flash: V41Config) -> None:
    assert (flash.last_kv_source, flash.num_segments) == (20, 3)


def test_only_later_index_layers_search_candidates(flash: V41Config) -> None:
    searching = [layer for layer in range(40) if flash.searches_candidates(layer)]
    assert searching == [24, 28, 32, 36]


def test_variant_without_engram_parses(tiny_raw: Raw) -> None:
    config = V41Config.from_json({**tiny_raw, "engram_layer_ids": []})
    assert config.num_hash_columns == 0


def test_variant_without_candidates_parses(tiny_raw: Raw) -> None:
    config = V41Config.from_json({**tiny_raw, "candidate_source_layer_id": -1})
    assert not any(config.searches_candidates(layer) for layer in range(8))


def test_variant_with_windows_only_parses(tiny_raw: Raw) -> None:
    config = V41Config.from_json(
        {
            **tiny_raw,
            "compress_ratios": [0] * 9,
            "kv_source_layer_ids": [],
            "index_source_layer_ids": [],
            "candidate_source_layer_id": -1,
        }
    )
    assert (config.last_kv_source, config.num_segments) == (None, 1)
    assert {config.mode(layer) for layer in range(8)} == {LayerMode.SWA}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("scoring_func", "sigmoid"),
        ("topk_method", "greedy"),
        ("norm_topk_prob", False),
        ("n_shared_experts", 2),
        ("num_key_value_heads", 8),
        ("num_hash_layers", 3),
        ("gate_temp", 2.0),
        ("q_head_norm", True),
        ("hc_pre_from_prev_sublayer", False),
        ("tie_word_embeddings", True),
        ("attention_bias", True),
        ("attention_dropout", 0.1),
        ("confidence_head_with_markov", False),
        ("dspark_markov_head_type", "gated"),
        ("draft_vocab_size", 1000),
    ],
)
def test_other_variant_of_the_maths_is_refused(tiny_raw: Raw, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key} is {value!r}"):
        V41Config.from_json({**tiny_raw, key: value})


@pytest.mark.parametrize(
    ("key", "value"), [("gate_temp", 1.0), ("q_head_norm", False), ("num_hash_layers", 0)]
)
def test_supported_variant_is_accepted(tiny_raw: Raw, key: str, value: object) -> None:
    assert V41Config.from_json({**tiny_raw, key: value}) == V41Config.from_json(tiny_raw)


def test_true_is_not_taken_for_one(tiny_raw: Raw) -> None:
    with pytest.raises(ConfigError, match="n_shared_experts is True"):
        V41Config.from_json({**tiny_raw, "n_shared_experts": True})


def test_keys_without_effect_are_reported(tiny_raw: Raw, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="deepinfer.model.config"):
        config = V41Config.from_json({**tiny_raw, "use_cache": False, "initializer_range": 0.5})
    assert config.unused_keys == ("initializer_range", "use_cache")
    assert "initializer_range, use_cache" in caplog.text


def test_unknown_key_is_refused_with_the_nearest(tiny_raw: Raw) -> None:
    with pytest.raises(ConfigError, match=r"'sliding_windw'; did you mean 'sliding_window'"):
        V41Config.from_json({**tiny_raw, "sliding_windw": 32})


def test_unknown_key_of_a_section_is_refused(tiny_raw: Raw) -> None:
    tiny_raw["rope_scaling"]["factr"] = 4
    with pytest.raises(ConfigError, match=r"rope_scaling has the unknown key 'factr'.*'factor'"):
        V41Config.from_json(tiny_raw)


def test_reserved_name_in_the_file_is_refused(tiny_raw: Raw) -> None:
    with pytest.raises(ConfigError, match="unused_keys"):
        V41Config.from_json({**tiny_raw, "unused_keys": []})


def test_missing_field_is_named(tiny_raw: Raw) -> None:
    del tiny_raw["swiglu_limit"]
    with pytest.raises(ConfigError, match="swiglu_limit is missing"):
        V41Config.from_json(tiny_raw)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "256"),
        ("hidden_size", 256.5),
        ("num_hidden_layers", 0),
        ("rms_norm_eps", -1.0),
        ("hc_eps", float("nan")),
        ("compress_ratios", "0,1"),
        ("hc_sinkhorn_iters", True),
    ],
)
def test_bad_value_is_named(tiny_raw: Raw, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key} is {value!r}"):
        V41Config.from_json({**tiny_raw, key: value})


def test_confidence_head_sees_the_block_output_unless_the_checkpoint_says_otherwise(
    tiny_raw: Raw,
) -> None:
    assert V41Config.from_json(tiny_raw).confidence_head_input is ConfidenceInput.PRE_NORM
    other = V41Config.from_json({**tiny_raw, "confidence_head_input": "post_norm"})
    assert other.confidence_head_input is ConfidenceInput.POST_NORM
    assert V41Config.from_json(other.to_json()) == other
    with pytest.raises(ConfigError, match="confidence_head_input is 'normed'"):
        V41Config.from_json({**tiny_raw, "confidence_head_input": "normed"})


def test_two_spellings_must_agree(tiny_raw: Raw) -> None:
    assert V41Config.from_json({**tiny_raw, "dim": 256}).hidden_size == 256
    with pytest.raises(ConfigError, match=r"hidden_size twice.*256 and 512"):
        V41Config.from_json({**tiny_raw, "dim": 512})


def test_root_and_text_config_must_agree(flash_raw: Raw) -> None:
    flash_raw["text_config"]["eos_token_id"] = 7
    with pytest.raises(ConfigError, match="eos_token_id twice"):
        V41Config.from_json(flash_raw)


def test_second_spelling_of_the_rope_kind(tiny_raw: Raw) -> None:
    tiny_raw["rope_scaling"]["type"] = "linear"
    with pytest.raises(ConfigError, match="rope_type twice"):
        V41Config.from_json(tiny_raw)


def test_other_model_is_refused(flash_raw: Raw) -> None:
    with pytest.raises(ConfigError, match="model_type is 'deepseek_v4'"):
        V41Config.from_json({**flash_raw, "model_type": "deepseek_v4"})


def test_other_block_size_is_refused(flash_raw: Raw) -> None:
    flash_raw["quantization_config"]["weight_block_size"] = [128, 128]
    with pytest.raises(ConfigError, match=r"weight_block_size.0 is 128"):
        V41Config.from_json(flash_raw)


def test_absent_path_is_an_error_not_a_default(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model configuration at .*nowhere"):
        V41Config.from_json(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not valid JSON"), ("[]", "holds a list"), ('{"a": 1', "JSON")]
)
def test_broken_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        V41Config.from_json(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"), [('{"a": 1, "a": 2}', "'a' twice"), ('{"a": NaN}', "holds NaN")]
)
def test_ambiguous_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        V41Config.from_json(tmp_path)
