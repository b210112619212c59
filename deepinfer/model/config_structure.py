"""Structural rules of the family: what the fields of a configuration must satisfy together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from deepinfer.device.errors import ConfigError
from deepinfer.model.engram_hash import engram_primes

if TYPE_CHECKING:
    from deepinfer.model.config import V41Config

_BLOCK = 32


def check_structure(config: V41Config) -> None:
    """Return when `config` is coherent.

    Args:
        config: all fields already have the right types and ranges.
    Raises:
        ConfigError: a rule is broken; the message names the fields and their values.
    Source: structural constraints of the V4.1 configuration.
    """
    for rule in _RULES:
        rule(config)


def _refuse(reason: str, **values: object) -> ConfigError:
    shown = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return ConfigError(f"config.json contradicts itself: {reason} ({shown})")


def _need(config: V41Config, *fields: str, because: str) -> None:
    for field in fields:
        if getattr(config, field) in (0, None, ()):
            raise _refuse(f"{because} needs {field}", **{field: getattr(config, field)})


def _check_ratios(config: V41Config) -> None:
    ratios, layers = config.compress_ratios, config.num_hidden_layers
    needed = layers + config.num_nextn_predict_layers
    if len(ratios) < needed:
        raise _refuse(
            f"compress_ratios has {len(ratios)} entries, at least {needed} are needed",
            num_hidden_layers=layers,
            num_nextn_predict_layers=config.num_nextn_predict_layers,
        )
    if not set(ratios) <= {0, 1, 2}:
        raise _refuse("compress_ratios holds only 0, 1 and 2", compress_ratios=ratios)
    if any(ratios[layers:]):
        raise _refuse("draft layers have ratio 0", compress_ratios=ratios, num_hidden_layers=layers)


def _check_sources(config: V41Config) -> None:
    for field in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids: tuple[int, ...] = getattr(config, field)
        _check_layer_ids(config, field, ids)
        flat = [layer for layer in ids if config.ratio(layer) == 0]
        if flat:
            raise _refuse(
                f"{field} names layers {flat} whose compress ratio is 0",
                compress_ratios=config.compress_ratios,
            )
    # With this, a layer's selection always lies in the cache that the layer reads.
    alone = set(config.kv_source_layer_ids) - set(config.index_source_layer_ids)
    if alone:
        raise _refuse(
            f"every KV source is an index source, {sorted(alone)} are not",
            kv_source_layer_ids=config.kv_source_layer_ids,
            index_source_layer_ids=config.index_source_layer_ids,
        )


def _check_layer_ids(config: V41Config, field: str, ids: tuple[int, ...]) -> None:
    if list(ids) != sorted(set(ids)):
        raise _refuse(f"{field} is ascending without repetition", **{field: ids})
    if ids and not (ids[0] >= 0 and ids[-1] < config.num_hidden_layers):
        raise _refuse(
            f"{field} names layers of the backbone",
            **{field: ids},
            num_hidden_layers=config.num_hidden_layers,
        )


def _check_sharing(config: V41Config) -> None:
    for layer in range(config.num_hidden_layers):
        ratio = config.ratio(layer)
        if ratio == 0:
            continue
        source = config.kv_source(layer)
        if source is None:
            raise _refuse(
                f"layer {layer} is the first with compress ratio > 0 and must be a KV source",
                kv_source_layer_ids=config.kv_source_layer_ids,
            )
        if config.ratio(source) != ratio:
            raise _refuse(
                f"layer {layer} has ratio {ratio}, its KV source {source} has "
                f"{config.ratio(source)}",
                compress_ratios=config.compress_ratios,
            )


def _check_last_source(config: V41Config) -> None:
    last = config.last_kv_source
    if last is None:
        return
    _need(
        config,
        "index_n_heads",
        "index_head_dim",
        "index_topk",
        "compress_rope_theta",
        because="a layer with compress ratio > 0",
    )
    if config.ratio(last) != 1:
        raise _refuse(
            f"the last KV source, layer {last}, has ratio 1",
            kv_source_layer_ids=config.kv_source_layer_ids,
            compress_ratios=config.compress_ratios,
        )
    late = [layer for layer in config.engram_layer_ids if layer >= last]
    if late:
        raise _refuse(
            f"Engram layers {late} are not before the last KV source, layer {last}",
            engram_layer_ids=config.engram_layer_ids,
            kv_source_layer_ids=config.kv_source_layer_ids,
        )


def _check_candidates(config: V41Config) -> None:
    source = config.candidate_source_layer_id
    if source == -1:
        return
    if source not in config.index_source_layer_ids or source != config.last_kv_source:
        raise _refuse(
            "the candidate source is the last KV source and an index source (-1: none)",
            candidate_source_layer_id=source,
            kv_source_layer_ids=config.kv_source_layer_ids,
            index_source_layer_ids=config.index_source_layer_ids,
        )
    _need(config, "candidate_topk_blocks", "candidate_block_size", because="a candidate source")
    blocks, size = config.candidate_topk_blocks, config.candidate_block_size
    # The newest block may hold one position only and is always kept.
    reachable = (blocks - 1) * size + 1
    if reachable < config.index_topk:
        raise _refuse(
            f"the candidate blocks reach only {reachable} positions for certain",
            candidate_topk_blocks=blocks,
            candidate_block_size=size,
            index_topk=config.index_topk,
        )


def _check_shapes(config: V41Config) -> None:
    heads, groups = config.num_attention_heads, config.o_groups
    if heads % groups:
        raise _refuse("o_groups divides the heads", num_attention_heads=heads, o_groups=groups)
    rope = config.qk_rope_head_dim
    if rope % 2 or rope > config.head_dim:
        raise _refuse(
            "qk_rope_head_dim is even and at most head_dim",
            qk_rope_head_dim=rope,
            head_dim=config.head_dim,
        )
    if config.index_source_layer_ids and rope > config.index_head_dim:
        raise _refuse(
            "qk_rope_head_dim is at most index_head_dim",
            qk_rope_head_dim=rope,
            index_head_dim=config.index_head_dim,
        )
    if config.num_experts_per_tok > config.n_routed_experts:
        raise _refuse(
            "more experts for a token than there are",
            num_experts_per_tok=config.num_experts_per_tok,
            n_routed_experts=config.n_routed_experts,
        )


def _check_token_ids(config: V41Config) -> None:
    fields = ["bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"]
    if config.engram_layer_ids:
        fields.append("engram_pad_token_id")
    if config.num_nextn_predict_layers:
        fields.append("dspark_noise_token_id")
    for field in fields:
        value = getattr(config, field)
        if value is not None and value >= config.vocab_size:
            raise _refuse(
                f"{field} is inside the vocabulary", **{field: value}, vocab_size=config.vocab_size
            )


def _check_engram(config: V41Config) -> None:
    layers, rows = config.engram_layer_ids, config.engram_num_embeddings
    if not layers:
        return
    _check_layer_ids(config, "engram_layer_ids", layers)
    if layers[0] == 0:
        raise _refuse("Engram is never on layer 0", engram_layer_ids=layers)
    _need(
        config,
        "engram_n_heads",
        "engram_head_dim",
        "engram_vocab_size",
        "engram_compressed_vocab_size",
        because="an Engram layer",
    )
    if config.engram_max_ngram_size < 2:
        raise _refuse(
            "an Engram layer needs n-grams of two tokens or more",
            engram_max_ngram_size=config.engram_max_ngram_size,
        )
    if len(rows) != len(layers):
        raise _refuse(
            "one table size for each Engram layer",
            engram_num_embeddings=rows,
            engram_layer_ids=layers,
        )
    primes = engram_primes(
        len(layers),
        config.engram_max_ngram_size,
        num_heads=config.engram_n_heads,
        start=config.engram_vocab_size,
    )
    for layer, num_rows, moduli in zip(layers, rows, primes, strict=True):
        needed = sum(sum(order) for order in moduli)
        if needed > num_rows:
            raise _refuse(
                f"the hash of layer {layer} reaches {needed} rows, its table has {num_rows}",
                engram_num_embeddings=rows,
                engram_vocab_size=config.engram_vocab_size,
            )


def _check_drafter(config: V41Config) -> None:
    if not config.num_nextn_predict_layers:
        return
    _need(
        config,
        "dspark_block_size",
        "dspark_noise_token_id",
        "dspark_markov_rank",
        "dspark_target_layer_ids",
        "dspark_n_routed_experts",
        "dspark_num_experts_per_tok",
        because="num_nextn_predict_layers > 0",
    )
    _check_layer_ids(config, "dspark_target_layer_ids", config.dspark_target_layer_ids)
    tapped = set(config.dspark_target_layer_ids) & set(config.engram_layer_ids)
    if tapped:
        raise _refuse(
            f"layers {sorted(tapped)} are draft taps with Engram, where sources disagree on which "
            "side of it the tap lies",
            dspark_target_layer_ids=config.dspark_target_layer_ids,
            engram_layer_ids=config.engram_layer_ids,
        )
    if config.dspark_num_experts_per_tok > config.dspark_n_routed_experts:
        raise _refuse(
            "more draft experts for a token than there are",
            dspark_num_experts_per_tok=config.dspark_num_experts_per_tok,
            dspark_n_routed_experts=config.dspark_n_routed_experts,
        )
    if config.sliding_window < config.dspark_block_size + 1:
        raise _refuse(
            "sliding_window holds a draft block and its anchor",
            sliding_window=config.sliding_window,
            dspark_block_size=config.dspark_block_size,
        )


def _check_quantised_widths(config: V41Config) -> None:
    if config.quantization_config is None:
        return
    widths = {
        "hidden_size": config.hidden_size,
        "q_lora_rank": config.q_lora_rank,
        "head_dim": config.head_dim,
        "moe_intermediate_size": config.moe_intermediate_size,
        "o_groups * o_lora_rank": config.o_groups * config.o_lora_rank,
        "num_attention_heads * head_dim / o_groups": (
            config.num_attention_heads * config.head_dim // config.o_groups
        ),
    }
    if config.index_source_layer_ids:
        widths["index_head_dim"] = config.index_head_dim
    if config.engram_layer_ids:
        widths["engram_head_dim"] = config.engram_head_dim
    bad = {name: width for name, width in widths.items() if width % _BLOCK}
    if bad:
        shown = ", ".join(f"{name}={width}" for name, width in bad.items())
        raise ConfigError(
            f"quantised storage needs multiples of {_BLOCK}: {shown}; use such widths, or a "
            "checkpoint without quantization_config"
        )


_RULES: tuple[Callable[[V41Config], None], ...] = (
    _check_ratios,
    _check_sources,
    _check_sharing,
    _check_engram,
    _check_last_source,
    _check_candidates,
    _check_shapes,
    _check_token_ids,
    _check_drafter,
    _check_quantised_widths,
)
