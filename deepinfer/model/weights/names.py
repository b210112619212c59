"""The catalogue: every tensor a checkpoint of a given configuration must hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deepinfer.device.errors import ConfigError
from deepinfer.device.weights import WeightFormat
from deepinfer.model.config import V41Config
from deepinfer.model.quantization import ExpertDtype
from deepinfer.model.weights.tensor_spec import DiskDtype, TensorGroup, TensorKind, TensorSpec

_EXPERT_FORMATS = {
    ExpertDtype.FP4: WeightFormat.MXFP4,
    ExpertDtype.FP8: WeightFormat.FP8_TILE32,
    ExpertDtype.BF16: WeightFormat.BF16,
}


@dataclass(frozen=True, slots=True)
class DiskTensor:
    """One tensor as a safetensors header must state it.

    Attributes:
        spec: the logical tensor it belongs to.
        dtype: dtype it is written with.
        accepted: dtypes it may be read with.
        shape: shape on disk.
    """

    spec: TensorSpec
    dtype: DiskDtype
    accepted: tuple[DiskDtype, ...]
    shape: tuple[int, ...]


def expected_tensors(config: V41Config) -> dict[str, TensorSpec]:
    """Return all logical tensors by name, in model order.

    The released Flash configuration gives 96,085 names on disk (see `disk_tensors`).

    Args:
        config: the model configuration.
    Source: checkpoint tensors of the V4.1 release.
    """
    return {spec.name: spec for spec in _Catalogue(config).all()}


def disk_tensors(specs: Mapping[str, TensorSpec]) -> dict[str, DiskTensor]:
    """Return every name that may stand in a safetensors header: data and scales.

    Args:
        specs: the catalogue of a configuration.
    """
    result: dict[str, DiskTensor] = {}
    for spec in specs.values():
        dtype = spec.disk_dtype
        accepted = (dtype, DiskDtype.F32) if spec.accepts_f32 else (dtype,)
        result[spec.name] = DiskTensor(spec, dtype, accepted, spec.disk_shape)
        scale_name, scale_shape = spec.scale_name, spec.scale_shape
        if scale_name is not None and scale_shape is not None:
            result[scale_name] = DiskTensor(spec, DiskDtype.E8M0, (DiskDtype.E8M0,), scale_shape)
    return result


class _Catalogue:
    """Yields the specs of one configuration; holds what all tensor families ask for."""

    def __init__(self, config: V41Config) -> None:
        self._config = config
        quantization = config.quantization_config
        self._quantised = quantization is not None
        self._linear = WeightFormat.FP8_TILE32 if self._quantised else WeightFormat.BF16
        self._table = WeightFormat.FP8_ROW32 if self._quantised else WeightFormat.BF16
        self._expert = (
            WeightFormat.BF16
            if quantization is None
            else _EXPERT_FORMATS[quantization.expert_dtype]
        )

    def all(self) -> Iterator[TensorSpec]:
        config = self._config
        vocab, hidden = config.vocab_size, config.hidden_size
        group = TensorGroup.BACKBONE
        yield self._bf16("embed.weight", TensorKind.EMBEDDING, group, vocab, hidden)
        for layer in range(config.num_hidden_layers):
            prefix = f"layers.{layer}"
            yield from self._block(prefix, group, config.n_routed_experts)
            if config.owns_kv(layer):
                yield from self._compressor(f"{prefix}.attn.compressor", config.ratio(layer))
            if config.runs_index(layer):
                yield from self._indexer(f"{prefix}.attn.indexer", layer)
            if layer in config.engram_layer_ids:
                yield from self._engram(f"{prefix}.engram", layer)
        yield self._bf16("norm.weight", TensorKind.NORM, group, hidden)
        yield self._bf16("head.weight", TensorKind.EMBEDDING, group, vocab, hidden)
        if config.num_nextn_predict_layers:
            yield from self._drafter()
        if config.vision_config is not None:
            yield from self._vision()

    def _bf16(self, name: str, kind: TensorKind, group: TensorGroup, *shape: int) -> TensorSpec:
        return self._plain(name, kind, group, WeightFormat.BF16, shape)

    def _f32(self, name: str, kind: TensorKind, group: TensorGroup, *shape: int) -> TensorSpec:
        return self._plain(name, kind, group, WeightFormat.F32, shape)

    def _plain(
        self,
        name: str,
        kind: TensorKind,
        group: TensorGroup,
        fmt: WeightFormat,
        shape: tuple[int, ...],
    ) -> TensorSpec:
        accepts_f32 = fmt is WeightFormat.BF16 and not self._quantised
        return TensorSpec(name, kind, group, fmt, shape, accepts_f32=accepts_f32)

    def _matrix(self, name: str, kind: TensorKind, group: TensorGroup, *shape: int) -> TensorSpec:
        return self._plain(name, kind, group, self._linear, shape)

    def _block(self, prefix: str, group: TensorGroup, num_experts: int) -> Iterator[TensorSpec]:
        config = self._config
        hidden, streams = config.hidden_size, config.hc_mult
        for norm in ("attn_norm", "ffn_norm"):
            yield self._bf16(f"{prefix}.{norm}.weight", TensorKind.NORM, group, hidden)
        mix = config.hc_mix_size
        kind = TensorKind.HYPER_CONNECTION
        for sublayer in ("attn", "ffn"):
            yield self._f32(f"{prefix}.hc_{sublayer}_fn", kind, group, mix, streams * hidden)
            yield self._f32(f"{prefix}.hc_{sublayer}_base", kind, group, mix)
            yield self._f32(f"{prefix}.hc_{sublayer}_scale", kind, group, 3)
        yield from self._attention(f"{prefix}.attn", group)
        yield from self._moe(f"{prefix}.ffn", group, num_experts)

    def _attention(self, prefix: str, group: TensorGroup) -> Iterator[TensorSpec]:
        config = self._config
        hidden, rank, width = config.hidden_size, config.q_lora_rank, config.head_dim
        heads, groups = config.num_attention_heads, config.o_groups
        out_rank = groups * config.o_lora_rank
        kind = TensorKind.ATTENTION
        yield self._matrix(f"{prefix}.wq_a.weight", kind, group, rank, hidden)
        yield self._matrix(f"{prefix}.wq_b.weight", kind, group, heads * width, rank)
        yield self._matrix(f"{prefix}.wkv.weight", kind, group, width, hidden)
        yield self._matrix(f"{prefix}.wo_a.weight", kind, group, out_rank, heads * width // groups)
        yield self._matrix(f"{prefix}.wo_b.weight", kind, group, hidden, out_rank)
        yield self._bf16(f"{prefix}.q_norm.weight", TensorKind.NORM, group, rank)
        yield self._bf16(f"{prefix}.kv_norm.weight", TensorKind.NORM, group, width)
        yield self._f32(f"{prefix}.attn_sink", kind, group, heads)

    def _compressor(self, prefix: str, ratio: int) -> Iterator[TensorSpec]:
        config, group, kind = self._config, TensorGroup.BACKBONE, TensorKind.COMPRESSOR
        width, hidden = config.head_dim, config.hidden_size
        yield self._bf16(f"{prefix}.wkv.weight", kind, group, width, hidden)
        if ratio > 1:
            yield self._bf16(f"{prefix}.wgate.weight", kind, group, width, hidden)
        yield self._bf16(f"{prefix}.norm.weight", kind, group, width)

    def _indexer(self, prefix: str, layer: int) -> Iterator[TensorSpec]:
        config, group, kind = self._config, TensorGroup.BACKBONE, TensorKind.INDEXER
        heads, width = config.index_n_heads, config.index_head_dim
        yield self._matrix(f"{prefix}.wq_b.weight", kind, group, heads * width, config.q_lora_rank)
        yield self._bf16(f"{prefix}.weights_proj.weight", kind, group, heads, config.hidden_size)
        if config.owns_kv(layer):
            yield self._bf16(f"{prefix}.wk.weight", kind, group, width, config.head_dim)
            yield self._bf16(f"{prefix}.k_norm.weight", kind, group, width)

    def _moe(self, prefix: str, group: TensorGroup, num_experts: int) -> Iterator[TensorSpec]:
        config = self._config
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        router = TensorKind.ROUTER
        yield self._bf16(f"{prefix}.gate.weight", router, group, num_experts, hidden)
        yield self._f32(f"{prefix}.gate.bias", router, group, num_experts)
        # The image bias has no use without a vision tower, but such checkpoints may carry it.
        yield TensorSpec(
            f"{prefix}.gate.bias_vl",
            router,
            group,
            WeightFormat.F32,
            (num_experts,),
            required=config.vision_config is not None,
        )
        shapes = (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden)))
        accepts_f32 = self._expert is WeightFormat.BF16
        for expert in range(num_experts):
            for part, shape in shapes:
                yield TensorSpec(
                    f"{prefix}.experts.{expert}.{part}.weight",
                    TensorKind.ROUTED_EXPERT,
                    group,
                    self._expert,
                    shape,
                    accepts_f32=accepts_f32,
                    expert=expert,
                )
        for part, shape in shapes:
            name = f"{prefix}.shared_experts.{part}.weight"
            yield self._matrix(name, TensorKind.SHARED_EXPERT, group, *shape)

    def _engram(self, prefix: str, layer: int) -> Iterator[TensorSpec]:
        config, group, kind = self._config, TensorGroup.ENGRAM, TensorKind.ENGRAM
        hidden, streams, width = config.hidden_size, config.hc_mult, config.engram_head_dim
        rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
        yield self._plain(
            f"{prefix}.embed.weight", TensorKind.ENGRAM_TABLE, group, self._table, (rows, width)
        )
        yield self._matrix(
            f"{prefix}.wkv.weight",
            kind,
            group,
            (streams + 1) * hidden,
            config.num_hash_columns * width,
        )
        yield self._bf16(f"{prefix}.q_weight", kind, group, streams, hidden)
        yield self._bf16(f"{prefix}.k_weight", kind, group, streams, hidden)

    def _drafter(self) -> Iterator[TensorSpec]:
        config, group, kind = self._config, TensorGroup.DSPARK, TensorKind.DRAFT_HEAD
        hidden, rank, vocab = config.hidden_size, config.dspark_markov_rank, config.vocab_size
        for stage in range(config.num_nextn_predict_layers):
            yield from self._block(f"mtp.{stage}", group, config.dspark_n_routed_experts)
        taps = len(config.dspark_target_layer_ids)
        yield self._matrix("mtp.0.main_proj.weight", kind, group, hidden, taps * hidden)
        yield self._bf16("mtp.0.main_norm.weight", TensorKind.NORM, group, hidden)
        last = f"mtp.{config.num_nextn_predict_layers - 1}"
        yield self._bf16(f"{last}.norm.weight", TensorKind.NORM, group, hidden)
        for part in ("embed", "head"):
            yield self._bf16(f"{last}.markov_head.{part}.weight", kind, group, vocab, rank)
        yield self._bf16(f"{last}.confidence_head.proj.weight", kind, group, 1, hidden + rank)

    def _vision(self) -> Iterator[TensorSpec]:
        width, inner = self._vision_size("hidden_size"), self._vision_size("intermediate_size")
        patch, fold = self._vision_size("patch_size"), self._vision_size("downsample_ratio")
        hidden = self._config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "vision.patch_embed.proj.weight": (width, 3 * patch * patch),
            "vision.patch_embed.proj.bias": (width,),
        }
        for block in range(self._vision_size("num_hidden_layers")):
            prefix = f"vision.blocks.{block}"
            shapes |= {
                f"{prefix}.norm1.weight": (width,),
                f"{prefix}.norm2.weight": (width,),
                f"{prefix}.attn.wqkv.weight": (3 * width, width),
                f"{prefix}.attn.wqkv.bias": (3 * width,),
                f"{prefix}.attn.wo.weight": (width, width),
                f"{prefix}.attn.wo.bias": (width,),
                f"{prefix}.mlp.w1.weight": (2 * inner, width),
                f"{prefix}.mlp.w2.weight": (width, inner),
            }
        shapes |= {
            "vision.norm.weight": (width,),
            "aligner.w1.weight": (hidden, fold * fold * width),
            "aligner.w1.bias": (hidden,),
            "aligner.w2.weight": (hidden, hidden),
            "aligner.w2.bias": (hidden,),
            "image_start": (hidden,),
            "image_end": (hidden,),
            "image_newline": (hidden,),
        }
        for name, shape in shapes.items():
            yield self._bf16(name, TensorKind.VISION, TensorGroup.VISION, *shape)

    def _vision_size(self, key: str) -> int:
        vision = self._config.vision_config
        value = None if vision is None else vision.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"vision_config.{key} is {value!r}, expected a whole number above 0; "
                "the shapes of the vision tensors follow from it"
            )
        return value
