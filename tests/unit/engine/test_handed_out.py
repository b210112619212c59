"""What random lives hand out: every request once to its end, early only if it asked for that."""

from __future__ import annotations

import random
import time

import pytest

from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.sampling_params import SamplingParams
from tests.unit.engine.async_life import STOP_TOKEN, LifeScript
from tests.unit.engine.conftest import null_engine


class Life:
    """An engine on the null device, and what it has handed out.

    Attributes:
        final_only: by request, whether it wants one result.
        lengths: tokens of each answer in the newest result, by request.
        ended: requests whose last result has come.
    """

    def __init__(self, seed: int, drafts: int) -> None:
        self.random = random.Random(seed)
        options = {
            "scheduler.async_depth": self.random.randint(0, 2),
            "scheduler.max_num_seqs": self.random.randint(1, 6),
            "scheduler.max_num_tokens": 64,
            "scheduler.prefill_chunk_tokens": self.random.choice([1, 3, 64]),
            "cache.block_size": 4,
            "cache.num_blocks": self.random.randint(5, 30),
            "cache.prefix": self.random.random() < 0.5,
            "max_model_len": 80,
        }
        self.engine = null_engine(LifeScript(seed, drafts), options, max_drafts=drafts).engine
        self.final_only: dict[str, bool] = {}
        self.lengths: dict[str, list[int]] = {}
        self.ended: set[str] = set()

    def ask(self) -> None:
        """A request of one to three answers, perhaps with a deadline."""
        name, any_of = f"r{len(self.final_only)}", self.random.choice
        stop = any_of(["none", "eos", "token", "text"])
        params = SamplingParams(
            temperature=0.0,
            n=self.random.randint(1, 3),
            max_tokens=self.random.randint(1, 40),
            ignore_eos=stop != "eos",
            stop_token_ids=[STOP_TOKEN] if stop == "token" else [],
            stop=["k", "xy"] if stop == "text" else None,
        )
        prompt = [50 + self.random.randint(0, 40) for _ in range(self.random.randint(1, 15))]
        self.final_only[name] = any_of([True, False])
        timeout_s = any_of([None, None, float(self.random.randint(1, 30))])
        self.engine.add_request(
            name, prompt, params, timeout_s=timeout_s, final_only=self.final_only[name]
        )

    def turn(self) -> None:
        """A step, or something else first."""
        chance, scheduler = self.random.random(), self.engine._scheduler
        if chance < 0.3:
            self.ask()
        elif chance < 0.36 and self.final_only:
            self.engine.abort(self.random.choice(sorted(self.final_only)))
        elif chance < 0.42 and scheduler.running:
            scheduler.preempt(self.random.choice(scheduler.running))
        elif chance < 0.46:
            self.engine.flush()
        self.step()

    def step(self) -> None:
        for output in self.engine.step():
            self.take(output)

    def take(self, output: RequestOutput) -> None:
        name = output.request_id
        assert name not in self.ended
        assert output.finished or not self.final_only[name]
        lengths = [len(answer.token_ids) for answer in output.outputs]
        before = self.lengths.get(name, [0] * len(lengths))
        assert all(new >= old for new, old in zip(lengths, before, strict=True))
        self.lengths[name] = lengths
        if output.finished:
            assert all(answer.finish_reason for answer in output.outputs)
            self.ended.add(name)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("seed", range(20))
def test_every_request_ends_once_and_speaks_early_only_if_it_may(
    seed: int, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    life = Life(seed, drafts)
    for _ in range(80):
        now[0] += 1.0
        life.turn()
    for _ in range(2000):
        if not life.engine.has_unfinished():
            break
        now[0] += 1.0
        life.step()
    assert life.ended == set(life.final_only)
    assert not life.engine.step()
    life.engine.close()
