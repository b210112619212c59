"""Bytes that one request keeps, as a pure function of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from deepinfer.device.numerics import Numerics
from deepinfer.model.config import V41Config

_FP32_BYTES = 4
_TOKEN_ID_BYTES = 4
_SCALE_GROUP = 32
_FP4_GROUP = 16
# Values and gates of the token that waits for its partner.
_PENDING_ROWS = 2


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """What the caches of one request hold, without page padding and room for drafts.

    Attributes:
        compressed_row: bytes of one row of compressed KV.
        index_row: bytes of one index key.
        window_row: bytes of one row of a sliding window.
        compressed_per_token: compressed KV of all owners together; a fraction when odd.
        index_per_token: index keys of all owners together.
        window_per_request: sliding windows of all backbone layers.
        pending_per_request: open rows of the compressors with ratio 2, live at odd lengths.
        history_per_request: token ids that the next n-gram hash looks back on.
        draft_window_per_request: sliding windows of the draft layers, when they are run.
    """

    compressed_row: int
    index_row: int
    window_row: int
    compressed_per_token: Fraction
    index_per_token: Fraction
    window_per_request: int
    pending_per_request: int
    history_per_request: int
    draft_window_per_request: int

    @property
    def per_token(self) -> Fraction:
        """Bytes by which the caches grow with each token."""
        return self.compressed_per_token + self.index_per_token

    @property
    def per_request(self) -> int:
        """Bytes that do not depend on the length, without the drafter's."""
        return self.window_per_request + self.pending_per_request + self.history_per_request


def cache_bytes(config: V41Config, numerics: Numerics = Numerics.NORMATIVE) -> CacheBytes:
    """Return the cache sizes of one request.

    Args:
        config: the model configuration.
        numerics: NORMATIVE counts the published records (e4m3 windows, FP4 compressed rows and
            index keys, scales included), EXACT fp32 rows.
    Source: per-request state of the V4.1 release.
    """
    owners = config.kv_source_layer_ids
    rows_per_token = sum((Fraction(1, config.ratio(layer)) for layer in owners), Fraction(0))
    window_row, compressed_row, index_row = _rows(config, numerics)
    window = config.sliding_window * window_row
    num_pooling = sum(config.ratio(layer) == 2 for layer in owners)
    history = max(config.engram_max_ngram_size - 1, 0) if config.engram_layer_ids else 0
    return CacheBytes(
        compressed_row=compressed_row,
        index_row=index_row,
        window_row=window_row,
        compressed_per_token=rows_per_token * compressed_row,
        index_per_token=rows_per_token * index_row,
        window_per_request=window * config.num_hidden_layers,
        pending_per_request=num_pooling * _PENDING_ROWS * config.head_dim * _FP32_BYTES,
        history_per_request=history * _TOKEN_ID_BYTES,
        draft_window_per_request=window * config.num_nextn_predict_layers,
    )


def _rows(config: V41Config, numerics: Numerics) -> tuple[int, int, int]:
    """Bytes of a window row, a compressed row and an index key."""
    width, index_width = config.head_dim, config.index_head_dim
    if numerics is Numerics.EXACT:
        return width * _FP32_BYTES, width * _FP32_BYTES, index_width * _FP32_BYTES
    return (
        width + -(-width // _SCALE_GROUP),
        -(-width // 2) + -(-width // _FP4_GROUP),
        -(-index_width // 2) + -(-index_width // _SCALE_GROUP),
    )
