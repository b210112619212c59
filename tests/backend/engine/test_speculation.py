"""Rounds of speculation with a scripted target and drafter: any acceptance can be made to happen.

Every answer is compared with that of an engine without speculation, whose model follows the same
script. The drafter checks on its way that its context holds the final tokens and no others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from deepinfer.device.errors import ConfigError
from deepinfer.device.ops.sampling import SampleParams, SampleWork
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.outputs import FinishReason, RequestOutput
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer_conformance.compare import chi_square
from deepinfer_conformance.naive.sampling import filter_logits
from tests.backend.engine.conftest import collect, engine_config, scripted_engine
from tests.backend.engine.scripted_model import CheckingModel, Script

VOCABULARY, EOS = 320, 1
Make = Callable[..., LLMEngine]
DEPTHS = [0, 1, 2]


def rising(known: list[int]) -> int:
    """A token that depends on all before it, so that a wrong one changes what follows."""
    return 20 + (7 * sum(known) + 3 * len(known)) % 250


def wrong_at(script: Script, every: int) -> Script:
    """The script, but another token at every so many positions."""

    def propose(known: list[int]) -> int | Tensor:
        right = script(known)
        if len(known) % every or isinstance(right, Tensor):
            return right
        return right + 1

    return propose


@pytest.fixture(params=DEPTHS, ids=lambda depth: f"depth{depth}")
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Builds engines of one depth on the adversarial runtime, with checked memory."""
    made: list[LLMEngine] = []

    def build(
        script: Script,
        propose: Script | None = None,
        *,
        max_drafts: int | None = None,
        budget_seed: int | None = None,
        **overrides: object,
    ) -> LLMEngine:
        speculation: dict[str, object] = {}
        if max_drafts != 0:
            speculation = {"speculation.mode": "fixed", "speculation.max_drafts": max_drafts}
        engine = scripted_engine(
            script,
            {"scheduler.async_depth": request.param, "cache.block_size": 4}
            | speculation
            | overrides,
            model_class=CheckingModel,
            runtime_seed=len(made),
            propose=propose,
            budget_seed=budget_seed,
            confidence=lambda position: 0.3 + position % 7 / 10,
        )
        made.append(engine)
        return engine

    yield build
    for engine in made:
        engine.close()


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams.model_validate({"temperature": 0.0, "max_tokens": 12} | fields)


def answers(engine: LLMEngine, *asked: SamplingParams) -> list[RequestOutput]:
    """The last result of each request; prompts of 1, 4, 7, ... tokens."""
    for index, params in enumerate(asked):
        engine.add_request(f"r{index}", [5 + index] * (1 + 3 * index), params)
    results = collect(engine)
    return [results[f"r{index}"][-1] for index in range(len(asked))]


def told(results: list[RequestOutput]) -> list[tuple[object, ...]]:
    """What has to be equal with and without speculation."""
    return [
        (answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason, answer.logprobs)
        for result in results
        for answer in result.outputs
    ]


@pytest.mark.parametrize("max_drafts", [1, 2, 3, 5])
@pytest.mark.parametrize("every", [1, 2, 3, 5, 100])
def test_tokens_are_those_without_speculation(make: Make, max_drafts: int, every: int) -> None:
    asked = [greedy(max_tokens=9 + 3 * index, logprobs=2) for index in range(4)]
    plain = answers(make(rising, max_drafts=0), *asked)
    engine = make(rising, wrong_at(rising, every), max_drafts=max_drafts)
    assert told(answers(engine, *asked)) == told(plain)


@pytest.mark.parametrize("budget_seed", range(4))
@pytest.mark.parametrize("every", [2, 100])
def test_tokens_do_not_depend_on_the_budget(make: Make, budget_seed: int, every: int) -> None:
    asked = [greedy(max_tokens=9 + 3 * index, logprobs=0) for index in range(5)]
    asked.append(greedy(frequency_penalty=1.5, logit_bias={30: 5.0}, min_tokens=4))
    plain = answers(make(rising, max_drafts=0), *asked)
    engine = make(rising, wrong_at(rising, every), budget_seed=budget_seed)
    assert told(answers(engine, *asked)) == told(plain)
    assert engine.speculation is not None
    places = engine.speculation.places
    assert places.verified.sum() < places.drafted.sum()


