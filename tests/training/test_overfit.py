"""The trainer learns one sequence by heart, and its indexer follows the attention."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deepinfer_training.architecture import Architecture
from deepinfer_training.indexer import SelectionMode
from deepinfer_training.parameters import Part, initial_parameters
from deepinfer_training.schedule import SCHEDULES, Phase, Recipe
from deepinfer_training.sequences import Batch
from deepinfer_training.speed import Speed
from deepinfer_training.step import StepResult
from deepinfer_training.train import Run, Trainer

CONFIG = Path(__file__).resolve().parents[2] / "training" / "configs" / "smoke.json"
CPU = torch.device("cpu")
VOCAB, LENGTH = 256, 128
SPARSE = Phase(0.0, LENGTH, SelectionMode.SPARSE)
QUANTIZED = Phase(0.0, LENGTH, SelectionMode.SPARSE, quantized=True)


@pytest.fixture(scope="module")
def arch() -> Architecture:
    """Three layers: window only, ratio 2 with Engram, ratio 1 with candidate blocks."""
    fields = Architecture.from_json(CONFIG).to_fields()
    return Architecture.from_fields(
        fields
        | {
            "vocab_size": VOCAB,
            "engram_compressed_vocab_size": VOCAB,
            "num_hidden_layers": 3,
            "compress_ratios": [0, 2, 1, 0],
            "kv_source_layer_ids": [1, 2],
            "index_source_layer_ids": [1, 2],
            "index_topk": 16,
            "candidate_source_layer_id": 2,
            "candidate_topk_blocks": 4,
            "engram_layer_ids": [1],
            "engram_num_embeddings": [1588],
            "num_nextn_predict_layers": 1,
            "dspark_target_layer_ids": [1, 2],
            "dspark_noise_token_id": VOCAB - 1,
        }
    )


def random_ids(seed: int) -> NDArray[np.uint16]:
    """Noise: nothing but memory can predict it."""
    return np.random.default_rng(seed).integers(3, VOCAB, (1, LENGTH)).astype(np.uint16)


def batch_of(ids: NDArray[np.uint16]) -> Batch:
    zeros = np.zeros(ids.shape, np.uint8)
    return Batch(ids, zeros, np.ones(ids.shape, np.float16), np.zeros(len(ids), np.uint8))


def trainer_of(arch: Architecture) -> Trainer:
    run = Run(arch, SCHEDULES[Recipe.SCRATCH], 1.0, LENGTH, 1, Speed(), base_rate=5e-3)
    parameters = initial_parameters(arch, Part.BACKBONE, 1, CPU)
    return Trainer(run, parameters, torch.arange(VOCAB), CPU)


def test_one_sequence_is_learnt_by_heart_and_survives_quantisation(arch: Architecture) -> None:
    trainer, batch = trainer_of(arch), batch_of(random_ids(0))
    results: list[StepResult] = []
    for step in range(60):
        results.append(trainer.step(batch, QUANTIZED if step >= 45 else SPARSE, 0.3)[0])
    losses = [float(result.loss) for result in results]
    # At first it knows nothing; noise leaves log(253) = 5.53 nats to whoever has not seen it.
    assert abs(losses[0] - math.log(VOCAB)) < 0.2
    assert losses[44] < 0.05
    assert max(losses[50:]) < 0.05
    # The indexer learns from its own loss only.
    assert float(results[-1].index_loss) < 0.5 * float(results[0].index_loss)
    assert float(results[-1].caught.mean()) > float(results[0].caught.mean()) + 0.05
    assert trainer.num_skipped == 0
    # What was learnt is the sequence, not the noise's distribution.
    other = trainer.step(batch_of(random_ids(1)), SPARSE, 0.3)[0]
    assert float(other.loss) > math.log(VOCAB)


def test_every_trained_parameter_moves(arch: Architecture) -> None:
    trainer = trainer_of(arch)
    before = {name: value.detach().clone() for name, value in trainer.parameters.items()}
    for step in range(3):
        trainer.step(batch_of(random_ids(step)), SPARSE, 0.3)
    still = {n for n, value in trainer.parameters.items() if torch.equal(value, before[n])}
    assert still == set()


def test_gradient_outliers_are_skipped_and_counted(arch: Architecture) -> None:
    trainer, batch = trainer_of(arch), batch_of(random_ids(0))
    trainer.step(batch, SPARSE, 0.3)
    with torch.no_grad():
        trainer.parameters["head.weight"].fill_(math.nan)
    kept = trainer.parameters["embed.weight"].detach().clone()
    trainer.step(batch, SPARSE, 0.3)
    assert trainer.num_skipped == 1
    assert torch.equal(trainer.parameters["embed.weight"], kept)
