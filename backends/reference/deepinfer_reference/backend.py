"""The reference backend object: packing, caches, op table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.device.backend import CacheKind
from deepinfer.device.errors import ConfigError
from deepinfer.device.hookspecs import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpTable
from deepinfer.device.weights import StoredTensor, WeightFormat
from deepinfer_reference.caches import DenseRows
from deepinfer_reference.handles import (
    DenseEmbedding,
    DenseExperts,
    DenseGrouped,
    DenseLinear,
    EngramRows,
)
from deepinfer_reference.host_memory import keep_freed_memory
from deepinfer_reference.ops import (
    attention,
    compress,
    engram,
    indexer,
    kv,
    mhc,
    moe,
    norm,
    quant,
    sampling,
    spec,
    state,
)
from deepinfer_reference.runtime import ReferenceRuntime, RuntimeMode

_OPTIONS = {"runtime": [mode.value for mode in RuntimeMode]}


def build_op_table(numerics: Numerics) -> OpTable:
    """The reference's implementations of every primitive op."""
    dtype = "float32" if numerics is Numerics.EXACT else "bfloat16"
    table = OpTable("reference", device="cpu", dtype=dtype)
    for family in (
        attention, compress, engram, indexer, kv, mhc, moe, norm, quant, sampling, spec, state,
    ):  # fmt: skip
        family.register(table)
    return table


class ReferenceBackend:
    """Pure PyTorch on the CPU; batch invariant by construction in both numerics modes."""

    name = "reference"
    features = frozenset({"batch_invariant", "deterministic", "graph_capture"})

    def __init__(self, config: BackendConfig) -> None:
        unknown = sorted(set(config.options) - set(_OPTIONS))
        if unknown:
            raise ConfigError(
                f"backend.options.{unknown[0]} is unknown to the reference backend; it has "
                f"{sorted(_OPTIONS)}"
            )
        mode = config.options.get("runtime", RuntimeMode.THREAD.value)
        if mode not in _OPTIONS["runtime"]:
            raise ConfigError(
                f"backend.options.runtime is {mode!r}; expected one of {_OPTIONS['runtime']}"
            )
        keep_freed_memory()
        self.numerics = config.numerics
        self.runtime = ReferenceRuntime(RuntimeMode(mode))
        self.ops = build_op_table(config.numerics)

    @property
    def activation_dtype(self) -> torch.dtype:
        return torch.float32 if self.numerics is Numerics.EXACT else torch.bfloat16

    def _quantizes_input(self, fmt: WeightFormat) -> bool:
        return self.numerics is Numerics.NORMATIVE and fmt.is_quantized

    def pack_linear(self, parts: Sequence[StoredTensor]) -> DenseLinear:
        quantizes = {self._quantizes_input(part.format) for part in parts}
        if len(quantizes) != 1:
            raise ConfigError(
                "pack_linear was given quantised and unquantised matrices that share an input: "
                f"{[part.format.value for part in parts]}; store them alike"
            )
        matrix = torch.cat([part.dequantize() for part in parts])
        return DenseLinear(matrix.t().contiguous(), quantizes.pop())

    def pack_grouped(self, weight: StoredTensor, num_groups: int) -> DenseGrouped:
        blocks = weight.dequantize().unflatten(0, (num_groups, -1)).transpose(1, 2)
        return DenseGrouped(blocks.contiguous())

    def pack_experts(
        self,
        gate: Sequence[StoredTensor],
        up: Sequence[StoredTensor],
        down: Sequence[StoredTensor],
    ) -> DenseExperts:
        gate_up = tuple(
            torch.cat((g.dequantize(), u.dequantize())).t().contiguous()
            for g, u in zip(gate, up, strict=True)
        )
        transposed = tuple(d.dequantize().t().contiguous() for d in down)
        return DenseExperts(gate_up, transposed, self._quantizes_input(gate[0].format))

    def pack_vector(self, value: StoredTensor) -> Tensor:
        return value.dequantize().clone()

    def pack_embedding(self, table: StoredTensor) -> DenseEmbedding:
        return DenseEmbedding(table.dequantize().to(self.activation_dtype))

    def pack_engram_table(self, table: StoredTensor) -> EngramRows:
        if table.scale is None:
            return EngramRows(table.data, None, self.activation_dtype)
        return EngramRows(table.data.view(torch.uint8), table.scale, self.activation_dtype)

    def create_cache(self, kind: CacheKind, num_rows: int, width: int) -> DenseRows:
        return DenseRows(kind, num_rows, width, self.numerics)

    def cache_row_bytes(self, kind: CacheKind, width: int) -> int:
        return width * self.activation_dtype.itemsize

    def close(self) -> None:
        self.runtime.close()
