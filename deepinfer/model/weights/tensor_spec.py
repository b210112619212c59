"""What the catalogue says about one tensor of a checkpoint."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from deepinfer.device.weights import WeightFormat

SCALE_BLOCK = 32


class DiskDtype(enum.Enum):
    """The safetensors dtypes that occur in a checkpoint; the value is the name in the header."""

    F32 = "F32"
    BF16 = "BF16"
    E4M3 = "F8_E4M3"
    E8M0 = "F8_E8M0"
    I8 = "I8"


class TensorGroup(enum.Enum):
    """The part of the model a tensor belongs to."""

    BACKBONE = "backbone"
    ENGRAM = "engram"
    DSPARK = "dspark"
    VISION = "vision"


BACKBONE_GROUPS: frozenset[TensorGroup] = frozenset({TensorGroup.BACKBONE, TensorGroup.ENGRAM})
"""What generates text on its own."""


class TensorKind(enum.Enum):
    """What a tensor is used for; `inspect` counts by it."""

    EMBEDDING = "embedding and head"
    NORM = "norms"
    ATTENTION = "attention"
    COMPRESSOR = "compressors"
    INDEXER = "indexers"
    ROUTER = "routers"
    ROUTED_EXPERT = "routed experts"
    SHARED_EXPERT = "shared experts"
    HYPER_CONNECTION = "hyper-connections"
    ENGRAM_TABLE = "engram tables"
    ENGRAM = "engram projections"
    DRAFT_HEAD = "draft heads"
    VISION = "vision"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One logical tensor; a quantised one is two tensors on disk, data and scale.

    Attributes:
        name: checkpoint name of the data.
        kind: what it is used for.
        group: the part of the model it belongs to.
        format: how it is stored according to the configuration.
        shape: logical shape, [out, in] for matrices.
        required: a checkpoint without it is incomplete.
        accepts_f32: plain fp32 is as good as the bf16 that `format` names.
        expert: id of the routed expert it belongs to, or None.
    """

    name: str
    kind: TensorKind
    group: TensorGroup
    format: WeightFormat
    shape: tuple[int, ...]
    required: bool = True
    accepts_f32: bool = False
    expert: int | None = None

    @property
    def disk_dtype(self) -> DiskDtype:
        """Safetensors dtype of the data."""
        return _DISK_DTYPES[self.format]

    @property
    def disk_shape(self) -> tuple[int, ...]:
        """Shape of the data on disk; packed FP4 has half the columns."""
        if self.format is WeightFormat.MXFP4:
            return (self.shape[0], self.shape[1] // 2)
        return self.shape

    @property
    def scale_name(self) -> str | None:
        """Checkpoint name of the scale bytes, or None for a plain tensor."""
        if self.scale_shape is None:
            return None
        return self.name.removesuffix(".weight") + ".scale"

    @property
    def scale_shape(self) -> tuple[int, ...] | None:
        """Shape of the scale bytes, or None for a plain tensor."""
        if not self.format.is_quantized:
            return None
        rows, columns = self.shape
        blocks = -(-columns // SCALE_BLOCK)
        if self.format is WeightFormat.FP8_TILE32:
            return (-(-rows // SCALE_BLOCK), blocks)
        return (rows, blocks)


_DISK_DTYPES = {
    WeightFormat.F32: DiskDtype.F32,
    WeightFormat.BF16: DiskDtype.BF16,
    WeightFormat.FP8_TILE32: DiskDtype.E4M3,
    WeightFormat.FP8_ROW32: DiskDtype.E4M3,
    WeightFormat.MXFP4: DiskDtype.I8,
}
