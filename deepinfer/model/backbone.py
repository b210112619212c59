"""The V4.1 text backbone, cut at the last KV source.

Segments: the encoder (layers before the last KV source), the KV write of that layer, and the
decoder (its remainder and all later layers). Everything that grows with the context is written
by the first two, so a prefill may run the decoder on the rows whose logits it needs: a step's
plan says where rows are dropped (`replay`).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.handles import FetchHandle
from deepinfer.device.weights import Parameters
from deepinfer.model.caches import CacheGeometry, ModelCaches
from deepinfer.model.config import V41Config
from deepinfer.model.controls import Controls, EngramRows
from deepinfer.model.draft_taps import DraftTaps
from deepinfer.model.engram import EngramLookup, hash_constants
from deepinfer.model.forwarded import Forwarded
from deepinfer.model.layer import Layer
from deepinfer.model.layer_state import LayerState, initial_state
from deepinfer.model.model_ops import ModelOps
from deepinfer.model.packing import Packer
from deepinfer.model.rope import rope_table
from deepinfer.model.step_batch import StepBatch, StepPlan
from deepinfer.model.step_planner import StepPlanner
from deepinfer.model.tracing import TraceSink

Fetches = dict[int, FetchHandle]


class SourceInput(NamedTuple):
    """Input of the last KV source's attention, and its query projection if already computed."""

    x: Tensor
    low_rank: Tensor | None


