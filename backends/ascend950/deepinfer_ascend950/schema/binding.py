"""Whether a call fits an operator's schema: positions, names, types and dtype codes.

What the schema cannot say (ranks, layouts, allowed values) comes from the operators'
documentation and is checked by the emulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from deepinfer.device.errors import ContractError
from deepinfer_ascend950.schema.signature import Argument, Signature, wheel_schemas

_PLAIN: dict[str, type | tuple[type, ...]] = {
    "Tensor": Tensor,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "str": str,
}


def bind(
    signature: Signature, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, Any]:
    """Arguments by name, as the operator would take them.

    Args:
        signature: the operator.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    Raises:
        ContractError: the call does not fit the schema.
    """
    positional = [argument for argument in signature.arguments if not argument.keyword_only]
    if len(args) > len(positional):
        raise _misfit(
            signature,
            f"{len(args)} positional arguments, the schema has {len(positional)}; give "
            f"{[argument.name for argument in signature.arguments if argument.keyword_only]} by "
            "keyword",
        )
    bound = {argument.name: value for argument, value in zip(positional, args, strict=False)}
    by_name = {argument.name: argument for argument in signature.arguments}
    for name, value in kwargs.items():
        if name not in by_name:
            raise _misfit(signature, f"unknown argument {name}; it has {sorted(by_name)}")
        if name in bound:
            raise _misfit(signature, f"argument {name} is given by position and by keyword")
        bound[name] = value
    for argument in signature.arguments:
        if argument.name not in bound:
            if argument.required:
                raise _misfit(signature, f"argument {argument.name} is missing")
            continue
        _check_type(signature, argument, bound[argument.name])
    return bound


def _check_type(signature: Signature, argument: Argument, value: object) -> None:
    kind = argument.type
    if kind.endswith("?"):
        if value is None:
            return
        kind = kind[:-1]
    if kind.endswith("[]"):
        fits = isinstance(value, list | tuple) and all(_is(kind[:-2], item) for item in value)
    else:
        fits = _is(kind, value)
    if not fits:
        raise _misfit(
            signature, f"argument {argument.name} is {_describe(value)}, expected {argument.type}"
        )
    if argument.name.endswith(("dtype", "dst_type")):
        codes = wheel_schemas().dtype_codes
        if value not in codes:
            raise _misfit(
                signature,
                f"argument {argument.name} is {value!r}, which is no dtype code of torch_npu; "
                f"codes are {sorted(codes)}",
            )


def _is(kind: str, value: object) -> bool:
    if isinstance(value, bool) and kind != "bool":
        return False  # to Python a bool is an int, to an operator it is not
    return isinstance(value, _PLAIN[kind])


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a Tensor {list(value.shape)} of {value.dtype}"
    return f"{value!r} ({type(value).__name__})"


def _misfit(signature: Signature, words: str) -> ContractError:
    return ContractError(f"{signature.name}: {words}. Schema: {signature.text}")
