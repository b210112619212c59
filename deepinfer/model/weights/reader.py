"""Reading a checkpoint into StoredTensors: checked first, then only what is asked for."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Container
from pathlib import Path

import numpy as np
import torch

from deepinfer.device.errors import CheckpointError
from deepinfer.device.weights import StoredTensor, WeightFormat
from deepinfer.model.config import V41Config
from deepinfer.model.weights.inventory import Inventory, take_inventory
from deepinfer.model.weights.safetensors_file import TensorEntry
from deepinfer.model.weights.tensor_spec import (
    BACKBONE_GROUPS,
    TensorGroup,
    TensorKind,
    TensorSpec,
)

_log = logging.getLogger(__name__)

_TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    # Exponent bytes are reinterpreted, never converted as numbers.
    "F8_E8M0": torch.uint8,
    "I8": torch.int8,
}


class CheckpointReader:
    """An open checkpoint whose headers were found complete and consistent."""

    def __init__(self, path: Path | str, config: V41Config | None = None) -> None:
        """Check the folder's headers against its configuration.

        Args:
            path: checkpoint folder.
            config: its configuration if it is already parsed.
        Raises:
            CheckpointError: anything is missing, unexpected, misshapen or damaged, by name.
            ConfigError: the configuration is not usable.
        """
        self._inventory = take_inventory(Path(path), config)
        self._inventory.require_complete()

    @property
    def path(self) -> Path:
        """The checkpoint folder."""
        return self._inventory.folder

    @property
    def config(self) -> V41Config:
        """The configuration the tensors were checked against."""
        return self._inventory.config

    @property
    def inventory(self) -> Inventory:
        """What the headers say."""
        return self._inventory

    def names(self) -> tuple[str, ...]:
        """Return the logical tensors in the checkpoint, in model order."""
        entries = self._inventory.entries
        return tuple(name for name in self._inventory.specs if name in entries)

    def parameters(
        self,
        select: Callable[[str], bool] | None = None,
        *,
        groups: Collection[TensorGroup] = BACKBONE_GROUPS,
        owned_experts: Container[int] | None = None,
    ) -> dict[str, StoredTensor]:
        """Return the chosen tensors, in model order.

        Engram tables are mapped from the file and never read whole; all others are copied.

        Args:
            select: names to load; None loads all of `groups`.
            groups: parts of the model to load when no names are selected.
            owned_experts: ids of the backbone's routed experts to load; None loads all.
        Raises:
            CheckpointError: a file cannot be read in full any more.
        """
        loaded: dict[str, StoredTensor] = {}
        for name in self.names():
            spec = self._inventory.specs[name]
            if not (spec.group in groups if select is None else select(name)):
                continue
            if _is_foreign_expert(spec, owned_experts):
                continue
            loaded[name] = self.read(name)
        _log.debug("loaded %d tensors of %s", len(loaded), self.path)
        return loaded

    def read(self, name: str) -> StoredTensor:
        """Return one tensor by its checkpoint name.

        Args:
            name: name of the data (not of its scale).
        Raises:
            CheckpointError: no such tensor, or its file cannot be read in full any more.
        """
        spec = self._inventory.specs.get(name)
        if spec is None or name not in self._inventory.entries:
            raise CheckpointError(
                f"checkpoint {self.path} has no tensor {name!r}; `names()` lists those it has"
            )
        entry = self._inventory.entries[name]
        mapped = spec.kind is TensorKind.ENGRAM_TABLE
        data = _tensor(entry, mapped)
        fmt = WeightFormat.F32 if entry.dtype == "F32" else spec.format
        scale = None
        if spec.scale_name is not None:
            scale = _tensor(self._inventory.entries[spec.scale_name], mapped)
        return StoredTensor(fmt, data, scale, spec.shape)


def _is_foreign_expert(spec: TensorSpec, owned: Container[int] | None) -> bool:
    if owned is None or spec.expert is None or spec.group is not TensorGroup.BACKBONE:
        return False
    return spec.expert not in owned


def _tensor(entry: TensorEntry, mapped: bool) -> torch.Tensor:
    dtype = _TORCH_DTYPES[entry.dtype]
    if entry.num_bytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    size = entry.file.stat().st_size
    if size < entry.offset + entry.num_bytes:
        raise CheckpointError(
            f"{entry.file} has {size} bytes, a tensor of it ends at "
            f"{entry.offset + entry.num_bytes}; the file changed after it was opened"
        )
    if mapped:
        raw = _map(entry)
    else:
        raw = torch.from_numpy(
            np.fromfile(entry.file, dtype=np.uint8, count=entry.num_bytes, offset=entry.offset)
        )
    return raw.view(dtype).reshape(entry.shape)


def _map(entry: TensorEntry) -> torch.Tensor:
    """Bytes of a tensor as a read-only mapping of its file; pages come in when rows are read."""
    array = np.memmap(
        entry.file, dtype=np.uint8, mode="r", offset=entry.offset, shape=(entry.num_bytes,)
    )
    with warnings.catch_warnings():
        # torch has no read-only tensors and warns; a writable private mapping would count the
        # whole table as committed memory.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
