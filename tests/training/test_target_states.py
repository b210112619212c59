"""What the target computed once along its answers serves as a fresh forward would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer.device.errors import ConfigError
from deepinfer_training import rollouts
from deepinfer_training.captured_step import EagerStep, StepMaker
from deepinfer_training.draft_step import DraftInputs, DraftLossFunction
from deepinfer_training.drafter import DraftObjective, initial_drafter
from deepinfer_training.evaluation import Model
from deepinfer_training.own_text import OwnText
from deepinfer_training.sequences import SequenceSource
from deepinfer_training.speed import Speed
from deepinfer_training.target_states import TargetStates, drafts_along
from deepinfer_training.train_drafter import DraftTrainer

CONFIG = Path(__file__).resolve().parents[2] / "training" / "configs" / "smoke.json"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def parameters(model: Model) -> dict[str, torch.Tensor]:
    shared = {name: model.parameters[name] for name in ("embed.weight", "head.weight")}
    return {**initial_drafter(model.parameters, model.arch, 1, CPU), **shared}


@pytest.fixture(scope="module")
def rows() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts shorter and longer than the window, answers of unequal length."""
    generator = torch.Generator().manual_seed(3)

    def some(count: int) -> list[int]:
        return torch.randint(3, 100, (count,), generator=generator).tolist()

    return [some(2), some(30), some(90)], [some(12), some(4), some(9)]


def test_a_row_is_the_window_before_its_answer(
    model: Model, rows: tuple[list[list[int]], list[list[int]]]
) -> None:
    asked, answers = rows
    window = model.arch.sliding_window
    states = TargetStates.of(model, OwnText.join(asked, answers, model.arch))
    assert states.num_anchors.tolist() == [12, 4, 9]  # shortest row first: as they were given
    for row, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
        assert states.ids[row, window] == prompt[-1]
        assert states.ids[row, window + 1 : window + 1 + len(answer)].tolist() == answer
        there = states.documents[row] == 0
        assert int(there.sum()) == min(len(prompt), window + 1) + len(answer)
        assert there[window]


