"""Every op case: op x sample x numerics mode, and the error cases, with stable ids."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any

from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpSpec
from deepinfer.device.ops import load_all
from deepinfer.device.samples import ErrorCase, Sample, errors_of, samples_of


@dataclass(frozen=True, slots=True)
class OpCase:
    """One sample in one numerics mode; `case_id` is stable and also a query."""

    spec: OpSpec[..., Any]
    sample: Sample
    numerics: Numerics

    @property
    def case_id(self) -> str:
        """For example `ops/moe/moe_gate:normative,n=1`."""
        return _case_id(self.spec, self.numerics, self.sample.name)


@dataclass(frozen=True, slots=True)
class OpErrorCase:
    """One call that must be refused, in one numerics mode."""

    spec: OpSpec[..., Any]
    error: ErrorCase
    numerics: Numerics

    @property
    def case_id(self) -> str:
        """For example `ops/kv/rope_store:exact,error=foreign-handle`."""
        return _case_id(self.spec, self.numerics, f"error={self.error.name}")


def _case_id(spec: OpSpec[..., Any], numerics: Numerics, name: str) -> str:
    return f"ops/{spec.family}/{spec.name}:{numerics.value},{name}"


def matches(case_id: str, query: str) -> bool:
    """Whether a query selects a case: a prefix of its id, or a pattern with * and ?."""
    return case_id.startswith(query) or fnmatch.fnmatchcase(case_id, query)


def _catalogue() -> list[OpSpec[..., Any]]:
    return sorted(load_all().values(), key=lambda spec: (spec.family, spec.name))


def op_cases(query: str = "", *, real_shapes: bool = False) -> tuple[OpCase, ...]:
    """Cases by family, op, sample and mode; an empty query takes all.

    Args:
        query: prefix or pattern of ids.
        real_shapes: samples with the widths of published models, too.
    """
    cases = (
        OpCase(spec, sample, numerics)
        for spec in _catalogue()
        for sample in samples_of(spec, real_shapes=real_shapes)
        for numerics in sample.numerics
    )
    return tuple(case for case in cases if matches(case.case_id, query))


def error_cases(query: str = "") -> tuple[OpErrorCase, ...]:
    """Error cases by family, op, name and mode; an empty query takes all."""
    cases = (
        OpErrorCase(spec, error, numerics)
        for spec in _catalogue()
        for error in errors_of(spec)
        for numerics in error.numerics
    )
    return tuple(case for case in cases if matches(case.case_id, query))
