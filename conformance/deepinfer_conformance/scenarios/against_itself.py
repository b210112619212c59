"""What must not change a backend's answers: chunks, company, preemption, depth, cuts, seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from deepinfer.api import LLM, RequestOutput, SamplingParams, trace
from deepinfer.device.numerics import Numerics
from deepinfer.device.runtime import StepKind
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.feature_cases import BATCH_INVARIANT
from deepinfer_conformance.outcome import Measure, Outcome, Status
from deepinfer_conformance.scenarios.worlds import (
    BOUNDED_REPLAY,
    NUM_TOKENS,
    PROMPTS,
    World,
    generate,
    greedy,
    tokens,
    world_config,
)
from deepinfer_conformance.suite import CORE, Level, SuiteCase

_SAME_TOKENS = "same tokens: nothing of this may change an answer"
_SAME_BITS = "same bits: batch invariance covers chunks and decoding"
_Check = Callable[[Bench, Numerics], list[str]]


def suite_cases() -> Iterator[SuiteCase]:
    """Scenarios per numerics mode, on the trained checkpoint."""
    invariant: dict[str, _Check] = {
        "chunked-prefill": _chunked,
        "company": _company,
        "preemption": _preempted,
        "prefix-hits": _known,
        "drafts": _drafted,
        "trace-chunks": _trace_chunks,
        "bounded-replay": _bounded,
    }
    core: dict[str, _Check] = {"stop": _stopped, "seeds": _seeds, "async-depth": _depths}
    for numerics in Numerics:
        for checks, profile in ((invariant, BATCH_INVARIANT), (core, CORE)):
            for name, check in checks.items():
                case_id = f"scenarios/{name}:{numerics.value}"
                run = partial(_run, case_id, profile, check, numerics)
                quick = numerics is Numerics.NORMATIVE and name == "chunked-prefill"
                yield SuiteCase(case_id, profile, Level.QUICK if quick else Level.DEFAULT, run)


def _run(case_id: str, profile: str, check: _Check, numerics: Numerics, bench: Bench) -> Outcome:
    wrong = check(bench, numerics)
    origin = _SAME_BITS if check is _trace_chunks else _SAME_TOKENS
    first = wrong[0] if wrong else ""
    measure = Measure("differences", float(len(wrong)), 0.0, first, origin, not wrong)
    status = Status.FAILED if wrong else Status.PASSED
    return Outcome(case_id, profile, status, measures=(measure,), message=first)


def _unlike(name: str, left: list[RequestOutput], right: list[RequestOutput]) -> list[str]:
    return [
        f"{name}: prompt {index} gave {b}, expected {a}"
        for index, (a, b) in enumerate(zip(tokens(left), tokens(right), strict=True))
        if a != b
    ]


def _chunked(bench: Bench, numerics: Numerics) -> list[str]:
    whole = generate(bench, world_config(World.TRAINED, numerics), greedy())
    wrong = []
    for chunk in (16, 7):
        config = world_config(
            World.TRAINED, numerics, scheduler={"prefill_chunk_tokens": chunk, "max_num_tokens": 64}
        )
        wrong += _unlike(f"chunks of {chunk}", whole, generate(bench, config, greedy()))
    return wrong


def _bounded(bench: Bench, numerics: Numerics) -> list[str]:
    """Where the decoder starts depends on the prompt alone: not on chunks, company, preemption."""

    def run(**changes: object) -> list[RequestOutput]:
        config = world_config(World.TRAINED, numerics, replay=BOUNDED_REPLAY, **changes)
        return generate(bench, config, greedy(40))

    usual = run()
    ways = {
        "chunks of 7": run(scheduler={"prefill_chunk_tokens": 7, "max_num_tokens": 64}),
        "one at a time": run(scheduler={"max_num_seqs": 1}),
        "12 blocks of 16": run(cache={"block_size": 16, "num_blocks": 12}),
    }
    return [line for name, found in ways.items() for line in _unlike(name, usual, found)]


def _company(bench: Bench, numerics: Numerics) -> list[str]:
    config = world_config(World.TRAINED, numerics)
    together = generate(bench, config, greedy())
    alone = [
        generate(bench, config, greedy(), prompts=PROMPTS[index : index + 1])[0]
        for index in (0, len(PROMPTS) - 1)
    ]
    return _unlike("company", alone, [together[0], together[-1]])


def _preempted(bench: Bench, numerics: Numerics) -> list[str]:
    ample = generate(bench, world_config(World.TRAINED, numerics), greedy(40))
    # Four prompts and their answers do not fit into these blocks at once.
    tight = world_config(World.TRAINED, numerics, cache={"block_size": 16, "num_blocks": 12})
    return _unlike("12 blocks of 16", ample, generate(bench, tight, greedy(40)))


def _known(bench: Bench, numerics: Numerics) -> list[str]:
    """Prompts that were asked before: their blocks and windows come back from host memory."""
    # Longer than a window; the blocks do not hold both, so each is evicted before it comes again.
    prompts = [PROMPTS[-1], PROMPTS[-1].replace("Whenever", "If ever")]
    expected = generate(bench, world_config(World.TRAINED, numerics), greedy(8), prompts=prompts)
    cache = {"block_size": 4, "num_blocks": 28, "prefix": True, "host_memory": "64MiB"}
    config = world_config(World.TRAINED, numerics, cache=cache)
    wrong: list[str] = []
    with LLM(config, backend=bench.new_under_test(numerics)) as llm:
        for turn in ("first", "second"):
            found = [llm.generate(prompt, greedy(8))[0] for prompt in prompts]
            wrong += _unlike(f"{turn} time", expected, found)
        stats = llm.engine.stats()
    if not (stats.num_loaded_blocks and stats.num_loaded_windows):
        wrong.append("nothing came back from host memory")
    return wrong


def _drafted(bench: Bench, numerics: Numerics) -> list[str]:
    """A drafter beside the model: verified rows are those of tokens that come one by one."""
    plain = generate(bench, world_config(World.TRAINED, numerics), greedy())
    wrong = []
    for num_drafts in (2, 5):
        speculation = {"mode": "fixed", "max_drafts": num_drafts}
        config = world_config(World.TRAINED, numerics, speculation=speculation)
        with LLM(config, backend=bench.new_under_test(numerics)) as llm:
            found = llm.generate(list(PROMPTS), greedy())
            accepted = llm.engine.stats().accepted_by_place
        wrong += _unlike(f"{num_drafts} drafts", plain, found)
        if not all(accepted):
            wrong.append(
                f"{num_drafts} drafts: accepted by place {accepted}, expected some at each"
            )
    return wrong


def _trace_chunks(bench: Bench, numerics: Numerics) -> list[str]:
    config = world_config(World.TRAINED, numerics)
    backend = bench.under_test(numerics)
    ids = [11 + 37 * i % 3900 for i in range(45)]
    whole = trace(config, ids, backend=backend)["logits"]
    ways = {
        "chunks of 16": trace(config, ids, backend=backend, chunk=16),
        "chunks of 7": trace(config, ids, backend=backend, chunk=7),
        "decoding": trace(config, ids, backend=backend, kind=StepKind.DECODE),
    }
    wrong = []
    for name, found in ways.items():
        rows = (found["logits"] != whole).any(1).nonzero().flatten()
        if rows.numel():
            wrong.append(f"{name}: logits of token {int(rows[0])} have other bits than whole")
    return wrong


def _stopped(bench: Bench, numerics: Numerics) -> list[str]:
    """A stop token ends an answer where it stands in the unstopped one, and nothing follows."""
    config = world_config(World.TRAINED, numerics)
    free = tokens(generate(bench, config, greedy()))
    params = [
        greedy().model_copy(update={"stop_token_ids": [answer[NUM_TOKENS // 2]]}) for answer in free
    ]
    wrong = []
    for index, output in enumerate(generate(bench, config, params)):
        stop = params[index].stop_token_ids[0]
        expected = free[index][: free[index].index(stop) + 1]
        found = tokens([output])[0]
        if found not in (expected, expected[:-1]):
            wrong.append(f"stop token {stop}: prompt {index} gave {found}, expected {expected}")
    return wrong


def _depths(bench: Bench, numerics: Numerics) -> list[str]:
    """Steps launched before the results they go on from are known give the same tokens.

    All answers are equally long, so the steps of all depths hold the same rows.
    """

    def run(depth: int) -> list[RequestOutput]:
        config = world_config(World.TRAINED, numerics, scheduler={"async_depth": depth})
        return generate(bench, config, greedy())

    plain = run(0)
    return [line for depth in (1, 2) for line in _unlike(f"depth {depth}", plain, run(depth))]


def _seeds(bench: Bench, numerics: Numerics) -> list[str]:
    """A seeded request draws the same tokens twice, and other ones with another seed."""
    config = world_config(World.TRAINED, numerics)

    def run(seed: int) -> list[RequestOutput]:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True)
        return generate(bench, config, params)

    first, again, other = run(3), run(3), run(4)
    wrong = _unlike("seed 3 twice", first, again)
    if tokens(first) == tokens(other):
        wrong.append("seeds 3 and 4 gave the same answers to every prompt")
    return wrong
