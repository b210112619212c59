"""The DSpark drafter: a block of tokens for each request from one pass of few small layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.device.errors import ConfigError
from deepinfer.device.weights import Parameters
from deepinfer.model.backbone import Backbone
from deepinfer.model.caches import ModelCaches
from deepinfer.model.draft_batch import DraftBatch, Drafts
from deepinfer.model.draft_context import DraftContext
from deepinfer.model.draft_head import DraftHead
from deepinfer.model.draft_ops import DraftOps
from deepinfer.model.draft_stage import DraftStage, DraftState
from deepinfer.model.layer_state import LayerState, initial_state
from deepinfer.model.packing import Packer
from deepinfer.model.rope import rope_table
from deepinfer.model.step_batch import StepPlan
from deepinfer.model.tracing import TraceSink


class Drafter:
    """Context injection and block drafting beside a backbone whose embedding and head it shares.

    A round is: run the backbone with taps, decide on the device how many rows are final, `inject`
    them, `draft` from the new anchors. Nothing is appended: rows are addressed by position, so
    going back to an earlier position is drafting from there.
    """

    def __init__(
        self,
        backbone: Backbone,
        parameters: Parameters,
        draft_ops: DraftOps,
        *,
        max_positions: int,
    ) -> None:
        """Pack the `mtp.*` weights.

        Args:
            backbone: the target, built with `DraftTaps`.
            parameters: logical parameters under checkpoint names.
            draft_ops: the drafter's ops.
            max_positions: longest sequence in tokens.
        Raises:
            CheckpointError: a parameter is missing.
        """
        config, backend, ops = backbone.config, backbone.backend, backbone.ops
        self._config, self._backend, self._ops = config, backend, ops
        self._draft_ops = draft_ops
        self._embedding = backbone.embedding
        # A block reaches past the longest sequence; nobody reads the drafts there.
        num_positions = max_positions + config.dspark_block_size
        table = rope_table(config, 0, num_positions).to(backend.runtime.device)
        weights = Packer(backend, parameters, "mtp.")
        self._context = DraftContext(config, ops, draft_ops, weights=weights, rope_table=table)
        self._stages = [
            DraftStage(
                config,
                stage,
                backend=backend,
                ops=ops,
                weights=weights.under(f"{stage}."),
                rope_table=table,
            )
            for stage in range(config.num_nextn_predict_layers)
        ]
        self._head = DraftHead(
            config,
            ops,
            draft_ops,
            backend=backend,
            weights=weights.under(f"{config.num_nextn_predict_layers - 1}."),
            lm_head=backbone.lm_head,
        )
        self._temperatures = self._on_device([1.0] * config.dspark_block_size)

    @property
    def max_drafts(self) -> int:
        """Most drafts of one pass: the block size that the drafter was trained with."""
        return self._config.dspark_block_size

    def calibrate(self, temperatures: Sequence[float]) -> None:
        """Set the temperatures by which confidences are scaled, one for each place in the block.

        Raises:
            ConfigError: there are not `max_drafts` of them, or one is not a finite number above 0.
        """
        if len(temperatures) != self.max_drafts:
            raise ConfigError(
                f"{len(temperatures)} confidence temperatures for blocks of {self.max_drafts} "
                "drafts (dspark_block_size); give one for each place"
            )
        for place, value in enumerate(temperatures):
            if not 0.0 < value < float("inf"):
                raise ConfigError(
                    f"confidence temperature {place} is {value}; expected a finite number above 0"
                )
        self._temperatures = self._on_device(temperatures)

    def inject(
        self,
        state: LayerState,
        plan: StepPlan,
        num_accepted: Tensor,
        caches: ModelCaches,
        trace: TraceSink | None = None,
    ) -> None:
        """Make accepted rows of a target step the drafter's context; see `DraftContext.inject`."""
        self._context.inject(state, plan, num_accepted, caches, trace)

    def draft(
        self,
        batch: DraftBatch,
        caches: ModelCaches,
        *,
        num_drafts: int | None = None,
        trace: TraceSink | None = None,
    ) -> Drafts:
        """Draft after every anchor; issues device work only.

        Args:
            batch: the anchors; all positions before them are injected, as far as the window goes.
            caches: draft windows; rows from the anchors on are overwritten as scratch.
            num_drafts: K drafts of each request, 1 to `max_drafts`; None: all. The block is
                computed whole, because its rows see each other.
            trace: receives intermediate tensors, or None.
        Raises:
            ConfigError: `num_drafts` is outside its range.
        """
        config, size = self._config, self.max_drafts
        wanted = size if num_drafts is None else num_drafts
        if not 1 <= wanted <= size:
            raise ConfigError(
                f"{wanted} drafts were asked of a drafter with dspark_block_size {size}; expected "
                f"1 to {size}"
            )
        plan = self._draft_ops.draft_plan(
            batch.anchor_positions,
            batch.seq_slots,
            batch.floors,
            batch.valid,
            block_size=size,
            window=config.sliding_window,
            ring=caches.geometry.draft_ring,
        )
        ids = batch.anchor_ids.new_full((batch.anchor_ids.shape[0], size), self._noise_id)
        ids[:, 0] = batch.anchor_ids
        embedded = self._ops.embed(ids.flatten(), self._embedding)
        entering = initial_state(embedded, config.hc_mult)
        state = DraftState(entering.streams, entering.pre)
        for stage, window in zip(self._stages, caches.draft_windows, strict=True):
            state = stage.forward(state, plan, window, trace)
        return self._head.forward(state, batch, self._temperatures[:wanted], trace)

    @property
    def _noise_id(self) -> int:
        noise = self._config.dspark_noise_token_id
        assert noise is not None  # a configuration with a drafter states it
        return noise

    def _on_device(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._backend.runtime.device)
