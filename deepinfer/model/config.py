"""The model configuration: every size, list and constant of one checkpoint, checked.

Field names keep the spelling of `text_config` in config.json. Values that change results are never
defaulted; what a checkpoint does not use (no Engram, no drafter, no candidates) may be absent.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deepinfer.device.errors import ConfigError
from deepinfer.model.config_source import normalise, read_config_file, unknown_key
from deepinfer.model.config_structure import check_structure
from deepinfer.model.layer_modes import LayerMode, LayerRole, latest_source
from deepinfer.model.quantization import ExpertDtype, QuantizationConfig
from deepinfer.model.rope_scaling import RopeScaling

__all__ = [
    "ConfidenceInput",
    "ExpertDtype",
    "LayerMode",
    "LayerRole",
    "QuantizationConfig",
    "RopeScaling",
    "V41Config",
]

_log = logging.getLogger(__name__)

Count = Annotated[int, Field(ge=1)]
OptionalCount = Annotated[int, Field(ge=0)]
TokenId = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class ConfidenceInput(enum.Enum):
    """What the confidence head sees of a draft row: the block output before or after its norm."""

    PRE_NORM = "pre_norm"
    POST_NORM = "post_norm"


class V41Config(BaseModel):
    """A DeepSeek-V4.1 model; frozen, parsed with `from_json`, structure checked on creation."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    vocab_size: Count
    hidden_size: Count
    num_hidden_layers: Count
    max_position_embeddings: Count
    rms_norm_eps: NotNegative

    num_attention_heads: Count
    head_dim: Count
    qk_rope_head_dim: Count
    q_lora_rank: Count
    o_groups: Count
    o_lora_rank: Count
    sliding_window: Count
    rope_theta: Positive
    compress_rope_theta: Positive | None = None
    rope_scaling: RopeScaling | None = None

    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...] = ()
    index_source_layer_ids: tuple[int, ...] = ()
    index_n_heads: OptionalCount = 0
    index_head_dim: OptionalCount = 0
    index_topk: OptionalCount = 0
    candidate_source_layer_id: int = -1
    candidate_topk_blocks: OptionalCount = 0
    candidate_block_size: OptionalCount = 0

    n_routed_experts: Count
    num_experts_per_tok: Count
    moe_intermediate_size: Count
    routed_scaling_factor: Positive
    swiglu_limit: Positive

    hc_mult: Count
    hc_sinkhorn_iters: Count
    hc_eps: NotNegative

    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: OptionalCount = 0
    engram_n_heads: OptionalCount = 0
    engram_head_dim: OptionalCount = 0
    engram_vocab_size: OptionalCount = 0
    engram_compressed_vocab_size: OptionalCount = 0
    engram_pad_token_id: TokenId = 0

    num_nextn_predict_layers: OptionalCount = 0
    dspark_block_size: OptionalCount = 0
    dspark_noise_token_id: TokenId | None = None
    dspark_markov_rank: OptionalCount = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_n_routed_experts: OptionalCount = 0
    dspark_num_experts_per_tok: OptionalCount = 0
    # The release has no such key and feeds the block output as it is, before the final norm.
    confidence_head_input: ConfidenceInput = Field(default=ConfidenceInput.PRE_NORM, strict=False)

    # The family's fixed special ids; a config may state others.
    bos_token_id: TokenId = 0
    eos_token_id: TokenId = 1
    pad_token_id: TokenId = 2
    image_token_id: TokenId | None = None

    quantization_config: QuantizationConfig | None = None
    vision_config: Mapping[str, Any] | None = None
    unused_keys: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, source: Path | str | Mapping[str, object]) -> V41Config:
        """Return the configuration in `source`.

        Args:
            source: a checkpoint folder, a config.json, or its parsed content; nested
                (`text_config`, ...) or flat, in either spelling.
        Raises:
            CheckpointError: the path does not exist or is not JSON.
            ConfigError: an unknown key, a bad value, an unsupported variant, or a structure that
                contradicts itself.
        """
        raw = source if isinstance(source, Mapping) else read_config_file(Path(source))
        values = normalise(raw, cls.model_fields.keys() - {"unused_keys"})
        try:
            config = cls.model_validate({key: _tuples(key, value) for key, value in values.items()})
        except ValidationError as error:
            raise ConfigError(_explain(error)) from error
        if config.unused_keys:
            _log.info("config.json keys not used: %s", ", ".join(config.unused_keys))
        return config

    @model_validator(mode="after")
    def _check(self) -> V41Config:
        check_structure(self)
        return self

    def to_json(self) -> dict[str, object]:
        """Return the nested config.json content of this configuration."""
        from deepinfer.model.config_export import nested_json

        return nested_json(self)

    def ratio(self, layer: int) -> int:
        """Return the tokens in one row of the compressed cache that `layer` reads; 0: none."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int | None:
        """Return the layer whose compressed cache `layer` reads, or None."""
        if self.ratio(layer) == 0:
            return None
        return latest_source(self.kv_source_layer_ids, layer)

    def index_source(self, layer: int) -> int | None:
        """Return the layer whose selection `layer` uses, or None."""
        if self.ratio(layer) == 0:
            return None
        return latest_source(self.index_source_layer_ids, layer)

    def owns_kv(self, layer: int) -> bool:
        """Return whether `layer` has a compressor and writes compressed rows and index keys."""
        return layer in self.kv_source_layer_ids

    def runs_index(self, layer: int) -> bool:
        """Return whether `layer` scores positions and publishes a selection."""
        return layer in self.index_source_layer_ids

    def mode(self, layer: int) -> LayerMode:
        """Return the kind of attention of `layer`."""
        if self.ratio(layer) == 0:
            return LayerMode.SWA
        if self.owns_kv(layer):
            return LayerMode.FULL
        return LayerMode.REINDEX if self.runs_index(layer) else LayerMode.REUSE

    def searches_candidates(self, layer: int) -> bool:
        """Return whether `layer` selects only inside the candidate blocks."""
        source = self.candidate_source_layer_id
        return source >= 0 and layer > source and self.runs_index(layer)

    @cached_property
    def layer_table(self) -> tuple[LayerRole, ...]:
        """The roles of all backbone layers, in order."""
        return tuple(
            LayerRole(
                layer=layer,
                ratio=self.ratio(layer),
                mode=self.mode(layer),
                kv_source=self.kv_source(layer),
                index_source=self.index_source(layer),
                has_engram=layer in self.engram_layer_ids,
                is_candidate_source=layer == self.candidate_source_layer_id,
            )
            for layer in range(self.num_hidden_layers)
        )

    @property
    def history_len(self) -> int:
        """Tokens before a request's first row that a step needs, at least 1."""
        return max(self.engram_max_ngram_size - 1, 1)

    @property
    def last_kv_source(self) -> int | None:
        """First decoder layer: the last layer with a compressor; None when no layer has one."""
        return self.kv_source_layer_ids[-1] if self.kv_source_layer_ids else None

    @property
    def num_segments(self) -> int:
        """Parts the model is cut in: 3 around the last KV source, else 1."""
        return 1 if self.last_kv_source is None else 3

    @property
    def num_hash_columns(self) -> int:
        """Engram rows looked up for one token in one layer; 0 without Engram."""
        if not self.engram_layer_ids:
            return 0
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def hc_mix_size(self) -> int:
        """Outputs of one mHC mixer: pre, post and the square combination."""
        return (2 + self.hc_mult) * self.hc_mult


def _tuples(key: str, value: object) -> object:
    """JSON lists as tuples, which is what a frozen configuration holds."""
    if isinstance(value, list):
        return tuple(value)
    if key == "quantization_config" and isinstance(value, Mapping):
        return {name: _tuples(name, entry) for name, entry in value.items()}
    return value


def _explain(error: ValidationError) -> str:
    """One line for each bad field, in our words."""
    lines = []
    for entry in error.errors():
        field = ".".join(str(part) for part in entry["loc"]) or "config"
        if entry["type"] == "extra_forbidden":
            section, _, key = field.rpartition(".")
            fields = _SECTIONS.get(section, V41Config).model_fields
            lines.append(unknown_key(section or "config.json", key, fields))
        elif entry["type"] == "missing":
            lines.append(f"{field} is missing; every checkpoint of the family states it")
        else:
            lines.append(f"{field} is {entry['input']!r}: {entry['msg']}")
    return "config.json is not usable: " + "; ".join(lines)


_SECTIONS: dict[str, type[BaseModel]] = {
    "quantization_config": QuantizationConfig,
    "rope_scaling": RopeScaling,
}