@pytest.mark.parametrize("max_drafts", [1, 3, 5])
def test_exactly_as_many_tokens_as_asked_for(make: Make, max_drafts: int) -> None:
    """P27."""
    engine = make(rising, max_drafts=max_drafts)
    for max_tokens in (1, 2, 5, 8):
        (result,) = answers(engine, greedy(max_tokens=max_tokens, logprobs=0))
        (answer,) = result.outputs
        assert answer.logprobs is not None
        assert len(answer.token_ids) == len(answer.logprobs) == max_tokens
        assert answer.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("max_drafts", [1, 3, 5])
def test_a_right_drafter_saves_all_steps_but_one_in_so_many(make: Make, max_drafts: int) -> None:
    engine = make(rising, max_drafts=max_drafts)
    before = engine.stats().num_steps
    answers(engine, greedy(max_tokens=1 + 4 * (1 + max_drafts)))
    steps = engine.stats().num_steps - before
    # The prompt, four full blocks, and what was launched before their results were known.
    assert steps <= 1 + 4 + engine.config.scheduler.async_depth


@pytest.mark.parametrize("every", [2, 100])
def test_frequency_penalty_counts_the_drafts_before_a_token(make: Make, every: int) -> None:
    """P21."""

    def stubborn(known: list[int]) -> Tensor:
        row = torch.zeros(VOCABULARY)
        row[100:140] = torch.linspace(10.0, 8.0, 40)
        return row

    asked = [greedy(frequency_penalty=value) for value in (2.0, -2.0, 0.5)]
    asked.append(greedy(repetition_penalty=1.3))
    asked.append(greedy(presence_penalty=1.0))
    plain = answers(make(stubborn, max_drafts=0), *asked)
    # The first request's own answer, so that its drafts are accepted.
    right = plain[0].outputs[0].token_ids
    propose = wrong_at(lambda known: right[len(known) % len(right) - 1], every)
    assert told(answers(make(stubborn, propose), *asked)) == told(plain)
    assert right != plain[1].outputs[0].token_ids


def test_bias_and_allowed_ids_hold_for_verified_drafts(make: Make) -> None:
    """P22."""
    asked = [
        greedy(logit_bias={rising([5]): -100.0}),
        greedy(logit_bias=dict.fromkeys(range(20, 150), -100.0)),
        greedy(allowed_token_ids=[30, 31, 32]),
        greedy(min_p=0.3, temperature=1.0, top_k=1),
        greedy(),
    ]
    plain = answers(make(rising, max_drafts=0), *asked)
    assert told(answers(make(rising), *asked)) == told(plain)


@pytest.mark.parametrize("min_tokens", [0, 3, 4, 7])
def test_an_end_inside_a_block_drops_what_follows(make: Make, min_tokens: int) -> None:
    def ends(known: list[int]) -> Tensor:
        row = torch.zeros(VOCABULARY)
        row[rising(known)] = 10.0
        if len(known) % 5 == 0:
            row[EOS] = 20.0
        return row

    asked = [greedy(min_tokens=min_tokens), greedy(ignore_eos=True), greedy(stop_token_ids=[77])]
    plain = answers(make(ends, max_drafts=0), *asked)
    assert plain[0].outputs[0].finish_reason is FinishReason.STOP
    assert told(answers(make(ends), *asked)) == told(plain)


def test_stop_strings_inside_a_block(make: Make) -> None:
    text = [100, 47, 101, 47, 102, 47, 103]  # "a,b,c,d"
    asked = [greedy(stop=["b,c"]), greedy(stop=[",d"]), greedy(stop=["x"])]

    def script(known: list[int]) -> int:
        return text[(known.count(47) * 2 + (known[-1] != 47 and known[-1] >= 100)) % len(text)]

    plain = answers(make(script, max_drafts=0), *asked)
    assert [result.outputs[0].stop_reason for result in plain[:2]] == ["b,c", ",d"]
    assert told(answers(make(script), *asked)) == told(plain)


@pytest.mark.parametrize("room", [1, 2, 3, 6])
def test_the_longest_sequence_is_never_passed(make: Make, room: int) -> None:
    """P37."""
    limit = 40
    prompt = [7] * (limit - room)
    results = []
    for max_drafts in (0, 5):
        engine = make(rising, max_drafts=max_drafts, max_model_len=limit)
        engine.add_request("r", prompt, greedy(max_tokens=None, logprobs=1))
        results.append(collect(engine)["r"][-1])
    assert told(results[1:]) == told(results[:1])
    assert len(results[1].outputs[0].token_ids) == room


