"""The tests of speculation can fail: mistakes between two rounds are caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from deepinfer.device.runtime import StepKind
from deepinfer.engine.draft_rounds import DraftRounds
from deepinfer.engine.logit_rows import LogitRows
from deepinfer.engine.sampler import Sampler
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.slot_drafts import SlotDrafts
from tests.backend.engine.conftest import collect, scripted_engine
from tests.backend.engine.scripted_model import CheckingModel
from tests.backend.engine.test_adversarial_life import AdversarialLife

Plant = Callable[[pytest.MonkeyPatch], None]
SEARCH = settings(
    max_examples=200,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def _accept_one_too_many(patch: pytest.MonkeyPatch) -> None:
    decide = Sampler._decide

    def broken(self: Sampler, *args: Any) -> Any:  # noqa: ANN401
        verified, rows = decide(self, *args), args[1]
        last = (rows.starts.diff() - 1).clamp_min(0)
        return verified._replace(
            token_ids=verified.token_ids.clamp_min(0),
            num_accepted=torch.minimum(verified.num_accepted + 1, last),
        )

    patch.setattr(Sampler, "_decide", broken)


def _inject_refused_rows(patch: pytest.MonkeyPatch) -> None:
    advance = DraftRounds.advance

    def broken(self: DraftRounds, step: Any, forwarded: Any, final: Any, *rest: Any) -> None:  # noqa: ANN401
        advance(self, step, forwarded, step.batch.query_lens, *rest)

    patch.setattr(DraftRounds, "advance", broken)


def _inject_all_but_the_last_row(patch: pytest.MonkeyPatch) -> None:
    advance = DraftRounds.advance

    def broken(self: DraftRounds, step: Any, forwarded: Any, final: Any, *rest: Any) -> None:  # noqa: ANN401
        advance(self, step, forwarded, (final - 1).clamp_min(0), *rest)

    patch.setattr(DraftRounds, "advance", broken)


def _keep_the_drafts_of_an_earlier_owner(patch: pytest.MonkeyPatch) -> None:
    """A prompt leaves the drafts of its slot as they are: those from before a preemption, too."""
    advance = DraftRounds.advance

    def broken(self: DraftRounds, step: Any, *rest: Any) -> None:  # noqa: ANN401
        if step.batch.kind is not StepKind.PREFILL:
            advance(self, step, *rest)
            return
        kept = self._slots._ids.clone()
        advance(self, step, *rest)
        self._slots._ids.copy_(kept)

    patch.setattr(DraftRounds, "advance", broken)


def _drafts_of_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    keep = SlotDrafts.keep
    patch.setattr(SlotDrafts, "keep", lambda self, slots, *rest: keep(self, slots.roll(1), *rest))


@pytest.mark.parametrize(
    "plant",
    [
        _accept_one_too_many,
        _inject_refused_rows,
        _inject_all_but_the_last_row,
        _keep_the_drafts_of_an_earlier_owner,
        _drafts_of_the_neighbour,
    ],
    ids=lambda plant: plant.__name__.strip("_"),
)
def test_planted_fault_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(AdversarialLife, settings=SEARCH)


def _penalised_tokens(mode: str) -> list[int]:
    """Tokens of a request that likes 100 most and is penalised for every repetition."""

    def stubborn(known: list[int]) -> torch.Tensor:
        row = torch.zeros(320)
        row[100:140] = torch.linspace(10.0, 8.0, 40)
        return row

    engine = scripted_engine(
        stubborn,
        {"speculation.mode": mode},
        model_class=CheckingModel,
        propose=lambda known: 99 + len(known),
    )
    params = SamplingParams(temperature=0.0, max_tokens=12, frequency_penalty=2.0)
    engine.add_request("r", [5], params)
    tokens = collect(engine)["r"][-1].outputs[0].token_ids
    engine.close()
    return tokens


def test_penalties_that_ignore_drafts_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _penalised_tokens("off")
    assert _penalised_tokens("fixed") == expected
    monkeypatch.setattr(
        LogitRows, "before", lambda self, draft_ids: draft_ids.new_empty((len(self.owner), 0))
    )
    assert _penalised_tokens("fixed") != expected
