"""What one backbone layer does for attention, derived from three lists of the configuration."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class LayerMode(enum.Enum):
    """The four kinds of attention layer.

    SWA reads only its own sliding window. FULL compresses its input into a new cache and selects
    positions in it. REINDEX selects anew in the cache of an earlier layer. REUSE reads an earlier
    layer's cache at an earlier layer's selection.
    """

    SWA = "swa"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


@dataclass(frozen=True, slots=True)
class LayerRole:
    """One row of the layer mode table.

    Attributes:
        layer: layer id, counted from 0.
        ratio: tokens in one row of the compressed cache it reads; 0 when it reads none.
        mode: what it does.
        kv_source: layer whose compressed cache it reads, or None.
        index_source: layer whose selection it uses, or None.
        has_engram: an Engram table is looked up at its entry.
        is_candidate_source: it publishes the candidate blocks that later index layers search.
    """

    layer: int
    ratio: int
    mode: LayerMode
    kv_source: int | None
    index_source: int | None
    has_engram: bool
    is_candidate_source: bool


def latest_source(sources: tuple[int, ...], layer: int) -> int | None:
    """Return the largest id in `sources` that is not above `layer`, or None.

    Args:
        sources: layer ids, ascending.
        layer: layer id.
    """
    return max((source for source in sources if source <= layer), default=None)
