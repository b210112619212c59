"""Proofs of what a backend declares: batch invariance, determinism, graph capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from deepinfer.device.backend import Backend
from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpSpec
from deepinfer.device.ops import load_all
from deepinfer.device.ops.norm import rmsnorm
from deepinfer.device.runtime import run_on
from deepinfer.device.samples import Sample, build_arguments, samples_of
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.observe import Outputs, run_op
from deepinfer_conformance.outcome import Measure, Outcome, Status
from deepinfer_conformance.repeated_rows import NUM_ROWS, num_rows, row_axis, with_rows
from deepinfer_conformance.suite import Level, SuiteCase

BATCH_INVARIANT = "batch_invariant"
DETERMINISTIC = "deterministic"
GRAPH_CAPTURE = "graph_capture"
_SAME_BITS = "same bits: the feature promises them"


def suite_cases() -> Iterator[SuiteCase]:
    """Per op and numerics mode: rows alone and among many, the same call twice; one graph."""
    for spec in sorted(load_all().values(), key=lambda spec: (spec.family, spec.name)):
        yield from _cases_of_many_rows(spec)
        sample = next(iter(samples_of(spec)), None)
        if sample is None:
            continue
        for numerics in sample.numerics:
            place = f"{spec.family}/{spec.name}:{numerics.value},{sample.name}"
            axis = row_axis(spec)
            if axis is not None:
                run = partial(_run_invariance, f"features/{BATCH_INVARIANT}/{place}", spec, sample)
                yield SuiteCase(
                    f"features/{BATCH_INVARIANT}/{place}",
                    BATCH_INVARIANT,
                    Level.DEFAULT,
                    partial(run, numerics, axis),
                )
            case_id = f"features/{DETERMINISTIC}/{place}"
            yield SuiteCase(
                case_id,
                DETERMINISTIC,
                Level.DEFAULT,
                partial(_run_determinism, case_id, spec, sample, numerics),
            )
    for numerics in Numerics:
        case_id = f"features/{GRAPH_CAPTURE}/replay:{numerics.value}"
        yield SuiteCase(
            case_id, GRAPH_CAPTURE, Level.DEFAULT, partial(_run_graph, case_id, numerics)
        )


def _cases_of_many_rows(spec: OpSpec[..., Any]) -> Iterator[SuiteCase]:
    for sample in samples_of(spec):
        axis = row_axis(spec)
        if not sample.many_rows or axis is None:
            continue
        for numerics in sample.numerics:
            case_id = (
                f"features/{BATCH_INVARIANT}/{spec.family}/{spec.name}:"
                f"{numerics.value},{sample.name}"
            )
            run = partial(_run_many_rows, case_id, spec, sample, numerics, axis)
            yield SuiteCase(case_id, BATCH_INVARIANT, Level.DEFAULT, run)


def _differing_rows(alone: Outputs, together: Outputs, row: int, places: torch.Tensor) -> list[str]:
    """Outputs in which a repeated row differs from the row alone."""
    wrong = []
    for name, single in alone.items():
        many = together[name]
        if single.shape[:1] != (1,) or many.shape[:1] != (NUM_ROWS,):
            continue
        same = _bits(many[places]) == _bits(single)
        if not bool(same.all()):
            at = int(places[(~same.flatten(1).all(1)).nonzero()[0]])
            wrong.append(f"{name}: row {row} alone differs from its repetition at row {at}")
    return wrong


def _bits(x: torch.Tensor) -> torch.Tensor:
    """x as integers of equal width, so that NaN and signed zeros compare by their bits."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(width) if x.dtype is not torch.bool else x


def _call_with_rows(
    backend: Backend, spec: OpSpec[..., Any], sample: Sample, numerics: Numerics, axis: str
) -> Callable[[torch.Tensor], Outputs]:
    """A function that calls the op with some of the sample's rows."""

    def run(rows: torch.Tensor) -> Outputs:
        arguments = build_arguments(spec, sample, numerics)
        return run_op(backend, spec, with_rows(spec, arguments, axis, rows))

    return run


