"""Sizes of the model that is trained, read from a flat config.json.

The engine's own configuration class needs pydantic, which a bare training machine lacks; this one
holds the same fields and is checked against the engine's when a checkpoint is exported.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.device.errors import ConfigError
from deepinfer.model.layer_modes import latest_source


@dataclass(frozen=True, slots=True)
class Architecture:
    """One DeepSeek-V4.1 model; fields are spelled as in config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: Mapping[str, Any]
    max_position_embeddings: int
    rms_norm_eps: float
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_vocab_size: int
    engram_compressed_vocab_size: int
    engram_pad_token_id: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_markov_rank: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    confidence_head_input: str
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int

    @classmethod
    def from_json(cls, file: Path) -> Architecture:
        """Return the architecture in a flat config.json.

        Args:
            file: the JSON file; it states every field and nothing else.
        Raises:
            ConfigError: the file is missing, a field is missing or unknown.
        """
        if not file.is_file():
            raise ConfigError(f"{file} does not exist; give a flat config such as tiny-v41.json")
        return cls.from_fields(json.loads(file.read_text(encoding="utf-8")))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Architecture:
        """Return the architecture with exactly these fields.

        Raises:
            ConfigError: a field is missing or unknown, or names no input of the confidence head.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        missing, unknown = sorted(known - fields.keys()), sorted(fields.keys() - known)
        if missing or unknown:
            raise ConfigError(f"architecture fields missing: {missing}, unknown: {unknown}")
        if (side := fields["confidence_head_input"]) not in ("pre_norm", "post_norm"):
            raise ConfigError(
                f"confidence_head_input is {side!r}; it sees a row before or after its norm: "
                "pre_norm or post_norm"
            )
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()
        }
        return cls(**values)

    def to_fields(self) -> dict[str, Any]:
        """The content of the flat config.json."""
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in dataclasses.fields(self)
            for value in [getattr(self, field.name)]
        }

    def kv_source(self, layer: int) -> int | None:
        """Layer whose compressed rows `layer` reads, or None."""
        return latest_source(self.kv_source_layer_ids, layer) if self.reads(layer) else None

    def index_source(self, layer: int) -> int | None:
        """Layer whose selection `layer` uses, or None."""
        return latest_source(self.index_source_layer_ids, layer) if self.reads(layer) else None

    def reads(self, layer: int) -> bool:
        """Whether `layer` reads compressed rows."""
        return self.compress_ratios[layer] > 0

    @property
    def num_hash_columns(self) -> int:
        """Engram rows looked up for one token in one layer."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def ratios(self) -> tuple[int, ...]:
        """The compression ratios above 0 that occur in the backbone, ascending."""
        return tuple(sorted({r for r in self.compress_ratios[: self.num_hidden_layers] if r}))
