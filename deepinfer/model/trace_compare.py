"""Comparing two traces: the first tensor and position beyond a bound, in execution order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.device.errors import ContractError

# Within a layer: what enters it, what it decides, how it weighs.
_ORDER = ("streams", "selected_positions", "candidate_blocks", "expert_ids", "expert_weights")
_LEAVES = "|".join(_ORDER)
_NUMBERED = re.compile(
    rf"(?P<part>engram|layers|draft)\.(?P<number>\d+)\.(?P<leaf>hash_ids|{_LEAVES})"
)
_PARTS = ("engram", "layers", "final", "context", "draft", "result")
_SINGLE = {
    "final.streams": ("final", 0),
    "final.hidden": ("final", 1),
    "logits": ("final", 2),
    "draft.context": ("context", 0),
    "draft.hidden": ("result", 0),
    "draft.logits": ("result", 1),
    "draft.tokens": ("result", 2),
    "draft.confidence_logits": ("result", 3),
}


@dataclass(frozen=True, slots=True)
class TraceDifference:
    """How one tensor differs.

    Attributes:
        name: trace name.
        max_abs: largest absolute difference; for ids the number of rows whose sets differ;
            infinite when shape, kind of dtype or presence differ.
        error: `max_abs` over the largest absolute value of the trusted trace; for ids the share
            of rows whose sets differ.
        position: first row beyond the bound, or None.
        note: what was compared, or why not.
    """

    name: str
    max_abs: float
    error: float
    position: int | None
    note: str


def execution_order(name: str) -> tuple[int, int, int]:
    """Sort key: hashes, layers in order, final tensors, logits, then the drafter's.

    Raises:
        ContractError: a trace holds no tensor of that name.
    """
    if name in _SINGLE:
        part, place = _SINGLE[name]
        return (_PARTS.index(part), 0, place)
    match = _NUMBERED.fullmatch(name)
    if match is None or (match["part"] == "engram") != (match["leaf"] == "hash_ids"):
        raise ContractError(
            f"tensor {name!r} is not of a trace; expected layers.N.streams and the like; compare "
            "files that `deepinfer trace --out` wrote"
        )
    place = _ORDER.index(match["leaf"]) if match["leaf"] in _ORDER else 0
    return (_PARTS.index(match["part"]), int(match["number"]), place)


def compare_traces(
    left: Mapping[str, Tensor], right: Mapping[str, Tensor], *, bound: float
) -> list[TraceDifference]:
    """Compare tensor by tensor.

    Args:
        left: trusted trace, named tensors with the position as dimension 0.
        right: trace in question.
        bound: largest error accepted, relative to the tensor's largest absolute value.

    Returns:
        One entry per name of either trace, in execution order; beyond the bound where
        `position` is set.
    Raises:
        ContractError: a name is not one of a trace.
    """
    return [
        _compare(name, left.get(name), right.get(name), bound)
        for name in sorted(left.keys() | right.keys(), key=execution_order)
    ]


def _compare(name: str, left: Tensor | None, right: Tensor | None, bound: float) -> TraceDifference:
    if left is None or right is None:
        return _unlike(name, f"only in the {'right' if left is None else 'left'} trace")
    if left.shape != right.shape:
        return _unlike(name, f"shapes {tuple(left.shape)} and {tuple(right.shape)}")
    if left.is_floating_point() != right.is_floating_point():
        return _unlike(name, f"dtypes {left.dtype} and {right.dtype}")
    if left.numel() == 0:
        return TraceDifference(name, 0.0, 0.0, None, "empty")
    if not left.is_floating_point():
        rows = (left.sort(-1).values != right.sort(-1).values).flatten(1).any(1)
        num_rows = float(rows.sum())
        return TraceDifference(name, num_rows, num_rows / len(rows), _first(rows), "ids as sets")
    scale = left.double().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    absolute = (left.double() - right.double()).abs().flatten(1).amax(1)
    error = absolute / scale
    # NaN compares false with everything, so ask for "within" and negate.
    beyond = ~(error <= bound)
    return TraceDifference(
        name, float(absolute.max()), float(error.max()), _first(beyond), "largest error"
    )


def _unlike(name: str, note: str) -> TraceDifference:
    return TraceDifference(name, float("inf"), float("inf"), 0, note)


def _first(rows: Tensor) -> int | None:
    found = rows.nonzero()
    return int(found[0]) if found.numel() else None