def _run_invariance(
    case_id: str,
    spec: OpSpec[..., Any],
    sample: Sample,
    numerics: Numerics,
    axis: str,
    bench: Bench,
) -> Outcome:
    backend = bench.under_test(numerics)
    count = num_rows(spec, build_arguments(spec, sample, numerics), axis)
    repeats = torch.arange(NUM_ROWS) * count // NUM_ROWS
    run = _call_with_rows(backend, spec, sample, numerics, axis)
    together = run(repeats)
    wrong = []
    for row in range(count):
        alone = run(torch.tensor([row]))
        wrong += _differing_rows(alone, together, row, (repeats == row).nonzero().flatten())
    return _outcome(case_id, BATCH_INVARIANT, "rows", wrong)


def _run_many_rows(
    case_id: str,
    spec: OpSpec[..., Any],
    sample: Sample,
    numerics: Numerics,
    axis: str,
    bench: Bench,
) -> Outcome:
    """All rows of the sample in one call, and in calls of few."""
    backend = bench.under_test(numerics)
    count = num_rows(spec, build_arguments(spec, sample, numerics), axis)
    run = _call_with_rows(backend, spec, sample, numerics, axis)
    together, wrong, num_compared = run(torch.arange(count)), [], 0
    for rows in torch.arange(count).split(NUM_ROWS):
        for name, few in run(rows).items():
            many = together[name]
            if few.shape[:1] != rows.shape or many.shape[:1] != (count,):
                continue
            num_compared += 1
            same = (_bits(many[rows]) == _bits(few)).flatten(1).all(1)
            if not bool(same.all()):
                row = int(rows[~same][0])
                wrong.append(f"{name}: row {row} differs between {count} rows and {len(rows)}")
    if not num_compared:
        wrong.append("no output has a row for each row of the call")
    return _outcome(case_id, BATCH_INVARIANT, "rows", wrong)


def _run_determinism(
    case_id: str, spec: OpSpec[..., Any], sample: Sample, numerics: Numerics, bench: Bench
) -> Outcome:
    backend = bench.under_test(numerics)
    axis = row_axis(spec)

    def run() -> Outputs:
        arguments = build_arguments(spec, sample, numerics)
        if axis is not None:
            count = num_rows(spec, arguments, axis)
            rows = torch.arange(NUM_ROWS) * count // NUM_ROWS
            arguments = with_rows(spec, arguments, axis, rows)
        return run_op(backend, spec, arguments)

    first = run()
    wrong = [
        f"{name}: run {turn + 2} gave other bits than run 1"
        for turn in range(3)
        for name, value in run().items()
        if not torch.equal(_bits(value), _bits(first[name]))
    ]
    return _outcome(case_id, DETERMINISTIC, "runs", wrong)


def _run_graph(case_id: str, numerics: Numerics, bench: Bench) -> Outcome:
    """A captured op replayed on changed inputs gives what a plain call gives."""
    backend = bench.under_test(numerics)
    runtime, norm = backend.runtime, backend.ops[rmsnorm]
    device, dtype = runtime.device, backend.activation_dtype
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(4, 64, generator=generator).to(dtype) for _ in range(3)]
    x, weight = inputs[0].to(device), torch.ones(64, device=device)
    results: list[torch.Tensor] = []
    graph = runtime.capture(lambda: results.append(norm(x, weight, 1e-6)))
    wrong = []
    for index, values in enumerate(inputs):

        def replay(values: torch.Tensor = values) -> tuple[torch.Tensor, torch.Tensor]:
            x.copy_(values)
            graph.replay()
            replayed = results[-1].clone()
            return replayed, norm(x, weight, 1e-6).clone()

        replayed, plain = run_on(runtime.compute_stream, replay)
        if not torch.equal(replayed.cpu(), plain.cpu()):
            wrong.append(f"replay {index + 1} differs from the plain call")
    return _outcome(case_id, GRAPH_CAPTURE, "replays", wrong)


def _outcome(case_id: str, feature: str, what: str, wrong: list[str]) -> Outcome:
    measure = Measure(
        what, float(len(wrong)), 0.0, wrong[0] if wrong else "", _SAME_BITS, not wrong
    )
    status = Status.FAILED if wrong else Status.PASSED
    return Outcome(case_id, feature, status, measures=(measure,), message=wrong[0] if wrong else "")
