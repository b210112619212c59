"""Some layers of V4.1-Flash at their published widths, with random weights.

The whole model does not fit onto one device. What a layer costs does not depend on the layers
around it, so a few of them show the ratio of encoder to decoder work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepinfer.config.presets import load_model_preset
from deepinfer.device.backend import Backend, labels_of
from deepinfer.device.errors import ConfigError
from deepinfer.device.runtime import run_on
from deepinfer.model.backbone import Backbone
from deepinfer.model.config import V41Config
from deepinfer.model.loading import RANDOM_WEIGHTS_MARK, LoadedModel
from deepinfer.model.model_ops import ModelOps
from deepinfer.model.weights.random_init import LazyRandom

DEFAULT_LAYERS = (2, 3, 20, 21)
"""A source of ratio 2 and a layer that reuses its selection, and the same of ratio 1."""


def flash_layers(layers: Sequence[int], *, num_experts: int | None = None) -> V41Config:
    """Configuration of a model of some of Flash's layers, without Engram, drafter and vision.

    Args:
        layers: layer ids of Flash, ascending, each with the sources that it reads.
        num_experts: routed experts of a layer; None: as published. The work of a row does not
            depend on it, the weights that few rows read do.
    Raises:
        ConfigError: a layer does not exist, or its source is not among them.
    """
    whole = V41Config.from_json(load_model_preset("v41_flash"))
    if sorted(set(layers)) != list(layers) or not all(
        0 <= layer < whole.num_hidden_layers for layer in layers
    ):
        raise ConfigError(
            f"layers are {list(layers)}; expected ascending ids from 0 to "
            f"{whole.num_hidden_layers - 1}"
        )
    for layer in layers:
        for source in (whole.kv_source(layer), whole.index_source(layer)):
            if source is not None and source not in layers:
                raise ConfigError(
                    f"layer {layer} reads what layer {source} wrote; add {source} to the layers"
                )
    place = {layer: index for index, layer in enumerate(layers)}

    def kept(ids: Sequence[int]) -> list[int]:
        return [place[layer] for layer in ids if layer in place]

    raw: dict[str, Any] = whole.to_json()
    raw.pop("vision_config", None)
    raw["text_config"] = raw["text_config"] | {
        "num_hidden_layers": len(layers),
        "compress_ratios": [whole.ratio(layer) for layer in layers],
        "kv_source_layer_ids": kept(whole.kv_source_layer_ids),
        "index_source_layer_ids": kept(whole.index_source_layer_ids),
        "candidate_source_layer_id": place.get(whole.candidate_source_layer_id, -1),
        "n_routed_experts": num_experts or whole.n_routed_experts,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": [],
    }
    return V41Config.from_json(raw)


def load_flash_layers(config: V41Config, backend: Backend, *, max_positions: int) -> LoadedModel:
    """Draw and pack the weights on the backend's device, in the published formats.

    Raises:
        CapabilityError: the backend lacks an op.
    """
    device = backend.runtime.device
    backbone = run_on(
        backend.runtime.compute_stream,
        lambda: Backbone(
            config,
            backend,
            LazyRandom(config, 0, device),
            torch.zeros(config.vocab_size, dtype=torch.int32),
            max_positions=max_positions,
            ops=ModelOps(backend.ops),
        ),
    )
    return LoadedModel(config, backbone, (*labels_of(backend), RANDOM_WEIGHTS_MARK))
