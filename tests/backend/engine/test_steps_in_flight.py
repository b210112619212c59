"""What depends on the tokens so far, with steps in flight, through the real worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.outputs import FinishReason, RequestOutput
from deepinfer.engine.sampling_params import SamplingParams
from tests.backend.engine.conftest import collect, scripted_engine
from tests.backend.engine.scripted_model import CheckingModel, Script

VOCABULARY = 320
Make = Callable[..., LLMEngine]


@pytest.fixture(params=[0, 1, 2], ids=lambda depth: f"depth{depth}")
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Builds engines of one depth on the adversarial runtime, with checked memory."""
    made: list[LLMEngine] = []

    def build(script: Script, **overrides: object) -> LLMEngine:
        engine = scripted_engine(
            script,
            {"scheduler.async_depth": request.param, "cache.block_size": 4} | overrides,
            model_class=CheckingModel,
            runtime_seed=len(made),
        )
        made.append(engine)
        return engine

    yield build
    for engine in made:
        engine.close()


def ask(engine: LLMEngine, **asked: SamplingParams) -> dict[str, RequestOutput]:
    for index, (name, params) in enumerate(asked.items()):
        engine.add_request(name, [5 + index], params)
    return {name: outputs[-1] for name, outputs in collect(engine).items()}


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams.model_validate({"temperature": 0.0, "max_tokens": 12} | fields)


class CountingConstraint:
    """Allows token 40 first, then always the one above the token before it."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def mask(self, row: int) -> Tensor:
        allowed = torch.zeros(VOCABULARY, dtype=torch.bool)
        allowed[40 + len(self.taken) + row] = True
        return allowed

    def advance(self, token_id: int) -> None:
        assert token_id == 40 + len(self.taken), "a token the mask forbids was taken"
        self.taken.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        del self.taken[len(self.taken) - num_tokens :]


def constrain(engine: LLMEngine, request_id: str) -> CountingConstraint:
    constraint = CountingConstraint()
    (sequence,) = engine._requests[request_id].sequences
    sequence.constraint = constraint
    return constraint


def test_a_constraint_sees_every_token_before_the_next_mask(make: Make) -> None:
    engine = make(lambda known: 100)
    engine.add_request("bound", [5], greedy())
    engine.add_request("free", [6], greedy(max_tokens=20))
    constraint = constrain(engine, "bound")
    results = {name: outputs[-1] for name, outputs in collect(engine).items()}
    assert results["bound"].outputs[0].token_ids == [40 + index for index in range(12)]
    assert results["free"].outputs[0].token_ids == [100] * 20
    assert constraint.taken == results["bound"].outputs[0].token_ids


def test_a_constraint_goes_on_after_a_preemption(make: Make) -> None:
    """P12."""
    engine = make(lambda known: 100, **{"cache.num_blocks": 7})
    for name in ("a", "b"):
        engine.add_request(name, [5, 6, 7], greedy(max_tokens=20))
        constrain(engine, name)
    results = collect(engine)
    assert engine.stats().num_preemptions >= 1
    for outputs in results.values():
        assert outputs[-1].outputs[0].token_ids == [40 + index for index in range(20)]


def falling(known: list[int]) -> Tensor:
    """Likes 100 most, then 101, 102, ...: a presence penalty moves down the list."""
    row = torch.zeros(VOCABULARY)
    row[100:140] = torch.linspace(10.0, 9.0, 40)
    return row


def test_penalties_count_the_token_in_flight(make: Make) -> None:
    results = ask(make(falling), a=greedy(presence_penalty=2.0), b=greedy())
    assert results["a"].outputs[0].token_ids == [100 + index for index in range(12)]
    assert results["b"].outputs[0].token_ids == [100] * 12


def test_penalty_counts_do_not_pass_to_the_next_holder_of_a_slot(make: Make) -> None:
    engine = make(falling, **{"scheduler.max_num_seqs": 1})
    asked = {name: greedy(presence_penalty=2.0, stop_token_ids=[104]) for name in "abc"}
    for result in ask(engine, **asked).values():
        assert result.outputs[0].token_ids == [100, 101, 102, 103, 104]


def test_min_tokens_counts_exactly(make: Make) -> None:
    results = ask(make(lambda known: 1), a=greedy(min_tokens=4), b=greedy(min_tokens=1), c=greedy())
    assert [len(results[name].outputs[0].token_ids) for name in "abc"] == [5, 2, 1]


def test_a_stop_string_ends_at_its_token(make: Make) -> None:
    letters = [100, 47, 101, 47, 102]  # "a,b,c"
    engine = make(lambda known: letters[(len(known) - 1) % 5])
    results = ask(engine, r=greedy(stop=["b,c"]), s=greedy(max_tokens=7))
    (answer,) = results["r"].outputs
    assert (answer.text, answer.token_ids, answer.stop_reason) == ("a,", letters, "b,c")
    assert results["s"].outputs[0].token_ids == letters + letters[:2]
    assert engine.stats().generated_tokens == 12


def test_logits_that_are_not_numbers_end_their_request_at_their_token(make: Make) -> None:
    """P25."""

    def script(known: list[int]) -> int | Tensor:
        if known[0] == 5 and len(known) == 4:
            return torch.full((VOCABULARY,), float("nan"))
        return 100 + len(known)

    engine = make(script)
    results = ask(engine, ill=greedy(), well=greedy())
    (ill,) = results["ill"].outputs
    assert (ill.token_ids, ill.finish_reason) == ([101, 102, 103], FinishReason.ERROR)
    assert "step 3" in str(ill.error)
    assert results["well"].outputs[0].token_ids == [101 + index for index in range(12)]
    assert engine.stats().num_non_finite == 1


def test_logprobs_belong_to_their_tokens(make: Make) -> None:
    engine = make(lambda known: 100 + len(known))
    results = ask(engine, a=greedy(logprobs=1, prompt_logprobs=1), b=greedy(stop_token_ids=[103]))
    (answer,) = results["a"].outputs
    assert answer.logprobs is not None
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
    assert all(entry.rank == 1 and entry.top[0][0] == entry.token_id for entry in answer.logprobs)
