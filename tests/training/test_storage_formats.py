"""Parameters, storage formats and files agree with the engine's catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepinfer.device.errors import CheckpointError, ConfigError
from deepinfer.device.weights import WeightFormat, stored_from_float
from deepinfer.model.weights.names import expected_tensors
from deepinfer.model.weights.tensor_spec import TensorSpec
from deepinfer.model.weights.writer import storage_config
from deepinfer_training import fake_quant
from deepinfer_training.architecture import Architecture
from deepinfer_training.export import release_config
from deepinfer_training.parameters import (
    MASTER_SHARD_BYTES,
    Part,
    checkpoint_tensors,
    initial_parameters,
    load_master,
    parameter_shapes,
    save_master,
    storage_format,
)
from deepinfer_training.weights import rounded_parameters

CONFIGS = Path(__file__).resolve().parents[2] / "training" / "configs"
CPU = torch.device("cpu")


@pytest.fixture(params=["tiny-v41", "smoke"])
def arch(request: pytest.FixtureRequest) -> Architecture:
    return Architecture.from_json(CONFIGS / f"{request.param}.json")


def catalogue(arch: Architecture, *, with_drafter: bool) -> dict[str, TensorSpec]:
    """What a released checkpoint of `arch` must hold."""
    config = storage_config(release_config(arch, with_drafter=with_drafter), quantize=True)
    return {name: spec for name, spec in expected_tensors(config).items() if spec.required}


def test_names_shapes_and_formats_are_those_of_the_catalogue(arch: Architecture) -> None:
    parameters = {
        name: torch.empty(shape, device="meta")
        for part in Part
        for name, shape in parameter_shapes(arch, part).items()
    }
    found: dict[str, tuple[tuple[int, ...], WeightFormat]] = {}
    for name, value in parameters.items():
        fmt = storage_format(name)
        if ".experts." in name:
            stem, piece = name.rsplit(".", 1)
            for expert in range(value.shape[0]):
                found[f"{stem}.{expert}.{piece}.weight"] = (tuple(value.shape[1:]), fmt)
        else:
            found[name] = (tuple(value.shape), fmt)
    specs = catalogue(arch, with_drafter=True)
    assert found == {name: (spec.shape, spec.format) for name, spec in specs.items()}


def test_a_backbone_alone_is_the_catalogue_without_drafter() -> None:
    arch = Architecture.from_json(CONFIGS / "smoke.json")
    values = initial_parameters(arch, Part.BACKBONE, 1, CPU)
    assert checkpoint_tensors(values).keys() == catalogue(arch, with_drafter=False).keys()


@pytest.mark.parametrize(
    "fmt", [WeightFormat.BF16, WeightFormat.FP8_TILE32, WeightFormat.FP8_ROW32, WeightFormat.MXFP4]
)
def test_rounding_is_the_trip_through_storage_and_gradients_pass(fmt: WeightFormat) -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(3)) * 0.05
    weight.requires_grad_(True)
    rounded = fake_quant.round_weight(weight, fmt)
    assert torch.equal(rounded, stored_from_float(weight.detach(), fmt).dequantize().float())
    assert not torch.equal(rounded, weight)
    rounded.backward(torch.full_like(rounded, 2.0))
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full_like(weight, 2.0))


def test_a_master_reads_back_as_it_was_rounded_to_bf16(tmp_path: Path) -> None:
    arch = Architecture.from_json(CONFIGS / "smoke.json")
    parameters = initial_parameters(arch, Part.DRAFTER, 1, CPU)
    files = save_master(parameters, tmp_path, "drafter")
    assert all(file.stat().st_size < MASTER_SHARD_BYTES + 2**20 for file in files)
    again = load_master(arch, Part.DRAFTER, files, CPU)
    assert again.keys() == parameters.keys()
    for name, value in again.items():
        kept = parameters[name].detach()
        if storage_format(name) is not WeightFormat.F32:
            kept = kept.to(torch.bfloat16).float()
        assert torch.equal(value, kept), name
        assert value.requires_grad == (not name.endswith("gate.bias"))


def test_a_master_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    arch = Architecture.from_json(CONFIGS / "smoke.json")
    files = save_master(initial_parameters(arch, Part.DRAFTER, 1, CPU), tmp_path, "drafter")
    with pytest.raises(CheckpointError, match=r"embed\.weight is missing"):
        load_master(arch, Part.BACKBONE, files, CPU)
    wider = Architecture.from_fields(arch.to_fields() | {"dspark_markov_rank": 32})
    with pytest.raises(CheckpointError, match=r"markov_head\.embed\.weight has shape \[4096, 16\]"):
        load_master(wider, Part.DRAFTER, files, CPU)
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file was given"):
        load_master(arch, Part.DRAFTER, [], CPU)


def test_an_older_master_of_the_same_stem_does_not_stay(tmp_path: Path) -> None:
    arch = Architecture.from_json(CONFIGS / "smoke.json")
    parameters = initial_parameters(arch, Part.DRAFTER, 1, CPU)
    stale = tmp_path / "drafter-00007-of-00009.safetensors"
    stale.write_bytes(b"stale")
    files = save_master(parameters, tmp_path, "drafter")
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert sum(len(load_file(file)) for file in files) == len(checkpoint_tensors(parameters))


def test_the_bundled_checkpoint_is_where_its_rounding_comes_to_rest() -> None:
    arch = Architecture.from_json(CONFIGS / "tiny-v41.json")
    files = sorted((CONFIGS.parents[1] / "checkpoints" / "tiny-v41").glob("*.safetensors"))
    for part in Part:
        stored = load_master(arch, part, files, CPU)
        for name, value in rounded_parameters(stored).items():
            assert torch.equal(value, stored[name].detach()), name


def test_architectures_state_every_field_and_no_other() -> None:
    fields = Architecture.from_json(CONFIGS / "smoke.json").to_fields()
    with pytest.raises(ConfigError, match=r"missing: \[\], unknown: \['hidden'\]"):
        Architecture.from_fields(fields | {"hidden": 1})
    del fields["hc_eps"]
    with pytest.raises(ConfigError, match=r"missing: \['hc_eps'\]"):
        Architecture.from_fields(fields)
