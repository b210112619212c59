"""The ascend950 backend object: packing, caches, op table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.device.backend import CacheKind
from deepinfer.device.errors import ConfigError
from deepinfer.device.hookspecs import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpTable
from deepinfer.device.weights import StoredTensor
from deepinfer_ascend950.caches import ByteRows
from deepinfer_ascend950.calls import DeviceCalls, NpuCalls
from deepinfer_ascend950.device_api import DeviceApi, TorchNpu
from deepinfer_ascend950.handles import (
    Embedding,
    EngramRows,
    FloatLinear,
    GroupedBlocks,
    MxLinear,
    PackedExperts,
)
from deepinfer_ascend950.op_table import build_op_table
from deepinfer_ascend950.operators import NpuOperators
from deepinfer_ascend950.options import parse_options
from deepinfer_ascend950.packing import pack_expert_matrices, pack_float_linear, pack_mx_linear
from deepinfer_ascend950.records import record_of
from deepinfer_ascend950.runtime import NpuRuntime
from deepinfer_ascend950.schema.signature import wheel_schemas


class Ascend950Backend:
    """One Ascend 950, or its emulation on the CPU."""

    name = "ascend950"
    # Nothing is declared that has not been seen on a device.
    features: frozenset[str] = frozenset()

    def __init__(self, config: BackendConfig, calls: NpuCalls | None = None) -> None:
        """Create the backend.

        Args:
            config: name, numerics and options.
            calls: how operators are called; None: as the options say.
        Raises:
            ConfigError: an option is unknown or has a wrong value.
            CapabilityError: the installed torch_npu is not the one the calls were written for.
        """
        options = parse_options(config.options)
        self.numerics = config.numerics
        self.labels: tuple[str, ...] = ("emulated",) if options.emulated else ()
        api: DeviceApi
        if options.emulated:
            from deepinfer_ascend950.emulation.calls import EmulatedCalls
            from deepinfer_ascend950.emulation.device import EmulatedDevice

            api = EmulatedDevice()
            self._npu = NpuOperators(calls or EmulatedCalls())
        else:
            api = TorchNpu(options.device_index)
            self._npu = NpuOperators(calls or DeviceCalls(wheel_schemas().operators))
        self.runtime = NpuRuntime(api)
        device = "cpu, emulating ascend950" if options.emulated else str(api.device)
        self.ops: OpTable = build_op_table(self._npu, self.numerics, device=device)

    @property
    def activation_dtype(self) -> torch.dtype:
        return torch.float32 if self.numerics is Numerics.EXACT else torch.bfloat16

    @property
    def _is_exact(self) -> bool:
        return self.numerics is Numerics.EXACT

    def pack_linear(self, parts: Sequence[StoredTensor]) -> MxLinear | FloatLinear:
        """Pack matrices that share their input.

        Raises:
            ConfigError: quantised and unquantised matrices would share it.
        """
        quantized = {part.format.is_quantized and not self._is_exact for part in parts}
        if len(quantized) != 1:
            raise ConfigError(
                "pack_linear was given quantised and unquantised matrices that share an input: "
                f"{[part.format.value for part in parts]}; store them alike"
            )
        if quantized.pop():
            return pack_mx_linear(parts, self.runtime.device)
        return pack_float_linear(parts, exact=self._is_exact, device=self.runtime.device)

    def pack_grouped(self, weight: StoredTensor, num_groups: int) -> GroupedBlocks:
        matrix = weight.dequantize().to(self.activation_dtype)
        blocks = matrix.view(num_groups, -1, matrix.shape[1]).transpose(1, 2)
        return GroupedBlocks(blocks.contiguous().to(self.runtime.device))

    def pack_experts(
        self,
        gate: Sequence[StoredTensor],
        up: Sequence[StoredTensor],
        down: Sequence[StoredTensor],
    ) -> PackedExperts:
        device = self.runtime.device
        gate_up = list(zip(gate, up, strict=True))
        return PackedExperts(
            pack_expert_matrices(gate_up, exact=self._is_exact, device=device),
            pack_expert_matrices([(one,) for one in down], exact=self._is_exact, device=device),
        )

    def pack_vector(self, value: StoredTensor) -> Tensor:
        return value.dequantize().clone().to(self.runtime.device)

    def pack_embedding(self, table: StoredTensor) -> Embedding:
        return Embedding(table.dequantize().to(self.activation_dtype).to(self.runtime.device))

    def pack_engram_table(self, table: StoredTensor) -> EngramRows:
        if table.scale is None:
            return EngramRows(table.data, None, self.activation_dtype)
        return EngramRows(table.data.view(torch.uint8), table.scale, self.activation_dtype)

    def create_cache(self, kind: CacheKind, num_rows: int, width: int) -> ByteRows:
        record = record_of(kind, self.numerics, self._npu)
        return ByteRows(record, num_rows, width, npu=self._npu, device=self.runtime.device)

    def cache_row_bytes(self, kind: CacheKind, width: int) -> int:
        return record_of(kind, self.numerics, self._npu).bytes_per_row(width)

    def close(self) -> None:
        self.runtime.close()
