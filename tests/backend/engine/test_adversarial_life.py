"""Random schedules through the real worker, on a runtime that is as late as it may be.

Device work runs when the runtime chooses, released memory is NaN at once, and the model reads
every earlier position back from the caches.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.engine.outputs import FinishReason, RequestOutput
from deepinfer.engine.sampling_params import SamplingParams
from tests.backend.engine.conftest import check_no_leak, scripted_engine
from tests.backend.engine.scripted_model import CheckingModel

EOS = 1


def script(known: list[int]) -> int:
    """A function of the whole past; the end token about every thirtieth time."""
    draw = sum((index + 3) * token for index, token in enumerate(known)) % 8191
    return EOS if draw % 30 == 0 else 20 + draw % 250


class AdversarialLife(RuleBasedStateMachine):
    """Requests, aborts, preemptions and steps in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: LLMEngine | None = None
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.aborted: set[str] = set()
        self.last: dict[str, RequestOutput] = {}

    @initialize(
        runtime_seed=st.integers(0, 1 << 16),
        depth=st.integers(0, 2),
        num_blocks=st.integers(6, 30),
        chunk=st.sampled_from([1, 4, 64]),
        max_drafts=st.sampled_from([0, 1, 3, 5]),
        errs_every=st.integers(1, 9),
        budget_seed=st.none() | st.integers(0, 1 << 16),
        replays=st.booleans(),
    )
    def begin(
        self,
        runtime_seed: int,
        depth: int,
        num_blocks: int,
        chunk: int,
        max_drafts: int,
        errs_every: int,
        budget_seed: int | None,
        replays: bool,
    ) -> None:
        def propose(known: list[int]) -> int:
            return script(known) if len(known) % errs_every else 19

        self.engine = scripted_engine(
            script,
            {
                "speculation.mode": "fixed" if max_drafts else "off",
                "speculation.max_drafts": max_drafts or None,
                "scheduler.async_depth": depth,
                "scheduler.max_num_seqs": 3,
                "scheduler.max_num_tokens": 64,
                "scheduler.prefill_chunk_tokens": chunk,
                "cache.block_size": 4,
                "cache.num_blocks": num_blocks,
            },
            model_class=CheckingModel,
            runtime_seed=runtime_seed,
            propose=propose,
            budget_seed=budget_seed,
            # Different by position, so that a budget is dealt out unevenly.
            confidence=lambda position: 0.3 + position % 7 / 10,
            replays=replays,
        )

    @property
    def device(self) -> LLMEngine:
        assert self.engine is not None  # `begin` runs first
        return self.engine

    @precondition(lambda self: self.engine is not None and len(self.asked) < 8)
    @rule(length=st.integers(1, 12), max_tokens=st.integers(1, 10), logprobs=st.booleans())
    def ask(self, length: int, max_tokens: int, logprobs: bool) -> None:
        request_id = f"r{len(self.asked)}"
        prompt = [30 + 7 * len(self.asked) + position for position in range(length)]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            logprobs=0 if logprobs else None,
            prompt_logprobs=0 if logprobs else None,
        )
        self.asked[request_id] = (prompt, params)
        self.device.add_request(request_id, prompt, params)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.asked)))
        self.aborted.add(request_id)
        self.device.abort(request_id)

    @precondition(lambda self: self.engine is not None and self.engine._scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        scheduler = self.device._scheduler
        scheduler.preempt(data.draw(st.sampled_from(scheduler.running)))

    @precondition(lambda self: self.engine is not None)
    @rule(num_steps=st.integers(1, 5))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.last |= {output.request_id: output for output in self.device.step()}

    def teardown(self) -> None:
        if self.engine is None:
            return
        while self.engine.has_unfinished():
            self.step(1)
        check_no_leak(self.engine)
        self.engine.close()
        assert self.last.keys() == self.asked.keys()
        for request_id, output in self.last.items():
            self.check(request_id, output)

    def check(self, request_id: str, output: RequestOutput) -> None:
        prompt, params = self.asked[request_id]
        expected: list[int] = []
        while len(expected) < (params.max_tokens or 0) and EOS not in expected:
            expected.append(script(prompt + expected))
        (answer,) = output.outputs
        assert answer.token_ids == expected[: len(answer.token_ids)]
        if request_id not in self.aborted:
            assert answer.token_ids == expected
            assert answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if answer.logprobs is not None:
            assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
            scored = [entry.token_id for entry in output.prompt_logprobs or () if entry]
            assert scored == prompt[1:][: len(scored)]
            assert request_id in self.aborted or scored == prompt[1:]


class LongAdversarialLife(AdversarialLife):
    """The same life with another name, so that it has settings of its own."""


TestAdversarialLife = AdversarialLife.TestCase
TestAdversarialLife.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestLongAdversarialLife = pytest.mark.timeout(7200)(pytest.mark.slow(LongAdversarialLife.TestCase))
TestLongAdversarialLife.settings = settings(max_examples=600, stateful_step_count=40, deadline=None)
