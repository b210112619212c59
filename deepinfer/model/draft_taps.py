"""Taps: what the drafter's context features are made of, collected on the way through."""

from __future__ import annotations

from dataclasses import replace

from deepinfer.model.config import V41Config
from deepinfer.model.draft_ops import DraftOps
from deepinfer.model.layer_state import LayerState


class DraftTaps:
    """Adds the plain mean of the residual streams ENTERING each tapped layer to the state.

    V4 drafters tapped the streams leaving a layer; the two differ by one layer.
    """

    def __init__(self, config: V41Config, ops: DraftOps) -> None:
        self._layers = frozenset(config.dspark_target_layer_ids)
        self._share = 1.0 / config.hc_mult
        self._ops = ops

    def collect(self, layer: int, state: LayerState) -> LayerState:
        """State entering `layer`, with one more tap [T, D] if it is tapped."""
        if layer not in self._layers:
            return state
        mean = state.pre.new_full(state.pre.shape, self._share)
        return replace(state, taps=(*state.taps, self._ops.mhc_collapse(state.streams, mean)))
