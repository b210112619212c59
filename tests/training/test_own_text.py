"""The target's own answers as training data: rows, their borders, and a step on them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deepinfer.device.errors import ConfigError
from deepinfer_training import fake_quant
from deepinfer_training.architecture import Architecture
from deepinfer_training.drafter import DraftObjective, initial_drafter
from deepinfer_training.evaluation import Model
from deepinfer_training.own_text import OwnText
from deepinfer_training.parameters import Part, initial_parameters
from deepinfer_training.sequence_plan import Planner
from deepinfer_training.sequences import SequenceSource
from deepinfer_training.speed import Speed
from deepinfer_training.train_drafter import DraftTrainer

CONFIG = Path(__file__).resolve().parents[2] / "training" / "configs" / "smoke.json"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def arch() -> Architecture:
    return Architecture.from_json(CONFIG)


@pytest.fixture(scope="module")
def own(arch: Architecture) -> OwnText:
    asked = [[5] * 40, [6] * 3, [7] * 10, [8] * 90]
    return OwnText.join(asked, [[9, 10, 11], [12] * 20, [13], [14] * 5], arch)


def test_rows_are_sorted_and_keep_prompt_and_answer_apart(own: OwnText, arch: Architecture) -> None:
    # The answer of one token is left out: it has nothing to draft.
    assert own.starts.tolist() == [3, 40, 90]
    assert own.stops.tolist() == [23, 43, 95]
    assert own.ids[1, 39:44].tolist() == [5, 9, 10, 11, arch.pad_token_id]
    assert own.ids.shape[1] % (2 * arch.sliding_window) == 0
    assert own.ids.shape[1] >= 95 + arch.dspark_block_size


def test_a_part_is_cut_behind_its_longest_row(own: OwnText, arch: Architecture) -> None:
    part = own.part(0, 2, arch)
    assert 43 + arch.dspark_block_size <= part.ids.shape[1] < own.ids.shape[1]
    assert part.documents()[0].tolist() == [0] * 23 + [1] * (part.ids.shape[1] - 23)


def test_a_file_gives_the_same_rows_back(own: OwnText, tmp_path: Path) -> None:
    own.save(tmp_path / "own.safetensors")
    again = OwnText.load([tmp_path / "own.safetensors"])
    assert all(torch.equal(left, right) for left, right in zip(own, again, strict=True))
    both = OwnText.load([tmp_path / "own.safetensors"] * 2)
    assert both.stops.tolist() == sorted([*own.stops.tolist()] * 2)
    save_file({"ids": own.ids}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match=r"has no tensors \['starts', 'stops'\]"):
        OwnText.load([tmp_path / "other.safetensors"])
    (tmp_path / "text.safetensors").write_text("once upon a time, there was no header")
    with pytest.raises(ConfigError, match="is no safetensors file"):
        OwnText.load([tmp_path / "text.safetensors"])
    with pytest.raises(ConfigError, match="own_text writes it"):
        OwnText.load([tmp_path / "none.safetensors"])


def test_a_step_drafts_inside_the_answers(own: OwnText, arch: Architecture, data: Path) -> None:
    parameters = {n: v.detach() for n, v in initial_parameters(arch, Part.BACKBONE, 1, CPU).items()}
    planner = Planner(arch, torch.zeros(arch.vocab_size, dtype=torch.int64), CPU)
    target = Model(parameters, arch, planner, fake_quant.TRAINING, CPU)
    trainer = DraftTrainer(
        target,
        initial_drafter(parameters, arch, 1, CPU),
        SequenceSource(data, 2),
        1,
        DraftObjective(),
        Speed(),
    )
    trainer.take_own(own)
    first = trainer.own_step(2, 8, 0.1)
    for _ in range(3):
        last = trainer.own_step(2, 8, 0.1)
    assert last.total.isfinite()
    assert last.total < first.total
