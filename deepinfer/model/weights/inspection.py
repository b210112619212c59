"""The figures of `deepinfer inspect`: what a checkpoint is, from its headers alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction

from deepinfer.device.numerics import Numerics
from deepinfer.model.cache_bytes import cache_bytes
from deepinfer.model.cache_groups import cache_groups
from deepinfer.model.config import V41Config
from deepinfer.model.weights.inventory import Inventory
from deepinfer.model.weights.names import disk_tensors


@dataclass(slots=True)
class TensorTotals:
    """Sums over the tensors of one kind.

    Attributes:
        tensors: names on disk, scales counted.
        parameters: logical elements; packed FP4 counted twice, scales not.
        bytes: bytes on disk, scales counted.
        dtypes: names on disk by dtype.
    """

    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)


def tensor_totals(inventory: Inventory) -> dict[tuple[str, str], TensorTotals]:
    """Return totals by (group, kind) of the known tensors found, in model order.

    Args:
        inventory: an inventory, complete or not.
    """
    totals: dict[tuple[str, str], TensorTotals] = {}
    for name, tensor in disk_tensors(inventory.specs).items():
        entry = inventory.entries.get(name)
        if entry is None:
            continue
        spec = tensor.spec
        total = totals.setdefault((spec.group.value, spec.kind.value), TensorTotals())
        total.tensors += 1
        total.bytes += entry.num_bytes
        total.dtypes[entry.dtype] = total.dtypes.get(entry.dtype, 0) + 1
        if name == spec.name:
            total.parameters += math.prod(spec.shape)
    return totals


def inspection_figures(inventory: Inventory) -> dict[str, object]:
    """Return all figures as plain JSON values.

    Args:
        inventory: an inventory, complete or not.
    """
    totals = tensor_totals(inventory)
    return {
        "checkpoint": str(inventory.folder),
        "config": inventory.config.to_json(),
        "unused_keys": list(inventory.config.unused_keys),
        "layers": layer_rows(inventory.config),
        "num_files": inventory.num_files,
        "num_tensors": len(inventory.entries),
        "num_expected": len(disk_tensors(inventory.specs)),
        "num_parameters": sum(total.parameters for total in totals.values()),
        "num_bytes": sum(total.bytes for total in totals.values()),
        "tensors": [
            {"group": group, "kind": kind, **asdict(total)}
            for (group, kind), total in totals.items()
        ],
        "caches": {mode.value: cache_rows(inventory.config, mode) for mode in Numerics},
        "cache_groups": {mode.value: group_rows(inventory.config, mode) for mode in Numerics},
        "missing_files": dict(inventory.missing_files),
        "truncated_files": list(inventory.truncated_files),
        "misplaced": list(inventory.misplaced),
        "missing": list(inventory.missing),
        "unexpected": list(inventory.unexpected),
        "misshapen": dict(inventory.misshapen),
        "mistyped": dict(inventory.mistyped),
        "complete": not inventory.problems(),
    }


def layer_rows(config: V41Config) -> list[dict[str, object]]:
    """Return the layer mode table as plain values.

    Args:
        config: the model configuration.
    """
    return [{**asdict(role), "mode": role.mode.value} for role in config.layer_table]


def cache_rows(config: V41Config, numerics: Numerics) -> Mapping[str, int | float]:
    """Return the cache sizes of one request by name, in bytes.

    Args:
        config: the model configuration.
        numerics: which records the caches hold.
    """
    sizes = cache_bytes(config, numerics)
    values = {
        **asdict(sizes),
        "per_token": sizes.per_token,
        "per_request": sizes.per_request,
    }
    return {name: _plain(value) for name, value in values.items()}


def group_rows(config: V41Config, numerics: Numerics) -> list[dict[str, object]]:
    """Return the cache groups as plain values, bytes as numbers.

    Args:
        config: the model configuration.
        numerics: which records the caches hold.
    """
    return [
        {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(group).items()
        }
        | {"bytes_per_token": _plain(group.bytes_per_token)}
        for group in cache_groups(config, numerics)
    ]


def _plain(value: int | Fraction) -> int | float:
    return int(value) if value == int(value) else float(value)
