"""Which shard holds which tensor: `model.safetensors.index.json`, or one file alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepinfer.device.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The files of a checkpoint.

    Attributes:
        files: file names that belong to it, in the order of the index.
        weight_map: tensor name -> file name; None for a checkpoint of one file without index.
    """

    files: tuple[str, ...]
    weight_map: Mapping[str, str] | None


def read_shard_index(folder: Path) -> ShardIndex:
    """Return the files of a checkpoint folder.

    Args:
        folder: the checkpoint.
    Raises:
        CheckpointError: the folder holds no weights, two forms of them, or a damaged index.
    """
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if not index.is_file():
        if not single.is_file():
            raise CheckpointError(
                f"{folder} holds no weights: neither {INDEX_FILE} nor {SINGLE_FILE}; "
                "give a complete checkpoint, or ask for random weights explicitly"
            )
        return ShardIndex((SINGLE_FILE,), None)
    try:
        loaded = json.loads(index.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{index} is not valid JSON: {error}") from error
    weight_map = loaded.get("weight_map") if isinstance(loaded, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; copy it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{index} places tensor {name} in {file!r}, expected the name of a file beside it"
            )
    return ShardIndex(tuple(dict.fromkeys(weight_map.values())), weight_map)
