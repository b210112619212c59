"""A backend run op by op on the inputs the reference had: which op differs first, on equal inputs.

Every op of the backend gets the reference's tensors, is compared by its contract, and hands the
reference's result on. So an error cannot add up, and an op that is right is not blamed for what
came before it. Weights and caches are the backend's own; a changed cache is compared row by row
and then set to what the reference holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.comparison import Comparison, Exact, Product, SelectionSet
from deepinfer.device.handles import RowCache
from deepinfer.device.op import OpSpec
from deepinfer.device.overlay import with_ops
from deepinfer_conformance.call_record import (
    Call,
    Place,
    PlaceKeeper,
    contents_of,
    quantised_kind,
    wrapped_table,
)
from deepinfer_conformance.compare import Context, compare
from deepinfer_conformance.observe import named_outputs, normal_form
from deepinfer_conformance.selections import Order
from deepinfer_conformance.verdict import Verdict

# Rows of expert slots stand in the backend's own order: moe_combine sees them through.
_OWN_LAYOUT_RESULTS = frozenset({"moe_experts"})
_ALL_ROWS = slice(None)
_OWN_LAYOUT_ARGUMENTS = frozenset({("moe_combine", "outputs")})
# Slots hold the backend's own expert outputs, so their sum carries the error of two products.
_CARRIES_EXPERTS: dict[str, Comparison] = {
    "moe_combine": Product(origin="slot order is the backend's own: experts are seen through it")
}


@dataclass(frozen=True, slots=True)
class OpDifference:
    """One output of one call that is beyond its bound on equal inputs.

    Attributes:
        spec: the op.
        place: step and layer.
        output: name of the output or changed argument.
        verdict: error, bound and place.
        position: token position of the first row beyond the bound; None where rows are no tokens.
    """

    spec: OpSpec[..., Any]
    place: Place
    output: str
    verdict: Verdict
    position: int | None


@dataclass(slots=True)
class _Level:
    """Calls expected at one depth; `follows` turns false when the backend goes another way."""

    calls: list[Call]
    next: int = 0
    follows: bool = True

    def take(self, spec: OpSpec[..., Any]) -> Call | None:
        if self.follows and self.next < len(self.calls):
            call = self.calls[self.next]
            if call.spec is spec:
                self.next += 1
                return call
        self.follows = False
        return None


@dataclass(slots=True)
class Findings:
    """What a lockstep run saw.

    Attributes:
        differences: in the order of execution, parts before the op they make up.
        num_calls: calls compared.
        left_path: an op the backend's model called where the reference called another; empty
            when both ran the same way.
    """

    differences: list[OpDifference] = field(default_factory=list)
    num_calls: int = 0
    left_path: str = ""


class Lockstep:
    """Makes the findings; `backend` goes under the model of the backend under test."""

    def __init__(self, backend: Backend, calls: list[Call]) -> None:
        """Judge `backend` by the reference's calls."""
        self.places, self.findings = PlaceKeeper(), Findings()
        self._levels = [_Level(calls)]
        self._positions: list[int] = []
        self._device = backend.runtime.device
        self._packed: set[int] = set()
        self._kept: list[Tensor] = []
        self.backend = with_ops(backend, wrapped_table(backend, self._wrap))
        pack = backend.pack_vector

        def pack_vector(value: Any) -> Tensor:  # noqa: ANN401
            packed = pack(value)
            self._packed.add(id(packed))
            self._kept.append(packed)  # an id is a name only while its object lives
            return packed

        self.backend.pack_vector = pack_vector  # type: ignore[method-assign]

    def _wrap(self, spec: OpSpec[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object, **kwargs: object) -> object:
            bound = dict(spec.signature.bind(*args, **kwargs).arguments)
            level = self._levels[-1]
            if len(self._levels) == 1:
                self.places.enters(spec)
            known = level.take(spec)
            if known is None:
                if len(self._levels) == 1 and not self.findings.left_path:
                    self.findings.left_path = f"{spec.family}/{spec.name}"
                return function(**bound)
            fed = {name: self._fed(known, name, value) for name, value in bound.items()}
            self._levels.append(_Level(known.children))
            try:
                result = function(**fed)
            except Exception as error:
                # Foreign code: an op that raises on the reference's inputs is what differs.
                words = f"raised {type(error).__name__}: {error}"
                verdict = Verdict(False, float("inf"), 0.0, words)
                self.findings.differences.append(
                    OpDifference(spec, known.place, "out", verdict, None)
                )
                raise
            finally:
                self._levels.pop()
            self._judge(known, fed, result)
            return self._handed_on(known, fed, result)

        call.__signature__ = spec.signature  # type: ignore[attr-defined]
        return call

    def _fed(self, call: Call, name: str, own: object) -> object:
        if (call.spec.name, name) in _OWN_LAYOUT_ARGUMENTS:
            return own
        theirs = call.arguments[name]
        if name in call.spec.mutates:
            if isinstance(own, Tensor) and isinstance(theirs, Tensor):
                own.copy_(theirs)
            return own
        return self._adopted(own, theirs)

    def _adopted(self, own: object, theirs: object) -> object:
        """The reference's tensors in place of the backend's; handles and weights stay its own."""
        if isinstance(own, Tensor) and isinstance(theirs, Tensor):
            return own if id(own) in self._packed else theirs.to(self._device)
        if isinstance(own, tuple) and isinstance(theirs, tuple):
            parts = [self._adopted(a, b) for a, b in zip(own, theirs, strict=True)]
            make: Any = type(own)
            return make(*parts) if hasattr(own, "_fields") else tuple(parts)
        return own

    def _handed_on(self, call: Call, fed: dict[str, object], result: object) -> object:
        for name in call.spec.mutates:
            argument, contents = fed[name], call.contents[name]
            if isinstance(argument, Tensor):
                argument.copy_(contents)
            else:
                cache: RowCache = argument  # type: ignore[assignment]
                rows = torch.arange(cache.num_rows, device=self._device)
                cache.pack(rows, contents.to(self._device))
        if call.spec.name in _OWN_LAYOUT_RESULTS:
            return result
        return self._adopted(result, call.result)

    def _judge(self, call: Call, fed: dict[str, object], result: object) -> None:
        self.findings.num_calls += 1
        if call.spec.name in _OWN_LAYOUT_RESULTS:
            return
        found = {name: value.cpu() for name, value in _tensors(result).items()}
        truth = {name: value.cpu() for name, value in _tensors(call.result).items()}
        for name in call.spec.mutates:
            found[name] = contents_of(fed[name]).cpu()
            truth[name] = call.contents[name].cpu()
        if sorted(found) == sorted(truth):
            found = normal_form(call.spec, found, call.arguments)
            truth = normal_form(call.spec, truth, call.arguments)
        if call.spec.name == "row_layout":
            self._positions = truth["positions"].tolist()
        for name, expected in truth.items():
            if name not in found:
                verdict = Verdict(False, float("inf"), 0.0, f"output {name} is missing")
            else:
                verdict = self._compared(call, name, found[name], expected)
            if not verdict.passed:
                position = self._first_position(call, name, found.get(name), expected)
                self.findings.differences.append(
                    OpDifference(call.spec, call.place, name, verdict, position)
                )

    def _compared(
        self,
        call: Call,
        name: str,
        found: Tensor,
        expected: Tensor,
        rows: slice = _ALL_ROWS,
    ) -> Verdict:
        kind = call.spec.compare.get(name, call.spec.compare.get("out"))
        if call.spec.name in _CARRIES_EXPERTS:
            kind = _CARRIES_EXPERTS[call.spec.name]
        scores = call.scores.get(name)
        if kind is None or (isinstance(kind, SelectionSet) and scores is None):
            kind = Exact()
        order = Order.BEST_FIRST if call.spec.name == "moe_gate" else Order.ASCENDING
        context = Context(
            scores=None if scores is None else scores.cpu()[rows],
            order=order,
            cache=quantised_kind(call, name),
        )
        return compare(kind, found[rows], expected[rows], context)

    def _first_position(
        self, call: Call, name: str, found: Tensor | None, expected: Tensor
    ) -> int | None:
        """Token position of the first row beyond the bound; None where rows are no tokens."""
        if name in call.spec.mutates or found is None or found.shape != expected.shape:
            return None
        if expected.dim() == 0 or expected.shape[0] != len(self._positions):
            return None
        for row, position in enumerate(self._positions):
            if not self._compared(call, name, found, expected, slice(row, row + 1)).passed:
                return position
        return None


def _tensors(result: object) -> dict[str, Tensor]:
    """Named tensors of a result; opaque handles have none."""
    return named_outputs(result) if isinstance(result, Tensor | tuple) else {}
