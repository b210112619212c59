"""Verification on the reference: by hand, and against the distribution it must not change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.device.ops.sampling import Purpose, SampleParams, SampleWork
from deepinfer.device.ops.spec import Verified
from deepinfer_conformance.compare import chi_square
from deepinfer_reference.ops.philox import philox_uniform
from deepinfer_reference.ops.sampling import filter_logits, gumbel_noise
from deepinfer_reference.ops.spec import verify_drafts

VOCABULARY, NUM_DRAWS, FALSE_ALARM = 6, 8_000, 1e-6


def params(
    num_rows: int, temperature: float = 1.0, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0
) -> SampleParams:
    """Row i has seed i."""
    row = torch.arange(num_rows)
    return SampleParams(
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.full((num_rows,), top_k),
        top_p=torch.full((num_rows,), top_p),
        min_p=torch.full((num_rows,), float(min_p)),
        seeds=row,
        sample_index=torch.zeros_like(row),
        positions=torch.zeros_like(row) + 11,
    )


def peaked(*tokens: int) -> Tensor:
    """Logits [n, V] that leave each row one likely token."""
    return 20.0 * torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY).float()


def verify_greedily(best: list[int], drafts: list[int]) -> Verified:
    """One request: the target's best token of each row, and the drafts."""
    starts = torch.tensor([0, len(best)])
    return verify_drafts(
        peaked(*best),
        params(len(best), 0.0),
        SampleWork.GREEDY,
        starts,
        torch.tensor([drafts]),
        None,
    )


@pytest.mark.parametrize(
    ("best", "drafts", "tokens"),
    [
        ([3, 4, 5], [3, 4], [3, 4, 5]),
        ([3, 4, 5], [3, 1], [3, 4, -1]),
        ([3, 4, 5], [1, 4], [3, -1, -1]),
        ([3, 4, 5], [-1, 4], [3, -1, -1]),
        ([3, 4, 5], [3, -1], [3, 4, -1]),
        ([3], [3, 4], [3, -1, -1]),
        ([3, 4], [3, 4], [3, 4, -1]),
    ],
)
def test_greedy_acceptance_by_hand(best: list[int], drafts: list[int], tokens: list[int]) -> None:
    found = verify_greedily(best, drafts)
    assert found.token_ids.tolist() == [tokens]
    assert found.num_accepted.tolist() == [len([token for token in tokens if token >= 0]) - 1]


def test_a_row_without_a_draft_draws_as_without_speculation() -> None:
    logits = torch.randn(50, VOCABULARY, generator=torch.Generator().manual_seed(1))
    rows = params(50)
    found = verify_drafts(
        logits, rows, SampleWork.RANDOM, torch.arange(51), torch.full((50, 2), -1), None
    )
    noisy = filter_logits(logits, rows, SampleWork.RANDOM) + gumbel_noise(
        rows, Purpose.SAMPLE, VOCABULARY
    )
    assert torch.equal(found.token_ids[:, 0], noisy.argmax(-1))
    assert not found.num_accepted.any()


def test_a_draft_is_accepted_by_its_own_random_number() -> None:
    rows = params(400)
    target, drafter = torch.tensor([[0.3, 0.7]]).log(), torch.tensor([[0.6, 0.4]]).log()
    found = verify_drafts(
        target.expand(400, 2),
        rows,
        SampleWork.RANDOM,
        torch.arange(0, 401, 2),
        torch.zeros(200, 1, dtype=torch.int64),
        drafter.expand(200, 1, 2),
    )
    first = torch.arange(0, 400, 2)
    uniform = philox_uniform(
        rows.seeds[first],
        rows.sample_index[first],
        rows.positions[first],
        Purpose.ACCEPT,
        1,
    )
    assert torch.equal(found.num_accepted, (uniform[:, 0] < 0.5).long())
    # What is left of the target without the drafter's share is the other token.
    assert (found.token_ids[found.num_accepted == 0, 0] == 1).all()


SETTINGS = {
    "temperature 1": params(1),
    "temperature 0.6": params(1, 0.6),
    "top-k": params(1, top_k=3),
    "top-p": params(1, top_p=0.8),
    "min-p": params(1, min_p=0.15),
    "everything": params(1, 1.4, top_k=5, top_p=0.9, min_p=0.02),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("drafter", ["close", "far off", "certain"])
def test_tokens_have_the_distribution_of_the_target(setting: str, drafter: str) -> None:
    """Two drafts; the second row's logits depend on the first draft, as a model's do."""
    generator = torch.Generator().manual_seed(5)
    given = SETTINGS[setting]
    first = torch.randn(VOCABULARY, generator=generator)
    after = torch.randn(VOCABULARY, VOCABULARY, generator=generator)
    noise = {"close": 0.3, "far off": 3.0, "certain": 1.0}[drafter]
    proposals = noise * torch.randn(2, VOCABULARY, generator=generator)
    temperature = float(given.temperature)
    shares = torch.softmax(torch.stack((first, after[0])).add(proposals) / temperature, -1)
    drafts = torch.multinomial(shares, NUM_DRAWS, replacement=True, generator=generator).T
    if drafter == "certain":
        drafts = torch.tensor([[int(first.argmax()), 4]]).expand(NUM_DRAWS, 2)
    rows = torch.stack((first.expand(NUM_DRAWS, -1), after[drafts[:, 0]], after[drafts[:, 1]]), 1)
    own = SampleParams(*(column.expand(3 * NUM_DRAWS) for column in given))
    own = own._replace(
        seeds=torch.arange(NUM_DRAWS).repeat_interleave(3),
        positions=torch.arange(3).repeat(NUM_DRAWS),
    )
    draft_logits = torch.stack((first, after[0])).add(proposals).expand(NUM_DRAWS, 2, VOCABULARY)
    found = verify_drafts(
        rows.flatten(0, 1),
        own,
        SampleWork.SORTED,
        torch.arange(0, 3 * NUM_DRAWS + 1, 3),
        drafts,
        None if drafter == "certain" else draft_logits,
    )

    def target(logits: Tensor) -> Tensor:
        one = SampleParams(*(column[:1] for column in given))
        kept = filter_logits(logits.unsqueeze(0), one, SampleWork.SORTED)
        return torch.softmax(kept.double(), -1)[0]

    counts = torch.bincount(found.token_ids[:, 0], minlength=VOCABULARY)
    verdict = chi_square(counts, target(first), FALSE_ALARM)
    assert verdict.passed, verdict
    accepted = found.num_accepted >= 1
    assert accepted.any()
    for token in drafts[accepted, 0].unique().tolist():
        followed = found.token_ids[accepted & (drafts[:, 0] == token), 1]
        counts = torch.bincount(followed, minlength=VOCABULARY)
        verdict = chi_square(counts, target(after[token]), FALSE_ALARM)
        assert verdict.passed, (token, verdict)


def test_a_drafter_equal_to_the_target_is_always_accepted() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(4000, VOCABULARY, generator=generator)
    drafts = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator).view(1000, 4)
    found = verify_drafts(
        logits,
        params(4000),
        SampleWork.RANDOM,
        torch.arange(0, 4001, 4),
        drafts[:, :3],
        logits.view(1000, 4, VOCABULARY)[:, :3],
    )
    assert (found.num_accepted == 3).all()
