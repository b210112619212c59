"""Random lives of an engine with steps in flight: the state machine, apart from how often it runs.

Whatever is asked, aborted, preempted and however late the device is: every output is what its
script says, no wrong memory is read, and nothing is left behind.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from deepinfer.engine.outputs import CompletionOutput, FinishReason, RequestOutput
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.text.detokenizer import decode_tokens
from tests.unit.engine.conftest import NullEngine, null_engine

EOS, STOP_TOKEN = 1, 30
BLOCK_SIZE = 4
# Byte tokens of the letters a to z, so that outputs are text that stop strings can match.
FIRST_LETTER, NUM_LETTERS = 100, 26


@dataclass(frozen=True, slots=True)
class LifeScript:
    """Letters, with an end token and a stop token somewhere; a pure function of its arguments.

    Attributes:
        seed: of all choices.
        accepts: most drafts accepted in a step.
    """

    seed: int
    accepts: int

    def token(self, request_id: str, index: int) -> int:
        if index == self._draw("eos", request_id, 0) % 60:
            return EOS
        if index == self._draw("stop", request_id, 0) % 50:
            return STOP_TOKEN
        return FIRST_LETTER + self._draw("token", request_id, index) % NUM_LETTERS

    def accepted(self, request_id: str, step: int) -> int:
        return self._draw("accepted", request_id, step) % (self.accepts + 1)

    def _draw(self, purpose: str, request_id: str, index: int) -> int:
        key = f"{self.seed} {purpose} {index} {request_id}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little")


@dataclass(slots=True)
class Asked:
    """A request and the last that was heard of it."""

    prompt: list[int]
    params: SamplingParams
    is_aborted: bool = False
    seen: list[list[int]] = field(default_factory=lambda: [[], []])
    last: RequestOutput | None = None


class AsyncLife(RuleBasedStateMachine):
    """Requests in any order on a null device that is late, with any number of accepted drafts."""

    max_model_len = 80

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, Asked] = {}
        self.null: NullEngine | None = None

    def build(
        self, script: LifeScript, max_drafts: int, overrides: dict[str, object]
    ) -> NullEngine:
        """The engine under test; meta tests build a broken one."""
        return null_engine(script, overrides, max_drafts=max_drafts)

    @initialize(
        seed=st.integers(0, 1 << 16),
        depth=st.integers(0, 2),
        drafts=st.sampled_from([0, 1, 3, 5]),
        num_blocks=st.integers(4, 24),
        chunk=st.sampled_from([1, 3, 7, 64]),
        max_num_seqs=st.integers(1, 4),
    )
    def begin(
        self,
        seed: int,
        depth: int,
        drafts: int,
        num_blocks: int,
        chunk: int,
        max_num_seqs: int,
    ) -> None:
        self.num_blocks = num_blocks
        self.script = LifeScript(seed, drafts)
        self.null = null_engine(
            self.script,
            {
                "scheduler.async_depth": depth,
                "scheduler.max_num_seqs": max_num_seqs,
                "scheduler.max_num_tokens": 64,
                "scheduler.prefill_chunk_tokens": chunk,
                "cache.block_size": BLOCK_SIZE,
                "cache.num_blocks": num_blocks,
                "max_model_len": self.max_model_len,
            },
            max_drafts=drafts,
        )

    @property
    def device(self) -> NullEngine:
        assert self.null is not None  # `begin` runs first
        return self.null

    @rule(
        length=st.integers(1, 15),
        max_tokens=st.integers(1, 40),
        n=st.integers(1, 2),
        stop=st.sampled_from(["none", "eos", "token", "text"]),
        priority=st.integers(-1, 1),
    )
    def ask(self, length: int, max_tokens: int, n: int, stop: str, priority: int) -> None:
        request_id = f"r{len(self.asked)}"
        prompt = [50 + (len(self.asked) + position) % 40 for position in range(length)]
        params = SamplingParams(
            temperature=0.0,
            n=n,
            max_tokens=max_tokens,
            ignore_eos=stop != "eos",
            stop_token_ids=[STOP_TOKEN] if stop == "token" else [],
            stop=["k", "xy", "qa"] if stop == "text" else None,
        )
        self.asked[request_id] = Asked(prompt, params)
        self.device.engine.add_request(request_id, prompt, params, priority=priority)

    @precondition(lambda self: any(self.open_ids()))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.open_ids()))
        self.asked[request_id].is_aborted = True
        self.device.engine.abort(request_id)

    @precondition(lambda self: self.null is not None and self.null.engine._scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        scheduler = self.device.engine._scheduler
        scheduler.preempt(data.draw(st.sampled_from(scheduler.running)))

    @rule(duration_us=st.integers(0, 4000))
    def host_works(self, duration_us: int) -> None:
        self.device.runtime.clock.advance(duration_us)

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for output in self.device.engine.step():
                self.hear(output)

    def open_ids(self) -> list[str]:
        return [
            request_id
            for request_id, asked in self.asked.items()
            if not asked.is_aborted and (asked.last is None or not asked.last.finished)
        ]

    def hear(self, output: RequestOutput) -> None:
        asked = self.asked[output.request_id]
        assert asked.last is None or not asked.last.finished, "news after the end"
        asked.last = output
        for answer in output.outputs:
            before = asked.seen[answer.index]
            assert answer.token_ids[: len(before)] == before, "an output has changed"
            asked.seen[answer.index] = list(answer.token_ids)
            self.check(output.request_id, asked, answer)

    def check(self, request_id: str, asked: Asked, answer: CompletionOutput) -> None:
        expected, reason = self.expected(request_id, asked)
        is_prefix = answer.token_ids == expected[: len(answer.token_ids)]
        assert is_prefix, f"tokens beyond the script: {answer.token_ids}, expected {expected}"
        if answer.finish_reason is FinishReason.ERROR:
            # It alone fills the cache; one more token than there are positions is known.
            known = len(asked.prompt) + len(answer.token_ids)
            assert known == self.num_blocks * BLOCK_SIZE + 1
            assert len(answer.token_ids) < len(expected)
        elif answer.finish_reason is not None and not asked.is_aborted:
            assert (answer.token_ids, answer.finish_reason) == (expected, reason)

    def expected(self, request_id: str, asked: Asked) -> tuple[list[int], FinishReason]:
        """The whole answer, token by token, by the words of the parameters."""
        tokenizer = self.device.engine.tokenizer
        params, tokens = asked.params, list[int]()
        while True:
            tokens.append(self.script.token(request_id, len(tokens)))
            text = decode_tokens(tokenizer, tokens, skip_special_tokens=True)
            if any(stop in text for stop in params.stop_strings):
                return tokens, FinishReason.STOP
            if tokens[-1] == EOS and not params.ignore_eos:
                return tokens, FinishReason.STOP
            if tokens[-1] in params.stop_token_ids:
                return tokens, FinishReason.STOP
            if len(tokens) == params.max_tokens or (
                len(asked.prompt) + len(tokens) == self.max_model_len
            ):
                return tokens, FinishReason.LENGTH

    @invariant()
    def memory_adds_up(self) -> None:
        if self.null is None:
            return
        scheduler = self.null.engine._scheduler
        held = [block for sequence in scheduler.running for block in sequence.blocks]
        late = scheduler.num_deferred_blocks
        if scheduler.reuse is not None and scheduler.reuse.tier is not None:
            late += sum(len(saving.blocks) for saving in scheduler.reuse.tier._saving)
        if scheduler.reuse is None:
            assert len(set(held)) == len(held) == scheduler.blocks.num_used - late
        # Several may hold a block, but none twice.
        assert all(len(set(s.blocks)) == len(s.blocks) for s in scheduler.running)
        assert len(set(held)) <= scheduler.blocks.num_used <= len(set(held)) + late

    def teardown(self) -> None:
        if self.null is None:
            return
        for output in self.null.run().values():
            self.hear(output)
        assert all(asked.last is not None and asked.last.finished for asked in self.asked.values())
        self.null.engine.close()
