"""Shapes and dtypes that an op's docstring states, and the check of a call against them.

A contract line such as `positions: [T] int64, rows of rope_table` is read as it stands, so that
the text an implementer reads and the check that refuses a call cannot drift apart. An axis named
twice has one length in a call; `2 C` or `(M + 1) * D` are computed from the names bound so far.
Checks run where somebody asks for them (`OpTable.checked`): they cost tens of microseconds a
call, and nothing where they are off.
"""

from __future__ import annotations

import ast
import inspect
import operator
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepinfer.device.errors import ContractError

_LINE = re.compile(r"^ {4}(\w+): \[([^\]]*)\](.*)$", re.MULTILINE)
_DTYPES = {
    "int64": torch.int64,
    "int32": torch.int32,
    "fp32": torch.float32,
    "bool": torch.bool,
    "uint8": torch.uint8,
}
_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@dataclass(frozen=True, slots=True)
class TensorContract:
    """What one line of a contract says about a tensor.

    Attributes:
        name: argument, or `argument.field` for a field of a named tuple.
        axes: axes as written; "..." stands for any number of leading axes.
        dtype: the dtype, "activation" or "float"; None where the line names none.
        may_be_empty: the line says that the tensor is empty in some calls.
        line: the text, for messages.
    """

    name: str
    axes: tuple[str, ...]
    dtype: torch.dtype | str | None
    may_be_empty: bool
    line: str


def _parse_lines(doc: str, prefix: str) -> Iterator[TensorContract]:
    for match in _LINE.finditer(inspect.cleandoc(doc)):
        name, axes, rest = match.groups()
        yield TensorContract(
            name=prefix + name,
            axes=tuple(axis.strip() for axis in axes.split(",") if axis.strip()),
            dtype=_dtype_of(rest),
            may_be_empty="empty" in rest,
            line=f"{name}: [{axes}]{rest}".rstrip(),
        )


def _dtype_of(words: str) -> torch.dtype | str | None:
    text = words.strip()
    if text.startswith("activation dtype"):
        return "activation"
    if re.match(r"(any )?float\b", text):
        return "float"
    first = re.match(r"\w+", text)
    return _DTYPES.get(first.group()) if first else None


def tensor_contracts(
    signature: inspect.Signature, doc: str, module: str
) -> tuple[TensorContract, ...]:
    """Every tensor line of a contract, fields of named-tuple arguments included.

    Args:
        signature: of the op's declaration.
        doc: its docstring.
        module: module it is declared in, where its annotations are looked up.
    """
    arguments = doc.partition("Returns:")[0]
    found = [line for line in _parse_lines(arguments, "") if line.name in signature.parameters]
    namespace = vars(sys.modules[module])
    for parameter in signature.parameters.values():
        for part in str(parameter.annotation).split(" | "):
            kind = namespace.get(part)
            if isinstance(kind, type) and issubclass(kind, tuple) and kind.__doc__:
                found.extend(_parse_lines(kind.__doc__, f"{parameter.name}."))
    return tuple(found)


@dataclass(slots=True)
class _Call:
    """Axis lengths bound so far in one call, and which tensor bound them."""

    op: str
    lengths: dict[str, int] = field(default_factory=dict)
    bound_by: dict[str, str] = field(default_factory=dict)

    def fail(self, contract: TensorContract, what: str) -> typing.NoReturn:
        raise ContractError(
            f"{self.op}: {contract.name} {what}; the contract says `{contract.line}`"
        )


def _length(expression: str, lengths: Mapping[str, int]) -> int | None:
    """Value of an axis expression, None while a name in it has no length yet."""
    text = re.sub(r"(\d+) (?=[A-Za-z(])", r"\1 * ", expression).replace("/", "//")
    try:
        return _evaluate(ast.parse(text, mode="eval").body, lengths)
    except (SyntaxError, KeyError):
        return None


def _evaluate(node: ast.expr, lengths: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return lengths[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        value: int = _ARITHMETIC[type(node.op)](
            _evaluate(node.left, lengths), _evaluate(node.right, lengths)
        )
        return value
    raise KeyError(ast.dump(node))


def _bind_names(call: _Call, contract: TensorContract, value: Tensor) -> None:
    """Take the length of every axis that is a bare name; a name has one length in a call."""
    axes = contract.axes
    shape = tuple(value.shape)
    if axes and axes[0] == "...":
        axes, shape = axes[1:], shape[len(shape) - len(axes) + 1 :]
        fits = value.dim() >= len(axes)
    else:
        fits = value.dim() == len(axes)
    if not fits:
        call.fail(contract, f"has shape {tuple(value.shape)}")
    for axis, length in zip(axes, shape, strict=True):
        if axis.isidentifier():
            known = call.lengths.setdefault(axis, length)
            source = call.bound_by.setdefault(axis, contract.name)
            if known != length:
                call.fail(
                    contract,
                    f"has shape {tuple(value.shape)}, and {axis} is {known} in {source}",
                )


def _check_computed(call: _Call, contract: TensorContract, value: Tensor) -> None:
    """Axes that are expressions, once every name is bound."""
    for axis, length in zip(reversed(contract.axes), reversed(value.shape), strict=False):
        if axis == "..." or axis.isidentifier():
            continue
        expected = _length(axis, call.lengths)
        if expected is None:  # a name without a length of its own: equal text, equal length
            expected = call.lengths.setdefault(axis, length)
        if expected != length:
            call.fail(contract, f"has shape {tuple(value.shape)}, and {axis} is {expected}")


def _check_dtype(
    call: _Call, contract: TensorContract, value: Tensor, activation: torch.dtype
) -> None:
    expected = contract.dtype
    if expected is None:
        return
    if expected == "float":
        if not value.dtype.is_floating_point:
            call.fail(contract, f"has dtype {value.dtype}, expected a float dtype")
        return
    wanted = activation if expected == "activation" else expected
    if value.dtype is not wanted:
        call.fail(contract, f"has dtype {value.dtype}, expected {wanted}")


def check_call(
    op: str,
    contracts: tuple[TensorContract, ...],
    arguments: Mapping[str, Any],
    activation: torch.dtype,
) -> None:
    """Compare the tensors of a call with the contract.

    Args:
        op: name of the op, for messages.
        contracts: from `tensor_contracts`.
        arguments: arguments of the call by name.
        activation: activation dtype of the backend's numerics.
    Raises:
        ContractError: a rank, axis length, dtype or device differs from what is said.
    """
    call = _Call(op)
    present = [(c, v) for c in contracts if isinstance(v := _argument(arguments, c.name), Tensor)]
    device: torch.device | None = None
    for contract, value in present:
        if device is not None and value.device != device:
            call.fail(contract, f"is on {value.device}, the tensors before it on {device}")
        device = value.device
        _check_dtype(call, contract, value, activation)
        if not (contract.may_be_empty and value.numel() == 0):
            _bind_names(call, contract, value)
    for contract, value in present:
        if not (contract.may_be_empty and value.numel() == 0):
            _check_computed(call, contract, value)


def _argument(arguments: Mapping[str, Any], name: str) -> object:
    argument, _, attribute = name.partition(".")
    value = arguments.get(argument)
    return getattr(value, attribute, None) if attribute else value