def test_losses_are_those_of_a_fresh_forward(
    model: Model,
    parameters: dict[str, torch.Tensor],
    rows: tuple[list[list[int]], list[list[int]]],
) -> None:
    own = OwnText.join(*rows, model.arch)
    states = TargetStates.of(model, own)
    inputs = states.at_random(40, torch.Generator().manual_seed(1))
    offset = own.starts - 1 - states.window
    assert (inputs.positions - states.window).amin(1).tolist() == [0, 0, 0]
    assert (inputs.positions - states.window).amax(1).tolist() == [11, 3, 8]
    fresh = model.run(own.ids, own.documents())
    whole = DraftInputs(
        own.ids, own.documents(), inputs.positions + offset.unsqueeze(1), fresh.taps, fresh.hidden
    )
    objective = DraftObjective(0.1, 0.5, 0.5)
    loss = DraftLossFunction(parameters, model, model.numerics, objective, own.ids.shape[1])
    for got, wanted in zip(loss(inputs), loss(whole), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_every_weight_of_the_objective_counts(
    model: Model,
    parameters: dict[str, torch.Tensor],
    rows: tuple[list[list[int]], list[list[int]]],
) -> None:
    states = TargetStates.of(model, OwnText.join(*rows, model.arch))
    inputs = states.at_random(8, torch.Generator().manual_seed(1))

    def total(*weights: float) -> float:
        objective = DraftObjective(*weights)
        longest = inputs.ids.shape[1]
        loss = DraftLossFunction(parameters, model, model.numerics, objective, longest)(inputs)
        return float((loss.total - loss.confidence).detach())

    assert total(0.0, 0.0, 0.0) == pytest.approx(0.0, abs=1e-5)
    by_itself = [total(1.0, 0.0, 0.0), total(0.0, 1.0, 0.0), total(0.0, 0.0, 1.0)]
    assert min(by_itself) > 0.1
    assert total(0.1, 0.5, 0.4) == pytest.approx(
        0.1 * by_itself[0] + 0.5 * by_itself[1] + 0.4 * by_itself[2], rel=1e-4
    )
    # At a temperature of 1 both distances are the same.
    assert total(0.0, 0.0, 1.0, 1.0) == pytest.approx(by_itself[1], rel=1e-5)


def test_drafts_along_answers_are_those_of_rollouts(
    model: Model,
    parameters: dict[str, torch.Tensor],
    rows: tuple[list[list[int]], list[list[int]]],
) -> None:
    states = TargetStates.of(model, OwnText.join(*rows, model.arch))
    accepted, left = drafts_along(parameters, model, states)
    wanted = rollouts.draft_over(model, parameters, *rows, torch.arange(3))
    width = accepted.shape[1]
    assert left.tolist() == wanted.num_left[:, :width].tolist()
    assert accepted.tolist() == wanted.accepted[:, :width].tolist()
    assert not wanted.num_left[:, width:].any()


def test_every_row_comes_once_before_any_comes_again(
    model: Model, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[5, 6, 7 + row] for row in range(10)]
    own = OwnText.join(prompts, [[9, 10, 11]] * 10, model.arch)
    trainer = DraftTrainer(
        model, initial_drafter(model.parameters, model.arch, 1, CPU), SequenceSource(data, 2), 1,
        DraftObjective(), Speed(),
    )  # fmt: skip
    trainer.take_own(own, held=2)
    seen: list[int] = []

    def looked_at(inputs: DraftInputs, progress: float) -> None:
        seen.extend(inputs.ids[:, model.arch.sliding_window].tolist())

    monkeypatch.setattr(trainer, "_step", looked_at)
    for _ in range(8):
        trainer.own_step(4, 3, 0.5)
    assert len(set(seen[:8])) == 8
    assert sorted(seen) == sorted(seen[:8] * 4)
    assert trainer.held_accepted() is not None
    for held in (10, -1):
        with pytest.raises(ConfigError, match=f"held is {held}; expected 0 to 9"):
            trainer.take_own(own, held=held)
    foreign = own._replace(ids=own.ids + model.arch.vocab_size)
    with pytest.raises(ConfigError, match="let this model write it"):
        trainer.take_own(foreign)


def test_without_a_file_the_target_continues_training_text(model: Model, data: Path) -> None:
    trainer = DraftTrainer(
        model, initial_drafter(model.parameters, model.arch, 1, CPU), SequenceSource(data, 2), 1,
        DraftObjective(), Speed(),
    )  # fmt: skip
    # 96 + 96 tokens and a block are no whole number of tiles.
    trainer.take_own(trainer.write_own(4, 96, 96), held=1)
    assert trainer.own_step(2, 4, 0.5).total.isfinite()
    assert trainer.held_accepted() is not None


def test_rows_of_a_part_may_all_be_short(model: Model, parameters: dict[str, torch.Tensor]) -> None:
    own = OwnText.join([[5, 6], [7, 8, 9]], [[10] * 4, [11] * 30], model.arch)
    states = TargetStates.of(model, own)
    short, both = (
        drafts_along(parameters, model, states.rows(torch.arange(count))) for count in (1, 2)
    )
    assert short[0].shape[1] == both[0].shape[1]
    assert short[0][0].tolist() == both[0][0].tolist()
    assert short[1][0].tolist()[:4] == [3, 2, 1, 0]


def test_weights_of_losses_are_numbers_from_0() -> None:
    with pytest.raises(ConfigError, match=r"distance is -0.5; expected a number from 0"):
        DraftObjective(distance=-0.5)
    with pytest.raises(ConfigError, match="sharp_temperature is 0"):
        DraftObjective(sharp_temperature=0.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a capture works there")  # noqa: TID251
def test_a_step_that_cannot_be_captured_runs_call_by_call(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Result:
        def __init__(self, total: torch.Tensor) -> None:
            self.total = total

    weight = torch.ones(1, requires_grad=True)
    maker = StepMaker(captures=True)
    step = maker.make(lambda inputs: Result(weight * inputs[0]), (torch.tensor([3.0]),), [weight])
    assert isinstance(step, EagerStep)
    assert maker.error
    assert "one call at a time" in capsys.readouterr().err
    step.run((torch.tensor([3.0]),))
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0]
    step.clear()
    assert weight.grad is None