@pytest.mark.parametrize("every", [3, 100])
def test_preemption_does_not_change_tokens(make: Make, every: int) -> None:
    asked = [greedy(max_tokens=20, logprobs=0) for _ in range(4)]
    plain = answers(make(rising, max_drafts=0), *asked)
    engine = make(rising, wrong_at(rising, every), **{"cache.num_blocks": 14})
    assert told(answers(engine, *asked)) == told(plain)
    assert engine.stats().num_preemptions >= 1


def test_preemption_counts_no_token_twice(make: Make) -> None:
    """The newest token is yielded once more when its sequence comes back."""

    def close(known: list[int]) -> Tensor:
        row = torch.zeros(VOCABULARY)
        row[100:104] = torch.tensor([10.0, 9.9, 9.7, 9.4])
        return row

    asked = [greedy(max_tokens=20, frequency_penalty=0.4) for _ in range(4)]
    plain = answers(make(close, max_drafts=0), *asked)
    engine = make(close, **{"cache.num_blocks": 14})
    assert told(answers(engine, *asked)) == told(plain)
    assert engine.stats().num_preemptions >= 1


def test_logits_that_are_not_numbers_end_only_what_comes_after(make: Make) -> None:
    def ill(known: list[int]) -> int | Tensor:
        if known[0] == 6 and len(known) == 9:
            return torch.full((VOCABULARY,), float("nan"))
        return rising(known)

    asked = [greedy(), greedy(), greedy()]
    plain = answers(make(ill, max_drafts=0), *asked)
    found = answers(make(ill, rising), *asked)
    assert told(found) == told(plain)
    assert found[1].outputs[0].finish_reason is FinishReason.ERROR
    assert len(found[1].outputs[0].token_ids) == 5


