"""Slow truths in float64: one function per op, plain loops over rows, heads and entries.

They share no code with the reference backend nor with `deepinfer.device.formats`; number formats
are rounded one scalar at a time by `numbers.py`. A truth takes the contract's parameters, handles
in canonical form, and returns what the op returns; a float64 result stands for fp32.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from torch import Tensor

from deepinfer.device.errors import ContractError
from deepinfer.device.op import OpSpec


def has_truth(spec: OpSpec[..., Any]) -> bool:
    """Whether a naive truth of the op exists."""
    name = f"{__name__}.{spec.family}"
    found = importlib.util.find_spec(name) is not None
    return found and hasattr(importlib.import_module(name), spec.name)


def truth_of(spec: OpSpec[..., Any]) -> Callable[..., Any]:
    """The naive truth of an op.

    Raises:
        ContractError: nobody has written one.
    """
    if not has_truth(spec):
        raise ContractError(
            f"op {spec.family}/{spec.name} has no naive truth; write {spec.name} in "
            f"{__name__}.{spec.family}"
        )
    truth: Callable[..., Any] = getattr(
        importlib.import_module(f"{__name__}.{spec.family}"), spec.name
    )
    return truth


def selection_scores(spec: OpSpec[..., Any], arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Scores by which an op's selections are made, per output name; empty for other ops.

    Returns:
        [T, n] fp32 or float64 per selection output; -inf is never chosen.
    """
    module = importlib.import_module(f"{__name__}.{spec.family}")
    scores: dict[str, Callable[..., dict[str, Tensor]]] = getattr(module, "SELECTION_SCORES", {})
    make = scores.get(spec.name)
    return {} if make is None else make(**arguments)
