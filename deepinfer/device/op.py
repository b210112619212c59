"""Op contracts and the table that binds them to one backend's implementations.

An op is declared once, as a decorated function without a body: its signature is its type, its
docstring its contract. A call whose tensors differ from it raises ContractError where checks are
on (`OpTable.checked`). The spec holds no arithmetic; the oracle is the backend named
`reference`. A composite op also carries `compose`, which builds it from smaller ops, so that a
backend overrides whichever level it does best.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch

from deepinfer.device.comparison import Comparison
from deepinfer.device.contract import TensorContract, check_call, tensor_contracts
from deepinfer.device.errors import CapabilityError, ContractError

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, eq=False)
class OpSpec(Generic[P, R]):
    """The contract of one op.

    Attributes:
        name: unique name, also the name of its implementations, naive truths and cases.
        family: folder it belongs to (attention, moe, ...).
        signature: parameter names and kinds every implementation must repeat.
        doc: the contract in words.
        compare: comparison per output name ("out" for a single output, or the mutated argument).
        mutates: names of arguments that the op changes in place.
        feature: capability a backend declares to have it; None means every backend must.
        compose: builds the op from smaller ones; None for a primitive op.
        tensors: shapes and dtypes of its arguments, as the docstring states them.
    """

    name: str
    family: str
    signature: inspect.Signature
    doc: str
    compare: Mapping[str, Comparison]
    mutates: tuple[str, ...]
    feature: str | None
    compose: Callable[[OpTable], Callable[P, R]] | None
    tensors: tuple[TensorContract, ...]

    def __repr__(self) -> str:
        return f"OpSpec({self.family}/{self.name})"


_REGISTRY: dict[str, OpSpec[..., Any]] = {}


def op(
    *,
    family: str,
    compare: Mapping[str, Comparison] | Comparison,
    mutates: tuple[str, ...] = (),
    feature: str | None = None,
    compose: Callable[[OpTable], Callable[..., Any]] | None = None,
) -> Callable[[Callable[P, R]], OpSpec[P, R]]:
    """Declare an op from a function whose body is only its docstring.

    Raises:
        ContractError: the name is taken or the declaration has no docstring.
    """

    def declare(function: Callable[P, R]) -> OpSpec[P, R]:
        name = function.__name__
        if name in _REGISTRY:
            raise ContractError(f"op {name} is declared twice; names are unique")
        if not function.__doc__:
            raise ContractError(f"op {name} has no docstring; the docstring is its contract")
        signature = inspect.signature(function)
        spec = OpSpec(
            name=name,
            family=family,
            signature=signature,
            doc=inspect.cleandoc(function.__doc__),
            compare=compare if isinstance(compare, Mapping) else {"out": compare},
            mutates=mutates,
            feature=feature,
            compose=cast("Callable[[OpTable], Callable[P, R]] | None", compose),
            tensors=tensor_contracts(signature, function.__doc__, function.__module__),
        )
        _REGISTRY[name] = spec
        return spec

    return declare


def declared_ops() -> dict[str, OpSpec[..., Any]]:
    """Every op declared by the modules imported so far, by name; see `ops.load_all`."""
    return dict(_REGISTRY)


@dataclass(frozen=True, slots=True)
class OpChoice:
    """What was chosen for an op and why; a row of `deepinfer backends --explain`.

    Attributes:
        op: family and name.
        implementation: the function, `composed`, or `-` where there is none.
        reason: why this one.
        layout: dtypes and layouts it works on; empty where the backend does not say.
    """

    op: str
    implementation: str
    reason: str
    layout: str = ""


def _checked(
    spec: OpSpec[..., Any], function: Callable[..., Any], activation: torch.dtype
) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        arguments = spec.signature.bind(*args, **kwargs).arguments
        check_call(spec.name, spec.tensors, arguments, activation)
        return function(*args, **kwargs)

    return call


@dataclass(frozen=True, slots=True)
class _Implementation:
    function: Callable[..., Any]
    label: str
    reason: str
    layout: str = ""


class OpTable:
    """Implementations of one backend; `table[spec]` gives the callable, bound once by a layer."""

    def __init__(self, backend: str, *, device: str, dtype: str) -> None:
        """An empty table.

        Args:
            backend: name of the backend, for messages.
            device: device it computes on, for messages.
            dtype: activation dtype of its numerics mode, for messages.
        """
        self.backend = backend
        self.device = device
        self.dtype = dtype
        self._implementations: dict[str, _Implementation] = {}
        self._composed: dict[str, Callable[..., Any]] = {}

    def implements(
        self, spec: OpSpec[P, R], *, reason: str = "implemented by the backend", layout: str = ""
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register the decorated function as this backend's implementation of `spec`.

        Args:
            spec: the contract.
            reason: why this implementation and no other, for `explain`.
            layout: dtypes and layouts it works on, for `explain`.

        Raises:
            ContractError: parameter names differ from the contract, or it is registered twice.
        """

        def register(function: Callable[P, R]) -> Callable[P, R]:
            expected = list(spec.signature.parameters)
            found = list(inspect.signature(function).parameters)
            if expected != found:
                raise ContractError(
                    f"{self.backend}: implementation of {spec.name} takes {found}, "
                    f"the contract says {expected}; repeat the contract's parameter names"
                )
            if spec.name in self._implementations:
                raise ContractError(f"{self.backend}: {spec.name} is implemented twice")
            label = f"{function.__module__}.{function.__qualname__}"
            self._implementations[spec.name] = _Implementation(function, label, reason, layout)
            return function

        return register

    def __getitem__(self, spec: OpSpec[P, R]) -> Callable[P, R]:
        """The implementation of `spec`, composed from smaller ops where none is registered.

        Raises:
            CapabilityError: neither an implementation nor all parts of a composition exist.
        """
        own = self._implementations.get(spec.name)
        if own is not None:
            return own.function
        if spec.compose is None:
            raise CapabilityError(
                f"backend {self.backend} has no implementation of op {spec.family}/{spec.name} "
                f"for {self.dtype} on device {self.device}; implement it or choose a backend "
                "that has it (deepinfer backends --explain lists them)"
            )
        if spec.name not in self._composed:
            try:
                self._composed[spec.name] = spec.compose(self)
            except CapabilityError as error:
                raise CapabilityError(
                    f"op {spec.family}/{spec.name} is composed of smaller ops, and one is "
                    f"missing: {error}"
                ) from error
        return cast("Callable[P, R]", self._composed[spec.name])

    def __contains__(self, spec: OpSpec[..., Any]) -> bool:
        try:
            self[spec]
        except CapabilityError:
            return False
        return True

    def checked(self) -> OpTable:
        """The same implementations, each refusing calls that differ from its contract.

        For conformance and for whoever writes a model: a ContractError names the argument, its
        shape or dtype, and the line of the contract.
        """
        table = OpTable(self.backend, device=self.device, dtype=self.dtype)
        activation: torch.dtype = getattr(torch, self.dtype)
        for name, own in self._implementations.items():
            guarded = _checked(_REGISTRY[name], own.function, activation)
            table._implementations[name] = replace(own, function=guarded)
        return table

    def explain(self) -> Iterator[OpChoice]:
        """One choice per declared op, in order of family and name."""
        for spec in sorted(_REGISTRY.values(), key=lambda s: (s.family, s.name)):
            name = f"{spec.family}/{spec.name}"
            own = self._implementations.get(spec.name)
            if own is not None:
                yield OpChoice(name, own.label, own.reason, own.layout)
            elif spec in self:
                yield OpChoice(name, "composed", "built from smaller ops of this backend")
            else:
                yield OpChoice(name, "-", "missing: models that need it are refused")
