"""Comparing two traces: the first tensor and position beyond a bound, in execution order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Within a layer: what enters it, what it decides, how it weighs.
_ORDER = ("streams", "selected_positions", "candidate_blocks", "expert_ids", "expert_weights")


@dataclass(frozen=True, slots=True)
class TraceDifference:
    """How one tensor differs.

    Attributes:
        name: trace name.
        error: largest absolute difference over the largest absolute value; for ids the share
            of rows whose sets differ; infinite when shape or presence differ.
        position: first row beyond the bound, or None.
        note: what was compared, or why not.
    """

    name: str
    error: float
    position: int | None
    note: str


def execution_order(name: str) -> tuple[int, int, int]:
    """Sort key: hashes, layers in order, final tensors, logits."""
    head, _, rest = name.partition(".")
    if head == "engram":
        return (0, int(rest.split(".")[0]), 0)
    if head == "layers":
        number, tensor = rest.split(".")
        return (1, int(number), _ORDER.index(tensor) if tensor in _ORDER else len(_ORDER))
    return (2, 0, ("final.streams", "final.hidden", "logits").index(name))


def compare_traces(
    left: Mapping[str, Tensor], right: Mapping[str, Tensor], *, bound: float
) -> list[TraceDifference]:
    """Compare tensor by tensor.

    Args:
        left: trace taken as right.
        right: trace in question.
        bound: largest error accepted, relative to the tensor's largest absolute value.

    Returns:
        One entry per name of either trace, in execution order; beyond the bound where
        `position` is set.
    """
    return [
        _compare(name, left.get(name), right.get(name), bound)
        for name in sorted(left.keys() | right.keys(), key=execution_order)
    ]


def _compare(name: str, left: Tensor | None, right: Tensor | None, bound: float) -> TraceDifference:
    if left is None or right is None:
        return TraceDifference(name, float("inf"), 0, "only in one of the traces")
    if left.shape != right.shape:
        shapes = f"shapes {tuple(left.shape)} and {tuple(right.shape)}"
        return TraceDifference(name, float("inf"), 0, shapes)
    if left.numel() == 0:
        return TraceDifference(name, 0.0, None, "empty")
    if not left.is_floating_point():
        rows = (left.sort(-1).values != right.sort(-1).values).flatten(1).any(1)
        return TraceDifference(name, float(rows.float().mean()), _first(rows), "ids as sets")
    scale = left.double().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    error = (left.double() - right.double()).abs().flatten(1).amax(1) / scale
    # NaN compares false with everything, so ask for "within" and negate.
    beyond = ~(error <= bound)
    return TraceDifference(name, float(error.max()), _first(beyond), "largest error")


def _first(rows: Tensor) -> int | None:
    found = rows.nonzero()
    return int(found[0]) if found.numel() else None
