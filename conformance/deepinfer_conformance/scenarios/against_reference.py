"""The backend beside the reference: greedy tokens by the margin rule, logits of the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from deepinfer.api import RequestOutput, trace
from deepinfer.device.numerics import Numerics
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.locate import locate
from deepinfer_conformance.outcome import Measure, Outcome, Status
from deepinfer_conformance.scenarios.worlds import (
    BOUNDED_REPLAY,
    PROMPTS,
    World,
    generate,
    greedy,
    tokens,
    world_config,
)
from deepinfer_conformance.suite import CORE, Level, SuiteCase

# Greedy tokens must be equal wherever the reference's two best logits are this far apart.
MARGINS = {Numerics.EXACT: 1e-3, Numerics.NORMATIVE: 1.0}
_MARGIN_ORIGINS = {
    Numerics.EXACT: "logit error of another summation order in fp32",
    Numerics.NORMATIVE: "the reference itself left its tokens at gaps up to 0.73 when one bf16 "
    "rounding in 1e5 was flipped (3 of 8 runs); a flipped choice of experts or entries moves "
    "logits that much",
}
# Relative Frobenius error of the logits over a prompt, teacher forced.
_LOGIT_BOUNDS = {
    (World.TRAINED, Numerics.EXACT): (1e-4, "8 layers of fp32 in another order give 1e-5"),
    (World.RANDOM, Numerics.EXACT): (1e-4, "8 layers of fp32 in another order give 1e-5"),
    (World.TRAINED, Numerics.NORMATIVE): (0.1, "flipped bf16 roundings and selections: a few %"),
    (World.RANDOM, Numerics.NORMATIVE): (
        0.5,
        "near ties everywhere: one flipped bf16 rounding in 1e5 of the reference's own streams "
        "moved the logits by 0.05 to 0.24 (four seeds); a wrong op moves them by about 1",
    ),
}


def suite_cases() -> Iterator[SuiteCase]:
    """One case per world and numerics mode.

    Random weights have near ties everywhere, and in normative numerics a right backend that
    rounds in another way leaves the reference's tokens at any margin: only their logits are
    compared there. Bounded replay is an approximation of the model, but one definite function:
    both sides run it, and the same margins hold.
    """
    for world in World:
        for numerics in Numerics:
            is_chaotic = world is World.RANDOM and numerics is Numerics.NORMATIVE
            quick = world is World.TRAINED and numerics is Numerics.NORMATIVE
            for name, run in (("greedy", _greedy), ("logits", _logits)):
                if name == "greedy" and is_chaotic:
                    continue
                case_id = f"scenarios/{name}:{numerics.value},{world.value}"
                level = Level.QUICK if quick and name == "greedy" else Level.DEFAULT
                yield SuiteCase(case_id, CORE, level, partial(run, case_id, world, numerics))
    for numerics in Numerics:
        case_id = f"scenarios/greedy-bounded-replay:{numerics.value},trained"
        run = partial(_greedy, case_id, World.TRAINED, numerics, replay=BOUNDED_REPLAY)
        yield SuiteCase(case_id, CORE, Level.DEFAULT, run)


def _greedy(
    case_id: str, world: World, numerics: Numerics, bench: Bench, **changes: object
) -> Outcome:
    config, params = world_config(world, numerics, **changes), greedy(logprobs=2)
    theirs = generate(bench, config, params, on_reference=True)
    ours = generate(bench, config, params)
    measures, wrong = [], None
    for index, (right, found) in enumerate(zip(theirs, tokens(ours), strict=True)):
        at = _divergence(tokens([right])[0], found)
        if at is None:
            continue
        gap = _gap(right, at)
        passed = gap <= MARGINS[numerics]
        where = f"prompt {index}, token {at}: {found[at]}, expected {tokens([right])[0][at]}"
        measures.append(
            Measure("gap", gap, MARGINS[numerics], where, _MARGIN_ORIGINS[numerics], passed=passed)
        )
        if not passed and wrong is None:
            ids = right.prompt_token_ids + tokens([right])[0][: at + 1]
            wrong = (where, ids)
    if wrong is None:
        return Outcome(case_id, CORE, Status.PASSED, measures=tuple(measures))
    location = locate(bench, config, wrong[1], numerics)
    return Outcome(
        case_id,
        CORE,
        Status.FAILED,
        measures=tuple(measures),
        message=f"greedy tokens differ beyond the margin: {wrong[0]}",
        first_difference=location.line,
        notes=location.notes(),
    )


def _divergence(right: Sequence[int], found: Sequence[int]) -> int | None:
    """First place at which two token lists differ."""
    pairs = enumerate(zip(right, found, strict=True))
    return next((at for at, (a, b) in pairs if a != b), None)


def _gap(output: RequestOutput, at: int) -> float:
    """Distance of the two best logits of the reference at a generated token."""
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None  # they were asked for
    best, second = (value for _, value in logprobs[at].top[:2])
    return best - second


def _logits(case_id: str, world: World, numerics: Numerics, bench: Bench) -> Outcome:
    config = world_config(world, numerics)
    outputs = generate(bench, config, greedy(1), prompts=PROMPTS[-1:], on_reference=True)
    ids = outputs[0].prompt_token_ids
    theirs = trace(config, ids, backend=bench.reference(numerics))
    ours = trace(config, ids, backend=bench.under_test(numerics))
    error, where = _frobenius(ours["logits"], theirs["logits"])
    bound, origin = _LOGIT_BOUNDS[world, numerics]
    passed = error <= bound
    measure = Measure("logits", error, bound, where, origin, passed)
    if passed:
        return Outcome(case_id, CORE, Status.PASSED, measures=(measure,))
    location = locate(bench, config, ids, numerics)
    return Outcome(
        case_id,
        CORE,
        Status.FAILED,
        measures=(measure,),
        message=f"logits differ by {error:.3g} of their norm, bound {bound:g}, {where}",
        first_difference=location.line,
        notes=location.notes(),
    )


def _frobenius(value: Tensor, truth: Tensor) -> tuple[float, str]:
    if not bool(value.isfinite().all()):
        row = int((~value.isfinite()).any(1).nonzero()[0])
        return float("inf"), f"token {row}: not finite"
    difference = (value.double() - truth.double()).square().sum(1).sqrt()
    norm = truth.double().square().sum(1).sqrt()
    error = float(difference.square().sum().sqrt() / norm.square().sum().sqrt())
    return error, f"worst at token {int((difference / norm).argmax())}"
