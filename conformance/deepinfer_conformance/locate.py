"""The first step, layer, op and token at which a backend leaves the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from deepinfer.api import EngineConfig, trace
from deepinfer.device.numerics import Numerics
from deepinfer.device.overlay import with_ops
from deepinfer.device.runtime import StepKind
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.call_record import Call, Recorder
from deepinfer_conformance.cases import op_cases
from deepinfer_conformance.lockstep import Lockstep, OpDifference
from deepinfer_conformance.run import run_case

# Rows in expert slots and rows being fetched are seen through the op that brings them back; the
# cases of these ops tell which of them is wrong.
_SEEN_THROUGH = {
    "moe_combine": ("moe_dispatch", "moe_experts", "moe_combine"),
    "engram_fetch_wait": ("engram_fetch_start", "engram_fetch_wait"),
}
_DECODED_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Location:
    """Where a backend leaves the reference.

    Attributes:
        line: first step, layer, op and token, or that no op is wrong on equal inputs.
        op: `family/name` of the op to look at; empty when none is wrong on equal inputs.
        growth: largest error of the streams entering each layer when both run freely, relative
            to the largest value, by trace name.
        failure: what the backend raised when it ran freely; empty when it did not.
    """

    line: str
    op: str
    growth: dict[str, float]
    failure: str = ""

    def notes(self) -> tuple[str, ...]:
        """The growth of the error, or why there is none, as lines."""
        if self.failure:
            return (f"free running, the backend raised {self.failure}",)
        if not self.growth:
            return ()
        steps = "  ".join(f"{_short(name)} {error:.1e}" for name, error in self.growth.items())
        return (f"free running, error of the streams over their largest value: {steps}",)


@dataclass(frozen=True, slots=True)
class _ReferenceRun:
    """A recorded run of the reference: every call, and every traced tensor."""

    calls: list[Call]
    tensors: dict[str, Tensor]


def locate(
    bench: Bench, config: EngineConfig, token_ids: Sequence[int], numerics: Numerics
) -> Location:
    """Run a sequence on both backends and name the first difference.

    The whole sequence is prefilled in one step, then its first tokens are decoded one by one.

    Args:
        bench: both backends.
        config: names the checkpoint.
        token_ids: prompt and what followed.
        numerics: mode.
    """
    backend, ids = bench.under_test(numerics), tuple(token_ids)
    ways = ((StepKind.PREFILL, ids), (StepKind.DECODE, ids[:_DECODED_TOKENS]))
    for kind, part in ways:
        run = _reference_run(bench, config, part, kind, numerics=numerics)
        lockstep = Lockstep(backend, run.calls)
        findings = lockstep.findings
        try:
            trace(config, part, backend=lockstep.backend, kind=kind, observer=lockstep.places)
        except Exception:
            if not findings.differences:
                raise  # not an op of the backend
        if findings.left_path:
            line = f"{kind.value}: the model called {findings.left_path} out of turn"
            return Location(line, findings.left_path, {})
        if findings.differences:
            first = findings.differences[0]
            op = _blamed(bench, first, numerics)
            line = _line(first, op, kind)
            try:
                found = trace(config, part, backend=backend, kind=kind)
            except Exception as error:
                # A wrong op may make a later one raise; the first difference is known already.
                return Location(line, op, {}, f"{type(error).__name__}: {error}")
            return Location(line, op, _growth(run, found))
    run = _reference_run(bench, config, ids, StepKind.PREFILL, numerics=numerics)
    growth = _growth(run, trace(config, ids, backend=backend))
    if numerics is Numerics.NORMATIVE and any(growth.values()):
        # What bf16 hides, the tight bounds of fp32 may show.
        exact = locate(bench, config, token_ids, Numerics.EXACT)
        if exact.op:
            return Location(f"in exact numerics: {exact.line}", exact.op, growth)
    line = "no op is beyond its bound on equal inputs; the difference is accumulated error"
    return Location(line, "", growth)


def _reference_run(
    bench: Bench, config: EngineConfig, ids: tuple[int, ...], kind: StepKind, *, numerics: Numerics
) -> _ReferenceRun:
    key = (config.model_dump_json(), ids, kind, numerics)
    known = bench.recordings.get(key)
    if isinstance(known, _ReferenceRun):
        return known
    reference = bench.reference(numerics)
    recorder = Recorder(reference)
    recorded = with_ops(reference, recorder.table)
    tensors = trace(config, ids, backend=recorded, kind=kind, observer=recorder.places)
    run = _ReferenceRun(recorder.calls, tensors)
    bench.recordings[key] = run
    return run


def _growth(run: _ReferenceRun, found: dict[str, Tensor]) -> dict[str, float]:
    """Error of the streams of a free run."""
    return {
        name: _relative(found[name], value)
        for name, value in run.tensors.items()
        if name.endswith(".streams") or name == "logits"
    }


def _relative(value: Tensor, truth: Tensor) -> float:
    scale = truth.double().abs().max().clamp_min(1e-30)
    return float((value.double() - truth.double()).abs().max() / scale)


def _short(name: str) -> str:
    return name.removeprefix("layers.").removesuffix(".streams")


def _blamed(bench: Bench, found: OpDifference, numerics: Numerics) -> str:
    """The op to look at: for results seen through others, the first whose own cases fail."""
    family = found.spec.family
    for suspect in _SEEN_THROUGH.get(found.spec.name, ()):
        for case in op_cases(f"ops/{family}/{suspect}:{numerics.value}"):
            result = run_case(bench.under_test(numerics), case, bench.reference(numerics))
            if not result.passed:
                return f"{family}/{suspect}"
    return f"{family}/{found.spec.name}"


def _line(found: OpDifference, op: str, kind: StepKind) -> str:
    layer = "before the layers" if found.place.layer < 0 else f"layer {found.place.layer}"
    token = "" if found.position is None else f", token {found.position}"
    verdict = found.verdict
    return (
        f"{kind.value} step {found.place.step}, {layer}, op {op}, output {found.output}{token}: "
        f"error {verdict.error:.4g}, bound {verdict.bound:.4g}, {verdict.where}, on equal inputs"
    )
