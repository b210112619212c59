"""The one place through which ops call torch_npu's operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from deepinfer.device.errors import CapabilityError
from deepinfer_ascend950.schema.signature import Signature, wheel_schemas


class NpuCalls(Protocol):
    """Calls an operator of the `npu` namespace by name."""

    def __call__(self, operator: str, *args: object, **kwargs: object) -> object:
        """What the operator returns.

        Args:
            operator: for example `npu_rms_norm`.
            args: positional arguments.
            kwargs: keyword arguments; dtypes as integer codes.
        """
        ...


class DeviceCalls:
    """Operators of the installed torch_npu, on an NPU."""

    def __init__(self, operators: Iterable[str]) -> None:
        """Look the operators up.

        Raises:
            CapabilityError: the installed torch_npu lacks one, or has another signature.
        """
        installed: dict[str, Callable[..., Any] | None] = {
            name: getattr(torch.ops.npu, name, None) for name in operators
        }
        texts = {name: _installed_schema(found) for name, found in installed.items()}
        differences = schema_differences(texts)
        if differences:
            raise CapabilityError(
                "the installed torch_npu does not offer the operators that ascend950 calls "
                f"(written for torch_npu {wheel_schemas().version}):\n"
                + "\n".join(f"  - {line}" for line in differences)
                + "\nInstall that version, or regenerate the schemas with tools/npu_schemas.py and "
                "adapt the calls that no longer bind"
            )
        self._operators = {name: found for name, found in installed.items() if found is not None}

    def __call__(self, operator: str, *args: object, **kwargs: object) -> object:
        return self._operators[operator](*args, **kwargs)


def _installed_schema(operator: Callable[..., Any] | None) -> str | None:
    if operator is None:
        return None
    default = getattr(operator, "default", None)
    return None if default is None else str(default._schema)


def schema_differences(installed: dict[str, str | None]) -> list[str]:
    """What differs from the committed schemas, one line for each operator.

    Args:
        installed: schema text of each operator; None where it is missing.
    """
    lines = []
    for name, text in installed.items():
        expected: Signature = wheel_schemas().operators[name]
        if text is None:
            lines.append(f"{name} is missing")
        elif _arguments(text) != _arguments(f"npu::{expected.text}"):
            lines.append(f"{name} is {text}, expected {expected.text}")
    return lines


def _arguments(text: str) -> list[tuple[str, str, bool]]:
    schema = torch._C.parse_schema(text)
    return [
        (argument.name, str(argument.type), argument.kwarg_only) for argument in schema.arguments
    ]
