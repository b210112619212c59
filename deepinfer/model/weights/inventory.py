"""What a checkpoint folder holds against what its configuration demands, from headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from deepinfer.device.errors import CheckpointError
from deepinfer.model.config import V41Config
from deepinfer.model.weights.names import DiskTensor, disk_tensors, expected_tensors
from deepinfer.model.weights.safetensors_file import FileHeader, TensorEntry, read_header
from deepinfer.model.weights.shard_index import ShardIndex, read_shard_index
from deepinfer.model.weights.tensor_spec import TensorSpec

_MAX_NAMES = 10


@dataclass(frozen=True, slots=True)
class Inventory:
    """The state of a checkpoint; complete when `problems` is empty.

    Attributes:
        folder: the checkpoint.
        config: its configuration.
        specs: the catalogue of that configuration.
        entries: tensors found, by name.
        num_files: shards that are there.
        missing_files: absent shard -> number of tensors lost with it.
        truncated_files: shards shorter than their headers say.
        misplaced: tensors on which index and file headers disagree.
        missing: names the configuration demands and no shard holds.
        unexpected: names the configuration does not know.
        misshapen: name -> what differs in shape.
        mistyped: name -> what differs in dtype.
    """

    folder: Path
    config: V41Config
    specs: Mapping[str, TensorSpec]
    entries: Mapping[str, TensorEntry]
    num_files: int
    missing_files: Mapping[str, int]
    truncated_files: tuple[str, ...]
    misplaced: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: Mapping[str, str]
    mistyped: Mapping[str, str]

    def without_data(self) -> Inventory:
        """Return the same, for a folder that is known to hold headers only."""
        return replace(self, truncated_files=())

    def problems(self) -> list[str]:
        """Return one sentence for each kind of fault, with names; empty when there is none."""
        found: list[str] = []
        if self.missing_files:
            shown = (f"{file} ({count} tensors)" for file, count in self.missing_files.items())
            lost = sum(self.missing_files.values())
            found.append(f"missing shards, {lost} tensors lost: {_listed(shown)}")
        if self.truncated_files:
            found.append(f"truncated shards: {_listed(self.truncated_files)}")
        if self.misplaced:
            found.append(f"index and shards disagree: {_listed(self.misplaced)}")
        if self.missing:
            found.append(f"missing tensors: {_listed(self.missing)}")
        if self.unexpected:
            found.append(f"unexpected tensors: {_listed(self.unexpected)}")
        if self.misshapen:
            found.append(f"wrong shapes: {_listed(_pairs(self.misshapen))}")
        if self.mistyped:
            found.append(f"wrong dtypes: {_listed(_pairs(self.mistyped))}")
        return found

    def require_complete(self) -> None:
        """Return when there is no fault.

        Raises:
            CheckpointError: lists every kind of fault with the first names and the counts.
        """
        problems = self.problems()
        if problems:
            lines = "\n  ".join(problems)
            raise CheckpointError(
                f"checkpoint {self.folder} does not match its configuration:\n  {lines}\n"
                "restore the named files or tensors; nothing is filled in"
            )


def take_inventory(folder: Path, config: V41Config | None = None) -> Inventory:
    """Return what `folder` holds; reads headers only and raises for no single tensor.

    Args:
        folder: the checkpoint.
        config: its configuration if it is already parsed, else config.json is read.
    Raises:
        CheckpointError: the folder, its configuration, its index or a header cannot be read.
        ConfigError: the configuration is not usable.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"checkpoint folder {folder} does not exist; give the folder of a checkpoint "
            "(nothing is loaded in its place)"
        )
    config = config or V41Config.from_json(folder)
    specs = expected_tensors(config)
    known = disk_tensors(specs)
    index = read_shard_index(folder)
    headers = {
        file: read_header(folder / file) for file in index.files if (folder / file).is_file()
    }
    entries, misplaced = _gather(index, headers)
    lost = _lost_tensors(index, headers)
    bad = {name: _faults(entry, known[name]) for name, entry in entries.items() if name in known}
    return Inventory(
        folder=folder,
        config=config,
        specs=specs,
        entries=entries,
        num_files=len(headers),
        missing_files=Counter(lost.values()),
        truncated_files=tuple(file for file, header in headers.items() if header.is_truncated),
        misplaced=misplaced,
        missing=tuple(
            name
            for name, tensor in known.items()
            if name not in entries
            and name not in lost
            and (tensor.spec.required or _is_half(tensor, name, entries))
        ),
        unexpected=tuple(name for name in entries if name not in known),
        misshapen={name: shape for name, (shape, _) in bad.items() if shape},
        mistyped={name: dtype for name, (_, dtype) in bad.items() if dtype},
    )


def _gather(
    index: ShardIndex, headers: Mapping[str, FileHeader]
) -> tuple[dict[str, TensorEntry], tuple[str, ...]]:
    """Return the tensors that index and headers agree on, and a sentence for each other one."""
    entries: dict[str, TensorEntry] = {}
    disagreements: list[str] = []
    for file, header in headers.items():
        for name, entry in header.entries.items():
            place = file if index.weight_map is None else index.weight_map.get(name)
            if place == file:
                entries[name] = entry
            elif place is None:
                disagreements.append(f"{name} is in {file} but not in the index")
                entries.setdefault(name, entry)
            else:
                disagreements.append(f"{name} is in {file}, the index says {place}")
    for name, file in (index.weight_map or {}).items():
        if file in headers and name not in headers[file].entries:
            disagreements.append(f"{name} is not in {file}, where the index puts it")
    return entries, tuple(disagreements)


def _lost_tensors(index: ShardIndex, headers: Mapping[str, FileHeader]) -> dict[str, str]:
    """Return tensor -> file for the tensors whose shard is absent."""
    weight_map = index.weight_map or {}
    return {name: file for name, file in weight_map.items() if file not in headers}


def _is_half(tensor: DiskTensor, name: str, entries: Mapping[str, TensorEntry]) -> bool:
    """Whether an optional tensor is there, but without `name`, its scale or data."""
    spec = tensor.spec
    return any(part in entries for part in (spec.name, spec.scale_name) if part not in (None, name))


def _faults(entry: TensorEntry, tensor: DiskTensor) -> tuple[str, str]:
    shape = dtype = ""
    if entry.shape != tensor.shape:
        shape = f"{list(entry.shape)}, expected {list(tensor.shape)}"
    if entry.dtype not in {accepted.value for accepted in tensor.accepted}:
        names = " or ".join(accepted.value for accepted in tensor.accepted)
        dtype = f"{entry.dtype}, expected {names}"
    return shape, dtype


def _pairs(faults: Mapping[str, str]) -> Iterable[str]:
    return (f"{name} is {fault}" for name, fault in faults.items())


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(names[:_MAX_NAMES])
    more = len(names) - _MAX_NAMES
    return f"{len(names)}: {shown}" + (f", and {more} more" if more > 0 else "")