class Brackets:
    """Allows 200 and 201 in turn, then the end after four tokens."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def mask(self, row: int) -> Tensor:
        allowed = torch.zeros(VOCABULARY, dtype=torch.bool)
        count = len(self.taken) + row
        allowed[EOS if count >= 4 else 200 + count % 2] = True
        return allowed

    def advance(self, token_id: int) -> None:
        assert bool(self.mask(0)[token_id]), "a token the mask forbids was taken"
        self.taken.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        del self.taken[len(self.taken) - num_tokens :]


@pytest.mark.parametrize("illegal", [None, 1, 2])
def test_drafts_outside_the_grammar_are_refused(make: Make, illegal: int | None) -> None:
    """P11: the drafts before the illegal one count, and a legal token follows."""

    def propose(known: list[int]) -> int:
        place = len(known) - 1
        return 300 if place == illegal else 200 + place % 2

    engine = make(lambda known: 150, propose, max_drafts=4)
    engine.add_request("bound", [9], greedy())
    engine.add_request("free", [8], greedy(max_tokens=20))
    (sequence,) = engine._requests["bound"].sequences
    sequence.constraint = Brackets()
    results = {name: outputs[-1] for name, outputs in collect(engine).items()}
    assert results["bound"].outputs[0].token_ids == [200, 201, 200, 201, EOS]
    assert results["bound"].outputs[0].finish_reason is FinishReason.STOP
    assert results["free"].outputs[0].token_ids == [150] * 20


def test_a_bound_answer_goes_on_after_a_preemption(make: Make) -> None:
    """Its newest token is not offered to the grammar twice, and its drafts stay within it."""
    engine = make(lambda known: 150, lambda known: 200 + (len(known) - 1) % 2, max_drafts=1)
    engine.add_request("bound", [9], greedy())
    (sequence,) = engine._requests["bound"].sequences
    sequence.constraint = Brackets()
    while sequence.num_output_tokens < 1:
        engine.step()
    engine._scheduler.preempt(sequence)
    answer = collect(engine)["bound"][-1].outputs[0]
    assert answer.token_ids == [200, 201, 200, 201, EOS]
    assert engine.stats().accepted_by_place[0] > 0


def test_aborts_leave_no_trace(make: Make) -> None:
    engine = make(rising, wrong_at(rising, 4))
    expected = answers(make(rising, max_drafts=0), greedy(max_tokens=30))[0]
    for steps in range(5):
        engine.add_request("keep", [5], greedy(max_tokens=30))
        engine.add_request("drop", [6] * 7, greedy(max_tokens=30))
        for _ in range(steps):
            engine.step()
        engine.abort("drop")
        kept = collect(engine)["keep"][-1]
        assert kept.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("prompt_len", [8, 1000, 4000])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_drafter_equal_to_the_target_is_always_accepted(prompt_len: int, depth: int) -> None:
    """P55."""
    for max_drafts in range(1, 9):
        engine = scripted_engine(
            lambda known: 20 + (7 * known[-1] + len(known)) % 250,
            {
                "scheduler.async_depth": depth,
                "scheduler.max_num_seqs": 1,
                "speculation.mode": "fixed",
                "speculation.max_drafts": max_drafts,
                "max_model_len": 8192,
            },
            block_size=8,
            max_positions=8192,
        )
        num_blocks = 3
        params = greedy(max_tokens=1 + num_blocks * (1 + max_drafts))
        engine.add_request("r", [5 + index % 90 for index in range(prompt_len)], params)
        collect(engine)
        assert engine.speculation is not None
        places = engine.speculation.places
        assert places.conditional == [1.0] * max_drafts
        assert places.accepted.tolist() == [num_blocks] * max_drafts
        engine.close()


def test_more_drafts_than_the_drafter_gives_are_refused() -> None:
    """P64."""
    with pytest.raises(ConfigError, match=r"max_drafts = 6, but .* gives 5 drafts"):
        scripted_engine(rising, {"speculation.mode": "fixed", "speculation.max_drafts": 6})


def test_a_deterministic_run_needs_room_for_every_draft() -> None:
    settings = {
        "speculation.mode": "fixed",
        "determinism": "deterministic",
        "scheduler.max_num_seqs": 16,
        "scheduler.max_num_tokens": 95,
    }
    with pytest.raises(ConfigError, match="needs steps of 96 rows"):
        scripted_engine(rising, settings)


def test_a_number_of_drafts_without_speculation_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    LLMEngine.from_config(engine_config({"speculation.max_drafts": 3})).close()
    assert "speculation.max_drafts = 3 has no effect" in caplog.text


TOY = 6
NUM_ANSWERS = 250


def toy_logits(seed: int) -> Callable[[list[int]], Tensor]:
    """Logits of a toy vocabulary that depend on the newest token."""
    table = torch.randn(VOCABULARY, TOY, generator=torch.Generator().manual_seed(seed))

    def script(known: list[int]) -> Tensor:
        row = torch.full((VOCABULARY,), float("-inf"))
        row[100 : 100 + TOY] = table[known[-1]]
        return row

    return script


@pytest.mark.parametrize(
    ("budget_seed", "fields"),
    [
        (None, {"temperature": 0.7, "top_k": 4}),
        (3, {}),
        (5, {"top_p": 0.8, "min_p": 0.05}),
    ],
    ids=["fixed", "any budget", "any budget, filtered"],
)
def test_sampled_tokens_have_the_distribution_of_the_target(
    budget_seed: int | None, fields: dict[str, float]
) -> None:
    """Pairs of neighbouring tokens of each answer, so that all places in a block count."""
    target, drafter = toy_logits(1), toy_logits(2)
    engine = scripted_engine(
        target,
        {"speculation.mode": "fixed", "speculation.max_drafts": 3, "scheduler.max_num_seqs": 64},
        propose=drafter,
        budget_seed=budget_seed,
        confidence=lambda position: 0.2 + position % 5 / 6,
    )
    params = SamplingParams.model_validate({"n": NUM_ANSWERS, "max_tokens": 6, "seed": 11} | fields)
    engine.add_request("r", [5], params)
    answers = collect(engine)["r"][-1].outputs
    assert engine.speculation is not None
    accepted = engine.speculation.places.accepted
    assert accepted[0] > 0 < accepted[-1]
    engine.close()
    counts = torch.zeros(VOCABULARY, TOY, dtype=torch.int64)
    for answer in answers:
        known = [5, *answer.token_ids]
        for before, token in itertools.pairwise(known):
            counts[before, token - 100] += 1
    for before in (5, *range(100, 100 + TOY)):
        verdict = chi_square(counts[before], _shares(target([before]), params), 1e-5)
        assert verdict.passed, (before, verdict)


def _shares(logits: Tensor, params: SamplingParams) -> Tensor:
    """What `params` make of one row; [TOY] float64."""
    one = torch.ones(1)
    rows = SampleParams(
        temperature=one * params.temperature,
        top_k=torch.tensor([max(0, params.top_k)]),
        top_p=one * params.top_p,
        min_p=one * params.min_p,
        seeds=torch.zeros(1, dtype=torch.int64),
        sample_index=torch.zeros(1, dtype=torch.int64),
        positions=torch.zeros(1, dtype=torch.int64),
    )
    kept = filter_logits(logits[100 : 100 + TOY].unsqueeze(0), rows, SampleWork.SORTED)
    return torch.softmax(kept[0], -1)
