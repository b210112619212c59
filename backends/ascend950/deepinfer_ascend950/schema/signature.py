"""Operator signatures read from `signatures.json`, which `tools/npu_schemas.py` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_name("signatures.json")


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an operator.

    Attributes:
        name: its name.
        type: in the schema language: Tensor, int[]?, ...
        keyword_only: it stands behind the `*`.
        required: it has no default.
    """

    name: str
    type: str
    keyword_only: bool
    required: bool


@dataclass(frozen=True, slots=True)
class Signature:
    """One operator.

    Attributes:
        name: without its namespace.
        text: the schema as the wheel has it.
        arguments: in their order.
        num_returns: tensors it returns.
    """

    name: str
    text: str
    arguments: tuple[Argument, ...]
    num_returns: int


@dataclass(frozen=True, slots=True)
class WheelSchemas:
    """Schemas of one torch_npu version.

    Attributes:
        version: of torch_npu.
        operators: by name.
        dtype_codes: name of the torch dtype that carries each dtype code.
    """

    version: str
    operators: Mapping[str, Signature]
    dtype_codes: Mapping[int, str]


@cache
def wheel_schemas() -> WheelSchemas:
    """The schemas that the backend was written for."""
    found = json.loads(_FILE.read_text(encoding="utf-8"))
    operators = {
        name: Signature(
            name=name,
            text=entry["schema"],
            arguments=tuple(Argument(**argument) for argument in entry["arguments"]),
            num_returns=entry["returns"],
        )
        for name, entry in found["operators"].items()
    }
    codes = {int(code): dtype for code, dtype in found["dtype_codes"].items()}
    return WheelSchemas(found["version"], operators, codes)
