"""From a checkpoint folder to a backbone on a backend, refusing early and by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deepinfer.device.backend import Backend, labels_of
from deepinfer.device.weights import Parameters
from deepinfer.model.backbone import Backbone
from deepinfer.model.config import V41Config
from deepinfer.model.model_ops import ModelOps
from deepinfer.model.token_map import load_token_map
from deepinfer.model.weights.random_init import random_stored
from deepinfer.model.weights.reader import CheckpointReader

RANDOM_WEIGHTS_MARK = "random_weights"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A backbone and what has to be said about it with every result.

    Attributes:
        config: the model configuration.
        backbone: ready to run.
        marks: labels of the backend, and for example `random_weights`.
    """

    config: V41Config
    backbone: Backbone
    marks: tuple[str, ...]


def load_model(
    checkpoint: Path,
    backend: Backend,
    *,
    max_positions: int | None = None,
    random_seed: int | None = None,
) -> LoadedModel:
    """Load the backbone of a checkpoint folder.

    Args:
        checkpoint: folder with config.json, tokenizer.json and the shards.
        backend: device layer.
        max_positions: longest sequence in tokens; None: the model's own limit.
        random_seed: draw random weights for config.json instead of reading any; the result
            carries a mark. None reads the checkpoint.
    Raises:
        CapabilityError: the backend lacks an op; raised before any weight is read.
        CheckpointError, ConfigError: the folder is not a complete checkpoint.
    """
    marks = labels_of(backend)
    parameters: Parameters
    if random_seed is None:
        reader = CheckpointReader(checkpoint)
        config = reader.config
        ops = ModelOps(backend.ops)
        parameters = reader.parameters()
    else:
        config = V41Config.from_json(checkpoint)
        ops = ModelOps(backend.ops)
        parameters = random_stored(config, random_seed)
        marks = (*marks, RANDOM_WEIGHTS_MARK)
    backbone = Backbone(
        config,
        backend,
        parameters,
        load_token_map(checkpoint, config),
        max_positions=max_positions or config.max_position_embeddings,
        ops=ops,
    )
    return LoadedModel(config, backbone, marks)
