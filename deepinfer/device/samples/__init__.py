"""Named samples and error cases of every op, one module per family.

Samples vary one thing at a time around a control. Opaque handles are given in canonical form
(`canonical.py`), so that any backend can pack them and a plain loop can read them.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpSpec
from deepinfer.device.samples.contract_errors import derived_errors
from deepinfer.device.samples.registry import (
    Arguments,
    ErrorCase,
    Sample,
    registered_errors,
    registered_samples,
    seeded_generator,
)

__all__ = [
    "Arguments",
    "ErrorCase",
    "Sample",
    "build_arguments",
    "errors_of",
    "samples_of",
]


def _load(family: str) -> None:
    name = f"{__name__}.{family}"
    # A family without a module has no samples; the catalogue test names its ops.
    if importlib.util.find_spec(name) is not None:
        importlib.import_module(name)


def samples_of(spec: OpSpec[..., Any], *, real_shapes: bool = False) -> tuple[Sample, ...]:
    """Samples of an op in order of declaration; empty for an op that has none.

    Args:
        spec: the op.
        real_shapes: with the widths of published models, too; they stand last.
    """
    _load(spec.family)
    if real_shapes:
        _load("flash")
    samples = registered_samples(spec.name)
    return samples if real_shapes else tuple(s for s in samples if not s.level)


def errors_of(spec: OpSpec[..., Any]) -> tuple[ErrorCase, ...]:
    """Error cases of an op: those declared, then those that follow from its contract."""
    samples = samples_of(spec)
    derived = derived_errors(spec, samples[0]) if samples else ()
    return registered_errors(spec.name) + derived


def build_arguments(
    spec: OpSpec[..., Any], case: Sample | ErrorCase, numerics: Numerics
) -> Arguments:
    """Fresh arguments of a case, the same bits at every call.

    Args:
        spec: the op.
        case: one of its samples or error cases.
        numerics: mode; decides the activation dtype and what caches can hold.

    Returns:
        Arguments by parameter name, on the CPU, handles in canonical form.
    """
    return case.build(seeded_generator(spec.name, case.name), numerics)
