"""The caches of a model by kind: what they cost, who owns them, which a later prompt may use."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from deepinfer.device.numerics import Numerics
from deepinfer.model.cache_bytes import cache_bytes
from deepinfer.model.config import V41Config

_BLOCKS, _REQUEST = "shared blocks", "request"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Caches that live and are shared alike.

    Attributes:
        name: what they hold.
        layers: layers that own one; empty where it belongs to no layer.
        tokens_per_state: tokens of one row, by layer in the same order; 0 where rows are no
            function of the length.
        bytes_per_token: by which all of them together grow with each token.
        bytes_per_request: of all of them together, whatever the length.
        is_cacheable: whether blocks of it are found by prompts with the same beginning.
        lifetime: who owns it.
    """

    name: str
    layers: tuple[int, ...]
    tokens_per_state: tuple[int, ...]
    bytes_per_token: Fraction
    bytes_per_request: int
    is_cacheable: bool
    lifetime: str


def cache_groups(
    config: V41Config, numerics: Numerics = Numerics.NORMATIVE
) -> tuple[CacheGroup, ...]:
    """The groups of a model, those that it does not have left out.

    Args:
        config: the model configuration.
        numerics: which records the caches hold.
    Source: group table of the prefix cache.
    """
    sizes, owners = cache_bytes(config, numerics), config.kv_source_layer_ids
    ratios = tuple(config.ratio(layer) for layer in owners)
    backbone = tuple(range(config.num_hidden_layers))
    drafting = tuple(range(len(backbone), len(backbone) + config.num_nextn_predict_layers))
    pooling = tuple(layer for layer in owners if config.ratio(layer) > 1)
    none = Fraction(0)
    groups = (
        CacheGroup("main compressed", owners, ratios, sizes.compressed_per_token, 0, True, _BLOCKS),
        CacheGroup("index keys", owners, ratios, sizes.index_per_token, 0, True, _BLOCKS),
        CacheGroup(
            "window", backbone, (1,) * len(backbone), none, sizes.window_per_request, False,
            _REQUEST,
        ),
        CacheGroup(
            "compressor ring", pooling, (0,) * len(pooling), none, sizes.pending_per_request, False,
            f"{_REQUEST}, odd lengths",
        ),
        CacheGroup(
            "draft window", drafting, (1,) * len(drafting), none, sizes.draft_window_per_request,
            False, f"{_REQUEST}, drafting",
        ),
        CacheGroup(
            "Engram look-back", (), (), none, sizes.history_per_request, False,
            f"{_REQUEST}, token ids",
        ),
    )  # fmt: skip
    return tuple(group for group in groups if group.bytes_per_token or group.bytes_per_request)
