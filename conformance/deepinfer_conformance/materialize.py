"""From canonical arguments to a backend's own: packed weights, caches, tensors on its device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.handles import RowCache
from deepinfer.device.op import OpSpec
from deepinfer.device.ops.engram import engram_fetch_start
from deepinfer.device.ops.mhc import MhcWeights
from deepinfer.device.ops.moe import moe_dispatch, moe_experts
from deepinfer.device.samples.canonical import (
    CanonicalBatch,
    CanonicalCache,
    CanonicalEmbedding,
    CanonicalEngram,
    CanonicalExperts,
    CanonicalFetch,
    CanonicalGrouped,
    CanonicalLinear,
    CanonicalMhc,
    CanonicalSlots,
    CanonicalVector,
)
from deepinfer.device.samples.registry import Arguments

_SHARED_HANDLES = (CanonicalCache, CanonicalBatch, CanonicalEngram, CanonicalExperts)


def moved(x: Tensor, device: torch.device) -> Tensor:
    """A copy of x on the device with x's strides, so that gaps stay gaps."""
    copy = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
    return copy.copy_(x)


class Materializer:
    """Makes the arguments of one call; an object that occurs twice is made once."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._made: dict[int, object] = {}

    def arguments(self, arguments: Arguments) -> Arguments:
        """Arguments by name as the backend's op takes them."""
        return {name: self.value(value) for name, value in arguments.items()}

    def value(self, value: object) -> object:
        """One argument: canonical handles are packed, tensors moved, the rest passes."""
        if isinstance(value, Tensor):
            return moved(value, self.backend.runtime.device)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            make = cast("Callable[..., object]", type(value))
            return make(*(self.value(item) for item in value))
        if isinstance(value, _SHARED_HANDLES):
            if id(value) not in self._made:
                self._made[id(value)] = self._shared(value)
            return self._made[id(value)]
        return self._packed(value)

    def _call(self, spec: OpSpec[..., Any], *arguments: object) -> object:
        result: object = self.backend.ops[spec](*(self.value(value) for value in arguments))
        return result

    def _shared(
        self, value: CanonicalCache | CanonicalBatch | CanonicalEngram | CanonicalExperts
    ) -> object:
        if isinstance(value, CanonicalCache):
            return self._cache(value)
        if isinstance(value, CanonicalEngram):
            return self.backend.pack_engram_table(value.table)
        if isinstance(value, CanonicalExperts):
            return self.backend.pack_experts(value.gate, value.up, value.down)
        return self._call(moe_dispatch, value.x, value.routing, value.physical, value.valid)

    def _packed(self, value: object) -> object:
        backend = self.backend
        if isinstance(value, CanonicalLinear):
            return backend.pack_linear(value.parts)
        if isinstance(value, CanonicalGrouped):
            return backend.pack_grouped(value.weight, value.num_groups)
        if isinstance(value, CanonicalVector):
            return backend.pack_vector(value.value)
        if isinstance(value, CanonicalMhc):
            parts = (value.fn, value.scale, value.base)
            return MhcWeights(*(backend.pack_vector(part.value) for part in parts))
        if isinstance(value, CanonicalEmbedding):
            return backend.pack_embedding(value.table)
        if isinstance(value, CanonicalFetch):
            return self._call(engram_fetch_start, value.table, value.rows)
        if isinstance(value, CanonicalSlots):
            return self._slots(value)
        return value

    def _cache(self, value: CanonicalCache) -> RowCache:
        num_rows, width = value.values.shape
        cache = self.backend.create_cache(value.kind, num_rows, width)
        device = self.backend.runtime.device
        cache.pack(torch.arange(num_rows, device=device), moved(value.values, device))
        if value.poisoned:
            cache.poison(torch.tensor(value.poisoned, device=device))
        return cache

    def _slots(self, value: CanonicalSlots) -> Tensor:
        outputs = self._call(moe_experts, value.batch, value.experts, value.swiglu_limit)
        assert isinstance(outputs, Tensor)
        if value.fill is not None:
            outputs[:] = moved(value.fill, outputs.device)
        return outputs
