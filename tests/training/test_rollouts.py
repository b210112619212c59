"""Prompts and drafts along answers: what is counted is what decoding would meet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer_training import calibration, rollouts
from deepinfer_training.drafter import Anchors, Drafts, initial_drafter
from deepinfer_training.evaluation import Model
from deepinfer_training.sampler import continue_prompts
from deepinfer_training.sequences import DOMAINS, SequenceSource, Split

CONFIG = Path(__file__).resolve().parents[2] / "training" / "configs" / "smoke.json"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(data: Path) -> SequenceSource:
    return SequenceSource(data, 2)


def test_prompts_end_where_a_user_would_wait(source: SequenceSource) -> None:
    asked, domains = rollouts.prompts(source.generators, source.natural, Split.DEV, 1, 3)
    again, _ = rollouts.prompts(source.generators, source.natural, Split.DEV, 1, 3)
    assert asked == again
    assert domains.tolist() == [i for i in range(len(DOMAINS)) for _ in range(3)]
    for ids, domain in zip(asked, domains.tolist(), strict=True):
        spoken = source.generators.text.decode(ids)
        assert ids[0] == source.generators.text.bos
        if DOMAINS[domain] in ("copy", "arithmetic", "json", "dialogue"):
            assert spoken.endswith("</think>")
        if DOMAINS[domain] == "recall":
            # Some recall documents only ask for what nobody has stated.
            assert spoken.endswith("?\nAnswer:") or "Question:" not in spoken


def test_drafts_are_verified_against_the_answer_and_stop_at_its_end(model: Model) -> None:
    arch = model.arch
    drafter = {n: v.detach() for n, v in initial_drafter(model.parameters, arch, 1, CPU).items()}
    shared = {name: model.parameters[name] for name in ("embed.weight", "head.weight")}
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 100, (2, 20), generator=generator)
    continued = continue_prompts(model, prompts, 9, torch.zeros(2), generator).tolist()
    answers = [continued[0][20:29], continued[1][20:24]]
    asked = [row[:20] for row in continued]
    found = rollouts.draft_over(model, {**drafter, **shared}, asked, answers, torch.arange(2))
    assert found.num_left.tolist() == [[5, 5, 5, 5, 4, 3, 2, 1, 0], [3, 2, 1, 0, 0, 0, 0, 0, 0]]
    assert (found.accepted <= found.num_left).all()
    # An answer is judged the same beside a longer one and alone.
    alone = rollouts.draft_over(
        model, {**drafter, **shared}, asked[1:], answers[1:], torch.zeros(1, dtype=torch.int64)
    )
    assert alone.accepted[0].tolist() == found.accepted[1, :4].tolist()
    assert torch.allclose(alone.features[0], found.features[1, :4], atol=1e-4)
    assert calibration.mean_accepted(found.accepted, found.num_left) >= 0.0


def test_a_perfect_draft_is_accepted_whole(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, size = model.arch, model.arch.dspark_block_size
    asked, answer = [[5, 6, 7]], [[10, 11, 12, 13, 14, 15, 16]]

    def perfect(parameters: object, arch_: object, ids: torch.Tensor, taps: object,
                anchors: Anchors, numerics: object) -> Drafts:  # fmt: skip
        ahead = anchors.positions.unsqueeze(-1) + torch.arange(1, size + 1)
        tokens = ids.gather(1, ahead.flatten(1)).view_as(ahead).clone()
        tokens[0, 1, 2] = 99  # one wrong draft
        blank = torch.zeros((*tokens.shape, 1))
        return Drafts(tokens, blank[..., 0], blank, blank)

    monkeypatch.setattr(rollouts, "draft_greedily", perfect)
    found = rollouts.draft_over(model, {}, asked, answer, torch.zeros(1, dtype=torch.int64))
    assert found.accepted.tolist() == [[5, 2, 4, 3, 2, 1, 0]]
    assert arch.dspark_block_size == 5
