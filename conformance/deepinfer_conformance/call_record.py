"""Every op call of a run of the reference, with what a second run needs to be fed and judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from deepinfer.device.backend import Backend, CacheKind
from deepinfer.device.handles import RowCache
from deepinfer.device.op import OpSpec, OpTable
from deepinfer.device.ops import load_all
from deepinfer.device.ops.quant import linear_f32
from deepinfer_conformance.naive import selection_scores

FIRST_OP_OF_A_STEP = "row_layout"


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a run a call stands.

    Attributes:
        step: 0 for the first step.
        layer: layer being computed; -1 before the first, the number of layers after the last.
    """

    step: int
    layer: int


@dataclass(slots=True)
class Call:
    """One call of the reference.

    Attributes:
        spec: the op.
        place: step and layer.
        arguments: by name; tensors are copies, handles are the reference's own.
        result: what it returned, tensors copied.
        contents: contents of changed arguments afterwards, by name.
        scores: scores behind its selections, by output name.
        children: calls of the ops it is composed of.
    """

    spec: OpSpec[..., Any]
    place: Place
    arguments: dict[str, object]
    result: object = None
    contents: dict[str, Tensor] = field(default_factory=dict)
    scores: dict[str, Tensor] = field(default_factory=dict)
    children: list[Call] = field(default_factory=list)


class PlaceKeeper:
    """Follows a run through its trace names; shared by both runs."""

    def __init__(self) -> None:
        self.step, self.layer = -1, -1

    def record(self, name: str, value: Tensor) -> None:
        """A trace sink: `layers.N.streams` opens layer N, `final.streams` ends the last."""
        parts = name.split(".")
        if parts[0] == "layers" and parts[2] == "streams":
            self.layer = int(parts[1])
        elif name == "final.streams":
            self.layer += 1

    def enters(self, spec: OpSpec[..., Any]) -> Place:
        """Place of a call at the outermost level."""
        if spec.name == FIRST_OP_OF_A_STEP:
            self.step, self.layer = self.step + 1, -1
        return Place(self.step, self.layer)


def copied(value: object) -> object:
    """`value` with its tensors copied; handles stay."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple):
        parts = [copied(part) for part in value]
        make: Any = type(value)
        return make(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def contents_of(argument: object) -> Tensor:
    """What a changed argument holds: all rows of a cache in canonical form, or the tensor."""
    if isinstance(argument, Tensor):
        return argument.detach().clone()
    cache: RowCache = argument  # type: ignore[assignment]
    device = cache.byte_view(0, 1).device
    return cache.unpack(torch.arange(cache.num_rows, device=device)).cpu()


def wrapped_table(backend: Backend, wrap: Callable[..., Callable[..., Any]]) -> OpTable:
    """A table whose every op, composites included, runs inside `wrap(spec, function)`."""
    own = backend.ops
    table = OpTable(own.backend, device=own.device, dtype=own.dtype)
    composed = {choice.op for choice in own.explain() if choice.implementation == "composed"}
    specs = [spec for spec in load_all().values() if spec in own]
    for spec in specs:
        if f"{spec.family}/{spec.name}" not in composed:
            table.implements(spec)(wrap(spec, own[spec]))
    for spec in specs:
        if f"{spec.family}/{spec.name}" in composed:
            assert spec.compose is not None  # otherwise it would not be composed
            table.implements(spec)(wrap(spec, spec.compose(table)))
    return table


class Recorder:
    """Makes the record; `table` goes under the reference's model."""

    def __init__(self, backend: Backend) -> None:
        """Record calls of `backend`, which runs its streams inline."""
        self._backend = backend
        self.places = PlaceKeeper()
        self.calls: list[Call] = []
        self._open: list[Call] = []
        self.table = wrapped_table(backend, self._wrap)

    def _wrap(self, spec: OpSpec[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object, **kwargs: object) -> object:
            bound = dict(spec.signature.bind(*args, **kwargs).arguments)
            place = self._open[-1].place if self._open else self.places.enters(spec)
            made = Call(spec, place, {name: copied(value) for name, value in bound.items()})
            siblings = self._open[-1].children if self._open else self.calls
            siblings.append(made)
            self._open.append(made)
            try:
                result = function(**bound)
            finally:
                self._open.pop()
            made.result = copied(result)
            made.contents = {name: contents_of(bound[name]) for name in spec.mutates}
            made.scores = self._scores(made, bound)
            return result

        call.__signature__ = spec.signature  # type: ignore[attr-defined]
        return call

    def _scores(self, made: Call, bound: dict[str, Any]) -> dict[str, Tensor]:
        if made.spec.name == "moe_gate":
            logits = self._backend.ops[linear_f32](bound["x"].float(), bound["weight"])
            biased = softplus(logits.double()).sqrt() + bound["bias"].double()
            return {"ids": biased}
        if made.spec.name == "index_select":
            names = {"select_topk": "entries", "select_candidates": "candidates"}
            return {
                names[child.spec.name]: child.scores["out"]
                for child in made.children
                if child.spec.name in names
            }
        if made.spec.name in ("select_topk", "select_candidates"):
            return selection_scores(made.spec, bound)
        return {}


def quantised_kind(call: Call, name: str) -> CacheKind | None:
    """Kind of a changed cache that holds quantised rows; None for fp32 rows and tensors."""
    cache = call.arguments.get(name)
    if isinstance(cache, Tensor) or cache is None:
        return None
    record: str = getattr(cache, "record", "f32")
    return None if record == "f32" else getattr(cache, "kind", None)
