"""A call of an op with its rows repeated many times over, made from any sample.

The contract says which arguments have one entry per row; those entries are repeated, requests
keep their rows together, and everything else stays. Row j of the result must then have the bits
of the row it repeats, whatever stands around it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepinfer.device.op import OpSpec
from deepinfer.device.samples.registry import Arguments

# Enough rows for any tile in use, and no multiple of one.
NUM_ROWS = 131
_ROW_AXES = ("T", "N", "n")
_HOST_BOUNDS = ("max_query_len",)
# What no row map can be made of, and why; the scenarios see these ops.
_NO_ROW_MAPS = {
    "ngram_hash": "a row's hash depends on the rows before it",
    "moe_combine": "rows are tied to an opaque batch",
    "apply_controls": "penalties and bans address rows by index",
    "verify_drafts": "rows belong to requests, which the other arguments are about",
}


def row_axis(spec: OpSpec[..., Any]) -> str | None:
    """Name of the contract's row axis; None for ops that are no map of rows.

    Ops that change an argument or plan a step are left out too: their results are not one entry
    per row.
    """
    if spec.mutates or spec.family == "state" or spec.name in _NO_ROW_MAPS:
        return None
    first = [contract.axes[0] for contract in spec.tensors if contract.axes]
    return next((axis for axis in _ROW_AXES if axis in first), None)


def num_rows(spec: OpSpec[..., Any], arguments: Arguments, axis: str) -> int:
    """Rows of a call."""
    for contract in spec.tensors:
        value = _get(arguments, contract.name)
        if contract.axes and contract.axes[0] == axis and isinstance(value, Tensor):
            return value.shape[0]
    return 0


def with_rows(spec: OpSpec[..., Any], arguments: Arguments, axis: str, rows: Tensor) -> Arguments:
    """The call with `rows` (ascending indices, repeats allowed) in place of its own rows.

    Args:
        spec: the op.
        arguments: canonical arguments.
        axis: its row axis.
        rows: [n] int64.
    """
    changed = dict(arguments)
    for contract in spec.tensors:
        if not contract.axes or contract.axes[0] != axis:
            continue
        argument, _, attribute = contract.name.partition(".")
        value = _get(changed, contract.name)
        if isinstance(value, Tensor) and not (contract.may_be_empty and value.shape[0] == 0):
            taken = value.index_select(0, rows)
            if attribute:
                owner: Any = changed[argument]
                changed[argument] = owner._replace(**{attribute: taken})
            else:
                changed[argument] = taken
    for name, held in list(changed.items()):
        changed[name] = _bounded(name, held, len(rows))
    return changed


def _bounded(name: str, held: Any, count: int) -> object:  # noqa: ANN401
    """The argument with host bounds that hold for `count` rows."""
    if name in _HOST_BOUNDS:
        return count
    fields: tuple[str, ...] = getattr(held, "_fields", ())
    bounds = [bound for bound in _HOST_BOUNDS if bound in fields]
    return held._replace(**dict.fromkeys(bounds, count)) if bounds else held


def _get(arguments: Arguments, name: str) -> object:
    argument, _, attribute = name.partition(".")
    value = arguments.get(argument)
    return getattr(value, attribute, None) if attribute else value
