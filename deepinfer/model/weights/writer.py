"""Writing checkpoints in the released layout, for any configuration small enough to hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from deepinfer.device.errors import CheckpointError
from deepinfer.device.weights import Parameters, StoredTensor, WeightFormat, stored_from_float
from deepinfer.model.config import ExpertDtype, QuantizationConfig, V41Config
from deepinfer.model.config_source import CONFIG_FILE
from deepinfer.model.weights.names import expected_tensors
from deepinfer.model.weights.safetensors_file import dtype_bytes, encode_header
from deepinfer.model.weights.shard_index import INDEX_FILE
from deepinfer.model.weights.tensor_spec import DiskDtype, TensorSpec

DEFAULT_SHARD_BYTES = 15 * 2**20

_Piece = tuple[str, str, torch.Tensor]


def release_quantization(expert_dtype: ExpertDtype = ExpertDtype.FP4) -> QuantizationConfig:
    """Return the released storage scheme.

    Args:
        expert_dtype: storage of the routed experts.
    """
    return QuantizationConfig(
        weight_block_size=(32, 32), scale_fmt="ue8m0", expert_dtype=expert_dtype
    )


def storage_config(config: V41Config, *, quantize: bool) -> V41Config:
    """Return `config` with the storage scheme that a written checkpoint states.

    Args:
        config: the model configuration.
        quantize: keep its quantization_config (the released one if it has none), or drop it.
    Raises:
        ConfigError: a width does not fit quantised storage.
    """
    scheme = (config.quantization_config or release_quantization()) if quantize else None
    fields = {name: getattr(config, name) for name in type(config).model_fields}
    return V41Config(**{**fields, "quantization_config": scheme, "unused_keys": ()})


def quantise(config: V41Config, logical: Mapping[str, torch.Tensor]) -> dict[str, StoredTensor]:
    """Return logical tensors in the storage formats that `config` states, in model order.

    Args:
        config: the model configuration, storage scheme included.
        logical: float tensors by checkpoint name, logical shapes.
    Raises:
        CheckpointError: a name is missing or unknown, a shape differs, or a value is not finite.
    """
    specs = expected_tensors(config)
    _check_names(specs, logical)
    stored: dict[str, StoredTensor] = {}
    for name, spec in specs.items():
        if name not in logical:
            continue
        value = logical[name].detach()
        if tuple(value.shape) != spec.shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(value.shape)}, expected {list(spec.shape)}"
            )
        if not torch.isfinite(value).all():
            raise CheckpointError(f"tensor {name} holds NaN or infinite values; nothing is written")
        stored[name] = stored_from_float(value, spec.format)
    return stored


def write_checkpoint(
    path: Path,
    config: V41Config,
    logical: Mapping[str, torch.Tensor],
    *,
    quantize: bool = True,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> V41Config:
    """Write a checkpoint folder and return the configuration it states.

    Args:
        path: folder, made if absent; must not hold a checkpoint yet.
        config: the model configuration.
        logical: float tensors by checkpoint name, logical shapes; all that `config` demands.
        quantize: released storage (FP8 tiles, packed FP4 experts), or bf16 throughout.
        max_shard_bytes: data bytes after which a new shard begins.
    Raises:
        CheckpointError: tensors do not fit the configuration, or the folder is in use.
        ConfigError: a width does not fit quantised storage.
    """
    config = storage_config(config, quantize=quantize)
    write_stored(path, config, quantise(config, logical), max_shard_bytes=max_shard_bytes)
    return config


def write_stored(
    path: Path,
    config: V41Config,
    parameters: Parameters,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write tensors that already are in their storage formats.

    Args:
        path: folder, made if absent; must not hold a checkpoint yet.
        config: the model configuration, storage scheme included.
        parameters: all tensors that `config` demands, by checkpoint name.
        max_shard_bytes: data bytes after which a new shard begins.
    Raises:
        CheckpointError: tensors do not fit the configuration, or the folder is in use.
    """
    specs = expected_tensors(config)
    _check_names(specs, parameters)
    if (path / CONFIG_FILE).exists() or (path / INDEX_FILE).exists():
        raise CheckpointError(f"{path} already holds a checkpoint; remove it or write elsewhere")
    path.mkdir(parents=True, exist_ok=True)
    shards = _shards(specs, parameters, max_shard_bytes)
    weight_map: dict[str, str] = {}
    total = 0
    for number, pieces in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        total += _write_shard(path / file, pieces)
        weight_map |= {name: file for name, _, _ in pieces}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(path / INDEX_FILE, index)
    # Last: a folder without it is no checkpoint, so an interrupted write is never loaded.
    _write_json(path / CONFIG_FILE, config.to_json())


def _check_names(specs: Mapping[str, TensorSpec], given: Mapping[str, object]) -> None:
    missing = [name for name, spec in specs.items() if spec.required and name not in given]
    unknown = [name for name in given if name not in specs]
    if missing or unknown:
        raise CheckpointError(
            f"tensors do not fit the configuration: {len(missing)} missing {missing[:10]}, "
            f"{len(unknown)} unknown {unknown[:10]}"
        )


def _shards(
    specs: Mapping[str, TensorSpec], parameters: Parameters, max_shard_bytes: int
) -> list[list[_Piece]]:
    """Return the pieces of each file; a tensor and its scale stay together."""
    shards: list[list[_Piece]] = [[]]
    filled = 0
    for name, spec in specs.items():
        if name not in parameters:
            continue
        pieces = _pieces(spec, parameters[name])
        size = sum(tensor.numel() * dtype_bytes(dtype) for _, dtype, tensor in pieces)
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].extend(pieces)
        filled += size
    return shards


def _pieces(spec: TensorSpec, stored: StoredTensor) -> list[_Piece]:
    fits = stored.format is spec.format or (spec.accepts_f32 and stored.format is WeightFormat.F32)
    if not fits or stored.shape != spec.shape:
        raise CheckpointError(
            f"tensor {spec.name} is {stored.format.value} {list(stored.shape)}, the configuration "
            f"states {spec.format.value} {list(spec.shape)}"
        )
    dtype = DiskDtype.F32 if stored.format is WeightFormat.F32 else spec.disk_dtype
    pieces: list[_Piece] = [(spec.name, dtype.value, stored.data)]
    if spec.scale_name is not None and stored.scale is not None:
        pieces.append((spec.scale_name, DiskDtype.E8M0.value, stored.scale))
    return pieces


def _write_shard(file: Path, pieces: list[_Piece]) -> int:
    """Write one file and return its data bytes; wide elements first keeps all aligned."""
    pieces = sorted(pieces, key=lambda piece: (-dtype_bytes(piece[1]), piece[0]))
    with file.open("wb") as stream:
        stream.write(
            encode_header([(name, dtype, tuple(data.shape)) for name, dtype, data in pieces])
        )
        start = stream.tell()
        for _, _, data in pieces:
            raw = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            stream.write(raw.numpy().tobytes())
        return stream.tell() - start


def _write_json(file: Path, content: Mapping[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
