"""From a checkpoint folder to a backbone on a backend, refusing early and by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deepinfer.device.backend import Backend, labels_of
from deepinfer.device.errors import ConfigError
from deepinfer.device.runtime import run_on
from deepinfer.device.weights import Parameters
from deepinfer.model.backbone import Backbone
from deepinfer.model.config import V41Config
from deepinfer.model.controls import Controls
from deepinfer.model.draft_ops import DraftOps
from deepinfer.model.draft_taps import DraftTaps
from deepinfer.model.drafter import Drafter
from deepinfer.model.model_ops import ModelOps
from deepinfer.model.token_map import load_token_map
from deepinfer.model.weights.random_init import random_stored
from deepinfer.model.weights.reader import CheckpointReader
from deepinfer.model.weights.tensor_spec import BACKBONE_GROUPS, TensorGroup

RANDOM_WEIGHTS_MARK = "random_weights"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A backbone and what has to be said about it with every result.

    Attributes:
        config: the model configuration.
        backbone: ready to run.
        marks: labels of the backend, and for example `random_weights`.
        drafter: beside the backbone when it was asked for.
    """

    config: V41Config
    backbone: Backbone
    marks: tuple[str, ...]
    drafter: Drafter | None = None


def load_model(
    checkpoint: Path,
    backend: Backend,
    *,
    max_positions: int | None = None,
    random_seed: int | None = None,
    with_drafter: bool | None = False,
    controls: Controls | None = None,
) -> LoadedModel:
    """Load the backbone of a checkpoint folder, and its drafter on request.

    Args:
        checkpoint: folder with config.json, tokenizer.json and the shards.
        backend: device layer.
        max_positions: longest sequence in tokens; None: the model's own limit.
        random_seed: draw random weights for config.json instead of reading any; the result
            carries a mark. None reads the checkpoint.
        with_drafter: load the drafter too, and let the backbone capture its taps; None: if the
            checkpoint has one.
        controls: parts to put out of action, which marks the result; None: none.
    Raises:
        CapabilityError: the backend lacks an op; raised before any weight is read.
        CheckpointError, ConfigError: the folder is not a complete checkpoint, or has no drafter.
    """
    reader = CheckpointReader(checkpoint) if random_seed is None else None
    config = V41Config.from_json(checkpoint) if reader is None else reader.config
    if with_drafter is None:
        with_drafter = config.num_nextn_predict_layers > 0
    if with_drafter and not config.num_nextn_predict_layers:
        raise ConfigError(
            f"checkpoint {checkpoint} has no drafter (num_nextn_predict_layers 0); run it without "
            "speculation"
        )
    controls = controls or Controls()
    ops = ModelOps(backend.ops)
    draft_ops = DraftOps(backend.ops) if with_drafter else None
    groups = BACKBONE_GROUPS | ({TensorGroup.DSPARK} if with_drafter else set())
    parameters: Parameters
    marks = labels_of(backend)
    if reader is not None:
        parameters = reader.parameters(groups=groups)
    else:
        assert random_seed is not None  # without a reader
        parameters = random_stored(config, random_seed, groups=groups)
        marks = (*marks, RANDOM_WEIGHTS_MARK)
    token_map = load_token_map(checkpoint, config)
    longest = max_positions or config.max_position_embeddings

    def build() -> tuple[Backbone, Drafter | None]:
        backbone = Backbone(
            config,
            backend,
            parameters,
            token_map,
            max_positions=longest,
            ops=ops,
            taps=None if draft_ops is None else DraftTaps(config, draft_ops),
            controls=controls,
        )
        if draft_ops is None:
            return backbone, None
        return backbone, Drafter(backbone, parameters, draft_ops, max_positions=longest)

    backbone, drafter = run_on(backend.runtime.compute_stream, build)
    return LoadedModel(config, backbone, marks + controls.marks, drafter)
