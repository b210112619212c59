"""The backend object: options, packing, caches, op table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from deepinfer.device.backend import DECODE_GRAPHS, CacheKind
from deepinfer.device.errors import CapabilityError
from deepinfer.device.hookspecs import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpTable
from deepinfer.device.weights import StoredTensor, WeightFormat
from deepinfer_cuda_sm100.caches import RecordRows, cache_format, row_bytes
from deepinfer_cuda_sm100.handles import (
    PackedEmbedding,
    PackedEngram,
    PackedExperts,
    PackedGrouped,
    PackedLinear,
)
from deepinfer_cuda_sm100.ops import build_op_table
from deepinfer_cuda_sm100.options import CudaOptions, EngramPlace
from deepinfer_cuda_sm100.packing import matrix_operand, plain_operand, stacked_operand
from deepinfer_cuda_sm100.runtime import CudaRuntime

_Made = TypeVar("_Made")
_GIB = 2**30


class CudaBackend:
    """Triton kernels on one GPU; tiles and splits do not depend on the number of rows."""

    name = "cuda_sm100"

    def __init__(self, config: BackendConfig, options: CudaOptions) -> None:
        self.numerics = config.numerics
        self.options = options
        self.runtime = CudaRuntime(options)
        self.ops: OpTable = build_op_table(config.numerics, self.runtime)

    @property
    def labels(self) -> tuple[str, ...]:
        """What every report has to say: `interpreted` where no GPU computed anything."""
        return ("interpreted",) if self.runtime.interprets else ()

    @property
    def features(self) -> frozenset[str]:
        declared = {"batch_invariant", "deterministic", "graph_capture"}
        if self.options.graphs and not self.runtime.interprets:
            declared.add(DECODE_GRAPHS)
        return frozenset(declared)

    @property
    def activation_dtype(self) -> torch.dtype:
        return torch.float32 if self.numerics is Numerics.EXACT else torch.bfloat16

    def _quantizes_input(self, fmt: WeightFormat) -> bool:
        return self.numerics is Numerics.NORMATIVE and fmt.is_quantized

    def _with_room(self, what: str, make: Callable[[], _Made]) -> _Made:
        """What `make` puts on the device; a full device is a refusal, not a crash.

        Raises:
            CapabilityError: the device's memory does not hold it.
        """
        try:
            return make()
        except torch.OutOfMemoryError as error:
            facts = self.runtime.memory()
            raise CapabilityError(
                f"{self.name}: no memory for {what}: {facts.free_bytes / _GIB:.2f} GiB of "
                f"{facts.total_bytes / _GIB:.2f} GiB are free; use a smaller checkpoint, cache or "
                "scheduler.max_num_seqs, or put Engram tables in host memory "
                "(backend.options.engram_tables=host)"
            ) from error

    def pack_linear(self, parts: Sequence[StoredTensor]) -> PackedLinear:
        operand = self._with_room(
            f"matrices {[part.shape for part in parts]}",
            lambda: matrix_operand(parts, self.numerics, self.runtime.device),
        )
        quantizes = self._quantizes_input(parts[0].format)
        return PackedLinear(operand, quantizes, self.options.block_scaled)

    def pack_grouped(self, weight: StoredTensor, num_groups: int) -> PackedGrouped:
        values = weight.dequantize()
        if weight.format is not WeightFormat.F32:
            values = values.to(self.activation_dtype)
        operand = plain_operand([values], self.runtime.device)
        blocks = operand.data.unflatten(0, (num_groups, -1))
        return PackedGrouped(operand._replace(data=blocks))

    def pack_experts(
        self,
        gate: Sequence[StoredTensor],
        up: Sequence[StoredTensor],
        down: Sequence[StoredTensor],
    ) -> PackedExperts:
        device = self.runtime.device
        pairs = [(g, u) for g, u in zip(gate, up, strict=True)]
        what = f"{len(pairs)} experts"
        return PackedExperts(
            self._with_room(what, lambda: stacked_operand(pairs, self.numerics, device)),
            self._with_room(
                what, lambda: stacked_operand([(d,) for d in down], self.numerics, device)
            ),
            self._quantizes_input(gate[0].format),
            self.options.block_scaled,
        )

    def pack_vector(self, value: StoredTensor) -> Tensor:
        return value.dequantize().to(self.runtime.device, copy=True)

    def pack_embedding(self, table: StoredTensor) -> PackedEmbedding:
        return PackedEmbedding(table.dequantize().to(self.runtime.device, self.activation_dtype))

    def pack_engram_table(self, table: StoredTensor) -> PackedEngram:
        data = table.data if table.scale is None else table.data.view(torch.uint8)
        return PackedEngram(
            self._place(data),
            None if table.scale is None else self._place(table.scale),
            self.activation_dtype,
        )

    def _place(self, rows: Tensor) -> Tensor:
        if self.options.engram_tables is EngramPlace.HOST and not self.runtime.interprets:
            return rows.contiguous().pin_memory()
        return self._with_room(
            f"an Engram table {tuple(rows.shape)}",
            lambda: rows.to(self.runtime.device).contiguous(),
        )

    def create_cache(self, kind: CacheKind, num_rows: int, width: int) -> RecordRows:
        fmt = cache_format(kind, self.numerics)
        return self._with_room(
            f"{num_rows} rows of a {kind.value} cache",
            lambda: RecordRows(fmt, num_rows, width, self.runtime.device),
        )

    def cache_row_bytes(self, kind: CacheKind, width: int) -> int:
        return row_bytes(cache_format(kind, self.numerics), width)

    def close(self) -> None:
        self.runtime.close()
