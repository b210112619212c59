"""What the confidence head reads is what the checkpoint says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer.device.errors import ConfigError
from deepinfer_training import drafter
from deepinfer_training.architecture import Architecture
from deepinfer_training.fake_quant import FULL_PRECISION
from deepinfer_training.parameters import Part, initial_parameters

CONFIGS = Path(__file__).resolve().parents[2] / "training" / "configs"


@pytest.mark.parametrize("side", ["pre_norm", "post_norm"])
def test_the_confidence_reads_rows_on_the_side_that_the_config_names(side: str) -> None:
    fields = Architecture.from_json(CONFIGS / "smoke.json").to_fields()
    arch = Architecture.from_fields(fields | {"confidence_head_input": side})
    parameters = initial_parameters(arch, Part.DRAFTER, 1, torch.device("cpu"))
    hidden, rows = torch.randn(3, arch.hidden_size), torch.randn(3, arch.dspark_markov_rank)
    small, large = (
        drafter.confidence_features(parameters, arch, hidden * factor, rows, FULL_PRECISION)
        for factor in (1.0, 8.0)
    )
    assert torch.equal(small[:, -arch.dspark_markov_rank :], rows)
    # A norm takes the scale away.
    assert torch.allclose(small, large, atol=1e-5) == (side == "post_norm")
    with pytest.raises(ConfigError, match="confidence_head_input is 'normed'"):
        Architecture.from_fields(fields | {"confidence_head_input": "normed"})
