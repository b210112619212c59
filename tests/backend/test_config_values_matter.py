"""Every number of the configuration reaches the arithmetic: another value, other logits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.registry import load_backend
from deepinfer.device.weights import Parameters
from deepinfer.model.backbone import Backbone
from deepinfer.model.config import V41Config
from deepinfer.model.loading import LoadedModel
from deepinfer.model.token_map import load_token_map
from deepinfer.model.trace_run import trace_tokens
from deepinfer.model.weights.reader import CheckpointReader

FOLDER = Path(__file__).parents[1] / "data/golden/tiny_b"


class Setting(NamedTuple):
    backend: Backend
    config: V41Config
    parameters: Parameters
    token_map: Tensor
    ids: list[int]

    def logits(self, config: V41Config) -> Tensor:
        backbone = Backbone(
            config, self.backend, self.parameters, self.token_map, max_positions=256
        )
        return trace_tokens(LoadedModel(config, backbone, ()), self.backend, self.ids)["logits"]


@pytest.fixture(scope="module")
def setting() -> Iterator[Setting]:
    backend = load_backend(BackendConfig("reference", Numerics.EXACT, {"runtime": "inline"}))
    reader = CheckpointReader(FOLDER / "checkpoint")
    ids = json.loads((FOLDER / "cases.json").read_text())["cases"][-1]["prompt_ids"]
    token_map = load_token_map(FOLDER / "checkpoint", reader.config)
    yield Setting(backend, reader.config, reader.parameters(), token_map, ids)
    backend.close()


@pytest.fixture(scope="module")
def usual(setting: Setting) -> Tensor:
    return setting.logits(setting.config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rms_norm_eps", 0.5),
        ("hc_eps", 0.1),
        ("hc_sinkhorn_iters", 1),
        ("routed_scaling_factor", 1.0),
        ("swiglu_limit", 0.25),
        ("rope_theta", 500.0),
        ("compress_rope_theta", 500.0),
        ("sliding_window", 8),
        ("index_topk", 4),
        ("candidate_topk_blocks", 2),
        ("candidate_block_size", 4),
        ("candidate_source_layer_id", -1),
        ("num_experts_per_tok", 1),
        ("engram_pad_token_id", 3),
        ("engram_layer_ids", ()),
    ],
)
def test_another_value_gives_other_logits(
    setting: Setting, usual: Tensor, field: str, value: object
) -> None:
    changed = setting.config.model_copy(update={field: value})
    assert not torch.allclose(setting.logits(changed), usual, rtol=0, atol=1e-4), field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("factor", 2.0),
        ("beta_fast", 0.5),
        ("beta_slow", 0.1),
        ("original_max_position_embeddings", 512),
    ],
)
def test_another_yarn_value_gives_other_logits(
    setting: Setting, usual: Tensor, field: str, value: float
) -> None:
    assert setting.config.rope_scaling is not None
    scaling = setting.config.rope_scaling.model_copy(update={field: value})
    changed = setting.config.model_copy(update={"rope_scaling": scaling})
    assert not torch.allclose(setting.logits(changed), usual, rtol=0, atol=1e-4), field
