"""The table of samples and error cases; family modules fill it when they are imported."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from deepinfer.device.comparison import Comparison
from deepinfer.device.errors import ContractError, DeepInferError
from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpSpec

Arguments = dict[str, object]
"""Arguments of one call by name, opaque handles in canonical form."""
Builder = Callable[[torch.Generator, Numerics], Arguments]

ALL_NUMERICS = (Numerics.EXACT, Numerics.NORMATIVE)


@dataclass(frozen=True, slots=True)
class Sample:
    """One named call of an op; its arguments are drawn on the CPU from a seed of the name.

    Attributes:
        name: stable, unique within the op; part of the case id.
        build: makes fresh arguments; the generator is the only source of randomness.
        compare: comparisons that replace the contract's, where the output is seen through
            further ops; None takes the contract's.
        loose_rows: per output name, rows whose values the contract leaves unspecified.
        numerics: modes in which the sample makes sense.
        level: 2 for shapes of published models, which the suite runs under --full only.
        many_rows: it has so many that a device may compute them in another way; the suite then
            compares them with calls of few rows, bit by bit.
    """

    name: str
    build: Builder
    compare: Mapping[str, Comparison] | None = None
    loose_rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    numerics: tuple[Numerics, ...] = ALL_NUMERICS
    level: int = 0
    many_rows: bool = False


@dataclass(frozen=True, slots=True)
class ErrorCase:
    """A call that must be refused.

    Attributes:
        name: stable, unique among the op's error cases.
        build: makes the wrong arguments.
        exception: class the call must raise.
        pattern: regular expression that the message must contain.
        numerics: modes in which the call is wrong.
    """

    name: str
    build: Builder
    exception: type[DeepInferError]
    pattern: str
    numerics: tuple[Numerics, ...] = ALL_NUMERICS


_SAMPLES: dict[str, dict[str, Sample]] = {}
_ERRORS: dict[str, dict[str, ErrorCase]] = {}


def declare(spec: OpSpec[..., Any], samples: Mapping[str, Builder]) -> None:
    """Register samples that need nothing but a builder, by name; see `declare_sample`."""
    for name, build in samples.items():
        declare_sample(spec, Sample(name, build))


def declare_sample(spec: OpSpec[..., Any], sample: Sample) -> None:
    """Register one sample of an op.

    Raises:
        ContractError: the op already has a sample of that name.
    """
    own = _SAMPLES.setdefault(spec.name, {})
    if sample.name in own:
        raise ContractError(f"op {spec.name} has two samples named {sample.name}; rename one")
    own[sample.name] = sample


def declare_error(spec: OpSpec[..., Any], error: ErrorCase) -> None:
    """Register one error case of an op.

    Raises:
        ContractError: the op already has an error case of that name.
    """
    own = _ERRORS.setdefault(spec.name, {})
    if error.name in own:
        raise ContractError(f"op {spec.name} has two error cases named {error.name}; rename one")
    own[error.name] = error


def registered_samples(op_name: str) -> tuple[Sample, ...]:
    """Samples registered so far for an op: by level, then in order of declaration.

    The module of real shapes declares for all families, before or after their own modules.
    """
    return tuple(sorted(_SAMPLES.get(op_name, {}).values(), key=lambda sample: sample.level))


def registered_errors(op_name: str) -> tuple[ErrorCase, ...]:
    """Error cases registered so far for an op, in order of declaration."""
    return tuple(_ERRORS.get(op_name, {}).values())


def seeded_generator(op_name: str, case_name: str) -> torch.Generator:
    """A CPU generator whose seed is made of the two names, equal on every machine."""
    digest = hashlib.sha256(f"{op_name}:{case_name}".encode()).digest()
    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return generator
