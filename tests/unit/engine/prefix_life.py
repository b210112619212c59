"""Random lives of an engine whose prompts begin alike: the same promises, with shared blocks."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import initialize, rule

from deepinfer.engine.sampling_params import SamplingParams
from tests.unit.engine.async_life import BLOCK_SIZE, Asked, AsyncLife, LifeScript
from tests.unit.engine.conftest import null_engine


class PrefixLife(AsyncLife):
    """Prompts of a few families, and questions that go on from an earlier answer."""

    @initialize(
        seed=st.integers(0, 1 << 16),
        depth=st.integers(0, 2),
        drafts=st.sampled_from([0, 1, 3]),
        num_blocks=st.integers(6, 40),
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
        self.make(
            LifeScript(seed, drafts),
            {
                "scheduler.async_depth": depth,
                "scheduler.max_num_seqs": max_num_seqs,
                "scheduler.prefill_chunk_tokens": chunk,
                "cache.num_blocks": num_blocks,
            },
            drafts,
        )

    def make(self, script: LifeScript, overrides: dict[str, object], max_drafts: int) -> None:
        common = {
            "scheduler.max_num_tokens": 64,
            "cache.block_size": BLOCK_SIZE,
            "cache.prefix": True,
            "max_model_len": self.max_model_len,
        }
        self.script = script
        self.null = null_engine(script, common | overrides, max_drafts=max_drafts)
        self.num_blocks = self.null.runner.num_blocks

    @rule(
        family=st.integers(0, 1),
        shared=st.integers(1, 22),
        own=st.integers(0, 2),
        max_tokens=st.integers(1, 30),
        n=st.integers(1, 2),
    )
    def ask(self, family: int, shared: int, own: int, max_tokens: int, n: int) -> None:
        beginning = [50 + family] * min(shared, BLOCK_SIZE * self.num_blocks - 3)
        self.put(beginning + [60 + len(self.asked)] * own, max_tokens, n)

    @rule(data=st.data(), more=st.integers(0, 6), max_tokens=st.integers(1, 20))
    def ask_again(self, data: st.DataObject, more: int, max_tokens: int) -> None:
        """A next turn: the prompt is an earlier prompt with its answer, and a little more."""
        if not self.asked:
            return
        asked = data.draw(st.sampled_from(list(self.asked.values())))
        prompt = [*asked.prompt, *asked.seen[0], *[70 + len(self.asked)] * more]
        if len(prompt) < min(self.max_model_len, BLOCK_SIZE * self.num_blocks - 1):
            self.put(prompt, max_tokens, 1)

    def put(self, prompt: list[int], max_tokens: int, n: int) -> None:
        request_id = f"r{len(self.asked)}"
        params = SamplingParams(temperature=0.0, n=n, max_tokens=max_tokens, ignore_eos=True)
        self.asked[request_id] = Asked(prompt, params)
        self.device.engine.add_request(request_id, prompt, params)

    def teardown(self) -> None:
        super().teardown()
        if self.null is None:
            return
        scheduler = self.null.engine._scheduler
        assert scheduler.reuse is not None
        stats = self.null.engine.stats()
        assert stats.kv_idle_blocks == len(scheduler.reuse.cache.index), "a block is lost"
        # Every token that was not computed again was committed by somebody else before.
        num_known = stats.prefix_hit_tokens + stats.replayed_tokens
        assert num_known % BLOCK_SIZE == 0, "hits are no whole blocks"
        assert num_known <= stats.prefix_queried_tokens


class TierLife(PrefixLife):
    """Few blocks on the device and a host tier: most of what is known has to come back from it."""

    @initialize(
        seed=st.integers(0, 1 << 16),
        depth=st.integers(0, 2),
        drafts=st.sampled_from([0, 0, 3]),
        num_blocks=st.integers(7, 12),
        chunk=st.sampled_from([3, 7, 64]),
        max_num_seqs=st.integers(1, 3),
        host_bytes=st.sampled_from([4000, 20_000, 1_000_000]),
        copy_us=st.sampled_from([0.0, 300.0, 9000.0]),
    )
    def begin_with_tier(
        self,
        seed: int,
        depth: int,
        drafts: int,
        num_blocks: int,
        chunk: int,
        max_num_seqs: int,
        host_bytes: int,
        copy_us: float,
    ) -> None:
        self.make(
            LifeScript(seed, drafts),
            {
                "scheduler.async_depth": depth,
                "scheduler.max_num_seqs": max_num_seqs,
                "scheduler.prefill_chunk_tokens": chunk,
                "cache.num_blocks": num_blocks,
                "cache.host_memory": host_bytes,
            },
            drafts,
        )
        self.device.runner.copies.copy_us = copy_us

    def begin(self, **_: int) -> None:
        """Not this one: `begin_with_tier`."""

    @rule(family=st.integers(0, 2), more=st.integers(0, 1), max_tokens=st.integers(1, 6))
    def ask_for_known(self, family: int, more: int, max_tokens: int) -> None:
        """One of three long beginnings, which do not fit the device together."""
        self.put([80 + family] * 19 + [60 + len(self.asked)] * more, max_tokens, 1)
