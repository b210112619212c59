"""Engram: n-gram rows hashed from token ids, fetched early, injected at a layer's entry."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.handles import FetchHandle
from deepinfer.device.ops.engram import HashConstants
from deepinfer.model.config import V41Config
from deepinfer.model.engram_hash import build_hash_constants
from deepinfer.model.model_ops import ModelOps
from deepinfer.model.packing import Packer
from deepinfer.model.step_batch import StepPlan


def hash_constants(config: V41Config, token_map: Tensor, device: torch.device) -> HashConstants:
    """Constants of the hash op on the device.

    Args:
        config: the model, with Engram layers.
        token_map: [V] integer token id -> compressed id.
        device: where the op runs.
    """
    host = build_hash_constants(config, token_map)
    return HashConstants(
        token_map=token_map.to(device),
        multipliers=host.multipliers.to(device),
        primes=host.primes.flatten(1).to(device),
        offsets=host.offsets.flatten(1).to(device),
        pad=host.pad_id,
    )


class EngramLookup:
    """The hash of all Engram layers of a step, once per forward."""

    def __init__(self, constants: HashConstants, ops: ModelOps) -> None:
        self._constants, self._ops = constants, ops

    def rows(self, plan: StepPlan) -> Tensor:
        """[T, num_engram_layers, columns] int64 table rows."""
        return self._ops.ngram_hash(
            plan.batch.input_ids,
            plan.batch.history,
            plan.rows.row_seq,
            plan.rows.row_offset,
            constants=self._constants,
        )


class Engram:
    """Table, projection and gate of one Engram layer."""

    def __init__(self, config: V41Config, ops: ModelOps, weights: Packer, backend: Backend) -> None:
        """Bind ops and pack weights; `weights` is at the layer's `engram.`."""
        self._ops, self._eps = ops, config.rms_norm_eps
        self._table = backend.pack_engram_table(weights.stored("embed.weight"))
        self._project = weights.linear("wkv.weight")
        self._query_key = weights.vector("q_weight") * weights.vector("k_weight")

    def start(self, rows: Tensor) -> FetchHandle:
        """Begin fetching this layer's rows [T, columns]."""
        return self._ops.engram_fetch_start(self._table, rows)

    def inject(self, streams: Tensor, fetch: FetchHandle) -> Tensor:
        """Streams [T, M, D] with the gated value added."""
        kv = self._ops.linear(self._ops.engram_fetch_wait(fetch), self._project)
        return self._ops.engram_inject(streams, kv, self._query_key, None, eps=self._eps)
