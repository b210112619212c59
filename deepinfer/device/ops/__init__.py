"""Op contracts by family; `load_all` imports every family so that the catalogue is complete."""

from __future__ import annotations

import importlib
from typing import Any

from deepinfer.device.op import OpSpec, declared_ops

FAMILIES = (
    "attention",
    "compress",
    "engram",
    "indexer",
    "kv",
    "mhc",
    "moe",
    "norm",
    "quant",
    "sampling",
    "spec",
    "state",
)


def load_all() -> dict[str, OpSpec[..., Any]]:
    """Every op of the catalogue by name."""
    for family in FAMILIES:
        importlib.import_module(f"{__name__}.{family}")
    return declared_ops()