class Backbone:
    """Embedding, layers, final norm and head on one backend.

    A forward issues device work only: it reads nothing back and may be captured or enqueued.
    """

    def __init__(
        self,
        config: V41Config,
        backend: Backend,
        parameters: Parameters,
        token_map: Tensor,
        *,
        max_positions: int,
        ops: ModelOps | None = None,
        taps: DraftTaps | None = None,
        controls: Controls | None = None,
    ) -> None:
        """Bind ops, pack weights.

        Args:
            config: the model.
            backend: device layer; its numerics mode applies.
            parameters: logical parameters under checkpoint names.
            token_map: [V] compressed token ids for Engram.
            max_positions: longest sequence, prompt and output, in tokens.
            ops: bound ops, if the caller bound them before reading the weights.
            taps: collects what the drafter's context is made of, or None.
            controls: parts put out of action in a measuring run, or None.
        Raises:
            CapabilityError: the backend lacks an op.
            CheckpointError: a parameter is missing.
        """
        self.config, self.backend = config, backend
        self.ops = ops or ModelOps(backend.ops)
        controls = controls or Controls()
        device = backend.runtime.device
        root = Packer(backend, parameters)
        self.embedding = backend.pack_embedding(root.stored("embed.weight"))
        self._norm = root.vector("norm.weight")
        self.lm_head = root.linear("head.weight")
        ratios = set(config.compress_ratios[: config.num_hidden_layers])
        tables = {r: rope_table(config, int(r > 0), max_positions).to(device) for r in ratios}
        self.layers = [
            Layer(
                config,
                index,
                backend=backend,
                ops=self.ops,
                weights=root.under(f"layers.{index}."),
                rope_table=tables[config.ratio(index)],
                selections=controls.selections,
            )
            for index in range(config.num_hidden_layers)
        ]
        self._taps = taps
        self._planner = StepPlanner(
            self.ops, ratios=sorted(r for r in ratios if r > 0), window=config.sliding_window
        )
        self._lookup = (
            EngramLookup(hash_constants(config, token_map, device), self.ops)
            if config.engram_layer_ids and controls.engram is EngramRows.MODEL
            else None
        )
        # Without a compressed cache there is nothing to cut at: all layers are encoder.
        self._cut = (
            config.num_hidden_layers if config.last_kv_source is None else config.last_kv_source
        )

    def create_caches(self, geometry: CacheGeometry) -> ModelCaches:
        """Caches of the geometry on this backbone's backend."""
        return ModelCaches(self.config, geometry, self.backend)

    def plan(self, batch: StepBatch, geometry: CacheGeometry) -> StepPlan:
        """Derive on the device what every layer of the step needs."""
        return self._planner.plan(batch, geometry)

    def begin(self, plan: StepPlan, trace: TraceSink | None = None) -> tuple[LayerState, Fetches]:
        """Embed the rows and start every Engram fetch."""
        embedded = self.ops.embed(plan.batch.input_ids, self.embedding)
        fetches: Fetches = {}
        if self._lookup is not None:
            rows = self._lookup.rows(plan)
            for column, layer in enumerate(self.config.engram_layer_ids):
                engram = self.layers[layer].engram
                assert engram is not None  # the layer list and engram_layer_ids agree
                if trace is not None:
                    trace.record(f"engram.{layer}.hash_ids", rows[:, column])
                kept, origin = rows[:, column], plan.entering(layer).origin
                if origin is not None:
                    kept = kept.index_select(0, origin)
                fetches[layer] = engram.start(kept.contiguous())
        return initial_state(embedded, self.config.hc_mult), fetches

    def encode(
        self,
        state: LayerState,
        fetches: Fetches,
        plan: StepPlan,
        caches: ModelCaches,
        trace: TraceSink | None = None,
    ) -> LayerState:
        """Encoder segment: the layers before the last KV source."""
        for layer in self.layers[: self._cut]:
            state = self._layer(layer, state, fetches.get(layer.index), plan, caches, trace)
        return state

    def write_source(
        self,
        state: LayerState,
        plan: StepPlan,
        caches: ModelCaches,
        trace: TraceSink | None = None,
    ) -> SourceInput | None:
        """KV write of the last source; None when the model has no such layer."""
        if self._cut == len(self.layers):
            return None
        source = self.layers[self._cut]
        entering = plan.entering(source.index)
        if trace is not None:
            trace.record(f"layers.{source.index}.streams", state.streams)
        x = source.attention_input(state)
        return SourceInput(x, source.write_kv(x, entering, caches))

    def decode(
        self,
        state: LayerState,
        source_input: SourceInput | None,
        plan: StepPlan,
        caches: ModelCaches,
        trace: TraceSink | None = None,
    ) -> LayerState:
        """Decoder segment: the last source's remainder and all later layers."""
        if source_input is None:
            return state
        source = self.layers[self._cut]
        entering, cut = plan.entering(source.index), plan.cut(source.index)
        state = self._tapped(source.index, state)
        state = source.finish(*source_input, state, entering, caches, cut=cut, trace=trace)
        for layer in self.layers[self._cut + 1 :]:
            state = self._layer(layer, state, None, plan, caches, trace)
        return state

    def _layer(
        self,
        layer: Layer,
        state: LayerState,
        fetch: FetchHandle | None,
        plan: StepPlan,
        caches: ModelCaches,
        trace: TraceSink | None,
    ) -> LayerState:
        """One layer for the rows that enter it; nothing when no row does."""
        entering = plan.entering(layer.index)
        if entering.origin is not None and entering.num_rows == 0:
            return state
        state = self._tapped(layer.index, state)
        cut = plan.cut(layer.index)
        return layer.forward(state, fetch, entering, caches, cut=cut, trace=trace)

    def _tapped(self, layer: int, state: LayerState) -> LayerState:
        return state if self._taps is None else self._taps.collect(layer, state)

    def head(
        self, state: LayerState, logits_rows: Tensor, trace: TraceSink | None = None
    ) -> Tensor:
        """[L, V] fp32 logits of the wanted rows."""
        if trace is not None:
            trace.record("final.streams", state.streams)
        hidden = self.ops.mhc_collapse_norm(
            state.streams.index_select(0, logits_rows),
            state.pre.index_select(0, logits_rows),
            self._norm,
            self.config.rms_norm_eps,
        )
        if trace is not None:
            trace.record("final.hidden", hidden)
        return self.ops.linear_f32(hidden, self.lm_head)

    def forward(
        self, batch: StepBatch, caches: ModelCaches, trace: TraceSink | None = None
    ) -> Tensor:
        """Logits of a step; see `step`."""
        return self.step(batch, caches, trace).logits

    def step(
        self, batch: StepBatch, caches: ModelCaches, trace: TraceSink | None = None
    ) -> Forwarded:
        """Run one step.

        Args:
            batch: inputs, on the device.
            caches: KV state; changed in place.
            trace: receives intermediate tensors, or None.

        Returns:
            [L, V] fp32 logits of `batch.logits_rows`, and what a drafter's context is made of.
        Source: backbone forward of V4.1.
        """
        plan = self.plan(batch, caches.geometry)
        state = self.run(plan, caches, trace)
        return Forwarded(self.head(state, plan.final.batch.logits_rows, trace), state, plan)

    def run(
        self, plan: StepPlan, caches: ModelCaches, trace: TraceSink | None = None
    ) -> LayerState:
        """All layers of a step; the state of `plan.final` after the last one, with its taps.

        Args:
            plan: the step.
            caches: KV state; changed in place.
            trace: receives intermediate tensors, or None.
        """
        state, fetches = self.begin(plan, trace)
        state = self.encode(state, fetches, plan, caches, trace)
        source_input = self.write_source(state, plan, caches, trace)
        return self.decode(state, source_input, plan, caches, trace)
