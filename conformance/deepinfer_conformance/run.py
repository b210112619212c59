"""Run op cases of one backend against naive truths or against the reference backend."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from deepinfer.device.backend import Backend
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.comparison import Comparison
from deepinfer.device.errors import ContractError, DeepInferError
from deepinfer.device.numerics import Numerics
from deepinfer.device.overlay import checked
from deepinfer.device.registry import load_backend
from deepinfer.device.samples import build_arguments
from deepinfer.device.samples.canonical import CanonicalCache
from deepinfer.device.samples.registry import Arguments
from deepinfer_conformance.cases import OpCase, OpErrorCase, op_cases
from deepinfer_conformance.compare import Context, compare
from deepinfer_conformance.naive import selection_scores, truth_of
from deepinfer_conformance.observe import Outputs, run_op, run_truth
from deepinfer_conformance.selections import Order
from deepinfer_conformance.verdict import Verdict


class Truth(enum.Enum):
    """What a backend is compared with."""

    NAIVE = "naive"
    """Plain float64 loops; for the reference itself."""
    REFERENCE = "reference"
    """The backend named `reference`, on the CPU."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Verdicts of one case by output name; `error` when the op raised instead."""

    case_id: str
    verdicts: dict[str, Verdict]
    error: str

    @property
    def passed(self) -> bool:
        return not self.error and all(verdict.passed for verdict in self.verdicts.values())

    def explain(self) -> str:
        """One line for each output that is wrong."""
        if self.error:
            return f"{self.case_id}: {self.error}"
        return "\n".join(
            f"{self.case_id} {name}: error {verdict.error:.4g}, bound {verdict.bound:.4g}, "
            f"{verdict.where}"
            for name, verdict in self.verdicts.items()
            if not verdict.passed
        )


@dataclass(frozen=True, slots=True)
class Report:
    """Results of a run, in the order of the cases."""

    backend: str
    truth: Truth
    results: tuple[CaseResult, ...]

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        return tuple(result for result in self.results if not result.passed)


def comparison_of(case: OpCase, output: str) -> Comparison:
    """The comparison of one output: the sample's own, else the contract's.

    Raises:
        ContractError: neither names the output.
    """
    table = case.sample.compare or case.spec.compare
    kind = table.get(output, table.get("out"))
    if kind is None:
        raise ContractError(
            f"op {case.spec.name} gave output {output}, its contract compares {sorted(table)}; "
            "add the output to `compare`"
        )
    return kind


def _context(case: OpCase, output: str, arguments: Arguments) -> Context:
    cache = arguments.get(output)
    quantised = isinstance(cache, CanonicalCache) and case.numerics is Numerics.NORMATIVE
    return Context(
        loose_rows=case.sample.loose_rows.get(output, ()),
        scores=selection_scores(case.spec, arguments).get(output),
        order=Order.BEST_FIRST if case.spec.name == "moe_gate" else Order.ASCENDING,
        cache=cache.kind if quantised and isinstance(cache, CanonicalCache) else None,
    )


def judge(case: OpCase, outputs: Outputs, truths: Outputs) -> dict[str, Verdict]:
    """Verdict of every output of a case.

    Args:
        case: the case.
        outputs: what the backend gave, by name.
        truths: what it should have given.
    """
    if sorted(outputs) != sorted(truths):
        words = f"outputs {sorted(outputs)}, expected {sorted(truths)}"
        return {"out": Verdict(False, float("inf"), 0.0, words)}
    arguments = build_arguments(case.spec, case.sample, case.numerics)
    return {
        name: compare(
            comparison_of(case, name), outputs[name], truths[name], _context(case, name, arguments)
        )
        for name in truths
    }


def run_case(backend: Backend, case: OpCase, reference: Backend | None) -> CaseResult:
    """Run one case; a refusal by the op is a failed case, other exceptions pass through.

    Args:
        backend: the backend under test, in the case's numerics mode.
        case: the case.
        reference: backend whose outputs are the truth, in the same mode; None: naive truth.
    """

    def fresh() -> Arguments:
        return build_arguments(case.spec, case.sample, case.numerics)

    if reference is None:
        truths = run_truth(case.spec, truth_of(case.spec), fresh())
    else:
        truths = run_op(reference, case.spec, fresh())
    try:
        outputs = run_op(backend, case.spec, fresh())
    except DeepInferError as error:
        return CaseResult(case.case_id, {}, f"{type(error).__name__}: {error}")
    return CaseResult(case.case_id, judge(case, outputs, truths), "")


def refusal_fault(backend: Backend, case: OpErrorCase) -> str:
    """What is wrong with a backend's refusal of an error case; empty when it is right.

    The backend's ops run behind the checks of their contracts, which refuse shapes and dtypes;
    what only the backend can know, such as a foreign handle, it refuses itself.
    """
    expected = case.error
    arguments = build_arguments(case.spec, expected, case.numerics)
    try:
        run_op(checked(backend), case.spec, arguments)
    except expected.exception as error:
        if re.search(expected.pattern, str(error)):
            return ""
        return f"message {str(error)!r} does not match {expected.pattern!r}"
    return f"not refused; expected {expected.exception.__name__}"


def run_ops(backend: Backend, truth: Truth = Truth.NAIVE, query: str = "") -> Report:
    """Run every op case of the backend's numerics mode that the query selects.

    Args:
        backend: the backend under test.
        truth: what it is compared with.
        query: prefix or pattern of case ids; empty takes all.

    Returns:
        The report; failures are in it, not raised.
    """
    reference: Backend | None = None
    if truth is Truth.REFERENCE:
        config = BackendConfig("reference", backend.numerics, {"runtime": "inline"})
        reference = load_backend(config)
    results = []
    for case in op_cases(query):
        if case.numerics is backend.numerics:
            results.append(run_case(backend, case, reference))
    if reference is not None:
        reference.close()
    return Report(backend.name, truth, tuple(results))
