"""Trainable parameters under checkpoint names; routed experts of a layer are stacked.

`layers.L.ffn.experts.w1` [E, I, D] stands for the checkpoint's `layers.L.ffn.experts.E.w1.weight`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepinfer.device.errors import CheckpointError
from deepinfer.device.weights import StoredTensor, WeightFormat
from deepinfer_training.architecture import Architecture

MASTER_SHARD_BYTES = 15 * 2**20


class Part(enum.Enum):
    """What is trained together."""

    BACKBONE = "backbone"
    DRAFTER = "drafter"


def parameter_shapes(arch: Architecture, part: Part) -> dict[str, tuple[int, ...]]:
    """Logical shapes of one part's parameters, in model order."""
    return dict(_backbone(arch) if part is Part.BACKBONE else _drafter(arch))


def _block(
    arch: Architecture, prefix: str, num_experts: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads, width = arch.hidden_size, arch.num_attention_heads, arch.head_dim
    groups, inner = arch.o_groups, arch.moe_intermediate_size
    mix = (2 + arch.hc_mult) * arch.hc_mult
    for sublayer in ("attn", "ffn"):
        yield f"{prefix}{sublayer}_norm.weight", (hidden,)
        yield f"{prefix}hc_{sublayer}_fn", (mix, arch.hc_mult * hidden)
        yield f"{prefix}hc_{sublayer}_base", (mix,)
        yield f"{prefix}hc_{sublayer}_scale", (3,)
    yield f"{prefix}attn.wq_a.weight", (arch.q_lora_rank, hidden)
    yield f"{prefix}attn.q_norm.weight", (arch.q_lora_rank,)
    yield f"{prefix}attn.wq_b.weight", (heads * width, arch.q_lora_rank)
    yield f"{prefix}attn.wkv.weight", (width, hidden)
    yield f"{prefix}attn.kv_norm.weight", (width,)
    yield f"{prefix}attn.wo_a.weight", (groups * arch.o_lora_rank, heads * width // groups)
    yield f"{prefix}attn.wo_b.weight", (hidden, groups * arch.o_lora_rank)
    yield f"{prefix}attn.attn_sink", (heads,)
    yield f"{prefix}ffn.gate.weight", (num_experts, hidden)
    yield f"{prefix}ffn.gate.bias", (num_experts,)
    for name, shape in (("w1", (inner, hidden)), ("w3", (inner, hidden)), ("w2", (hidden, inner))):
        yield f"{prefix}ffn.experts.{name}", (num_experts, *shape)
        yield f"{prefix}ffn.shared_experts.{name}.weight", shape


def _backbone(arch: Architecture) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width = arch.hidden_size, arch.head_dim
    yield "embed.weight", (arch.vocab_size, hidden)
    for layer in range(arch.num_hidden_layers):
        prefix = f"layers.{layer}."
        yield from _block(arch, prefix, arch.n_routed_experts)
        attn = f"{prefix}attn."
        if layer in arch.kv_source_layer_ids:
            yield f"{attn}compressor.wkv.weight", (width, hidden)
            if arch.compress_ratios[layer] > 1:
                yield f"{attn}compressor.wgate.weight", (width, hidden)
            yield f"{attn}compressor.norm.weight", (width,)
            yield f"{attn}indexer.wk.weight", (arch.index_head_dim, width)
            yield f"{attn}indexer.k_norm.weight", (arch.index_head_dim,)
        if layer in arch.index_source_layer_ids:
            out = arch.index_n_heads * arch.index_head_dim
            yield f"{attn}indexer.wq_b.weight", (out, arch.q_lora_rank)
            yield f"{attn}indexer.weights_proj.weight", (arch.index_n_heads, hidden)
        if layer in arch.engram_layer_ids:
            rows = arch.engram_num_embeddings[arch.engram_layer_ids.index(layer)]
            columns = arch.num_hash_columns * arch.engram_head_dim
            yield f"{prefix}engram.embed.weight", (rows, arch.engram_head_dim)
            yield f"{prefix}engram.wkv.weight", ((arch.hc_mult + 1) * hidden, columns)
            yield f"{prefix}engram.q_weight", (arch.hc_mult, hidden)
            yield f"{prefix}engram.k_weight", (arch.hc_mult, hidden)
    yield "norm.weight", (hidden,)
    yield "head.weight", (arch.vocab_size, hidden)


def _drafter(arch: Architecture) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, rank, vocab = arch.hidden_size, arch.dspark_markov_rank, arch.vocab_size
    for stage in range(arch.num_nextn_predict_layers):
        yield from _block(arch, f"mtp.{stage}.", arch.dspark_n_routed_experts)
    yield "mtp.0.main_proj.weight", (hidden, len(arch.dspark_target_layer_ids) * hidden)
    yield "mtp.0.main_norm.weight", (hidden,)
    last = f"mtp.{arch.num_nextn_predict_layers - 1}."
    yield f"{last}norm.weight", (hidden,)
    yield f"{last}markov_head.embed.weight", (vocab, rank)
    yield f"{last}markov_head.head.weight", (vocab, rank)
    yield f"{last}confidence_head.proj.weight", (1, hidden + rank)


_TILE_ENDINGS = (
    "attn.wq_a.weight", "attn.wq_b.weight", "attn.wkv.weight", "attn.wo_a.weight",
    "attn.wo_b.weight", "indexer.wq_b.weight", "shared_experts.w1.weight",
    "shared_experts.w2.weight", "shared_experts.w3.weight", "engram.wkv.weight",
    "main_proj.weight",
)  # fmt: skip


def storage_format(name: str) -> WeightFormat:
    """How the release stores a parameter; tests hold it to the engine's catalogue."""
    if ".experts." in name:
        return WeightFormat.MXFP4
    if name.endswith("engram.embed.weight"):
        return WeightFormat.FP8_ROW32
    if name.endswith(_TILE_ENDINGS):
        return WeightFormat.FP8_TILE32
    if ".hc_" in name or name.endswith(("attn_sink", "gate.bias")):
        return WeightFormat.F32
    return WeightFormat.BF16


def initial_parameters(
    arch: Architecture, part: Part, seed: int, device: torch.device
) -> dict[str, Tensor]:
    """Random fp32 parameters; router biases take no gradient.

    Args:
        arch: the model.
        part: backbone or drafter.
        seed: of the generator.
        device: where they live.
    Source: scales of the training recipe (training/README.md).
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _initial(arch, name, shape, generator).to(device).requires_grad_(_is_trained(name))
        for name, shape in parameter_shapes(arch, part).items()
    }


def _is_trained(name: str) -> bool:
    return not name.endswith("gate.bias")


def _initial(
    arch: Architecture, name: str, shape: tuple[int, ...], generator: torch.Generator
) -> Tensor:
    streams, hidden = arch.hc_mult, arch.hidden_size

    def normal(deviation: float) -> Tensor:
        return torch.randn(shape, generator=generator) * deviation

    if name.endswith(("norm.weight", "q_weight", "k_weight")):
        return torch.ones(shape)
    if name.endswith(("attn_sink", "gate.bias", "markov_head.head.weight", "proj.weight")) and (
        "weights_proj" not in name and "main_proj" not in name
    ):
        # Markov and confidence heads start at zero: step 0 is the parallel drafter.
        return torch.zeros(shape)
    if name.endswith("_base"):
        base = torch.zeros(shape)
        base[:streams] = math.log(1 / (streams - 1)) + 0.5 * torch.randn(
            streams, generator=generator
        )
        base[streams : 2 * streams] = 0.5 * torch.randn(streams, generator=generator)
        base[2 * streams :] = 4.0 * torch.eye(streams).flatten()
        return base
    if name.endswith("_scale"):
        return torch.full(shape, 0.1)
    if name.endswith("_fn"):
        return normal(0.01)
    if name.endswith("main_proj.weight"):
        # The mean of the taps.
        taps = len(arch.dspark_target_layer_ids)
        return torch.eye(hidden).repeat(1, taps) / taps + normal(0.01)
    if name.endswith("engram.wkv.weight"):
        value = normal(shape[1] ** -0.5)
        value[streams * hidden :] *= 0.1
        return value
    if name in ("head.weight",) or name.endswith("gate.weight"):
        return normal(0.02)
    if name == "embed.weight" or name.endswith(("engram.embed.weight", "markov_head.embed.weight")):
        return normal(0.1)
    if name.endswith("weights_proj.weight"):
        return normal(hidden**-0.5)
    if name.endswith(("wo_b.weight", ".w2", "w2.weight")):
        return normal(0.8 * shape[-1] ** -0.5 / math.sqrt(2 * arch.num_hidden_layers))
    return normal(0.8 * shape[-1] ** -0.5)


def checkpoint_tensors(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """fp32 tensors under the checkpoint's names, experts one by one, on the CPU."""
    result: dict[str, Tensor] = {}
    for name, value in parameters.items():
        value = value.detach().float().cpu()
        if ".experts." in name:
            stem, part = name.rsplit(".", 1)
            result |= {f"{stem}.{e}.{part}.weight": matrix for e, matrix in enumerate(value)}
        else:
            result[name] = value
    return result


def save_master(parameters: Mapping[str, Tensor], folder: Path, stem: str) -> list[Path]:
    """Write `STEM-00001-of-0000N.safetensors`, bf16 but for what the release keeps in fp32.

    Args:
        parameters: as trained.
        folder: made if absent; older files of the same stem are removed.
        stem: first part of the file names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, value in checkpoint_tensors(parameters).items():
        fp32 = storage_format(name) is WeightFormat.F32
        tensor = (value if fp32 else value.to(torch.bfloat16)).contiguous()
        size = tensor.numel() * tensor.element_size() + 256
        if shards[-1] and filled + size > MASTER_SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    files = [
        folder / f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors"
        for i in range(1, len(shards) + 1)
    ]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, file)
    for old in folder.glob(f"{stem}-*.safetensors"):
        if old not in files:
            old.unlink()
    return files


def load_master(
    arch: Architecture, part: Part, files: list[Path], device: torch.device
) -> dict[str, Tensor]:
    """Parameters of one part from the files of a master or of a checkpoint in release format.

    Args:
        arch: the model.
        part: other tensors in the files are not used.
        files: safetensors files.
        device: where the parameters live.
    Raises:
        CheckpointError: there are no files, a tensor is missing, or a shape differs.
    """
    if not files:
        raise CheckpointError("no *.safetensors file was given to resume from")
    stored: dict[str, Tensor] = {}
    for file in files:
        stored |= load_file(file)
    parameters: dict[str, Tensor] = {}
    for name, shape in parameter_shapes(arch, part).items():
        if ".experts." in name:
            stem, piece = name.rsplit(".", 1)
            names = [f"{stem}.{e}.{piece}.weight" for e in range(shape[0])]
        else:
            names = [name]
        absent = [each for each in names if each not in stored]
        if absent:
            raise CheckpointError(f"{files[0].parent}: tensor {absent[0]} is missing")
        parts = [_logical(stored, each) for each in names]
        value = torch.stack(parts) if ".experts." in name else parts[0]
        if tuple(value.shape) != shape:
            raise CheckpointError(
                f"{files[0].parent}: tensor {name} has shape {list(value.shape)}, "
                f"the architecture asks for {list(shape)}"
            )
        parameters[name] = value.to(device).requires_grad_(_is_trained(name))
    return parameters


def _logical(stored: Mapping[str, Tensor], name: str) -> Tensor:
    """fp32 value of a plain tensor, or of codes and their scales."""
    data, scale = stored[name], stored.get(name.removesuffix(".weight") + ".scale")
    if scale is None:
        return data.float()
    fmt = WeightFormat.MXFP4 if ".experts." in name else storage_format(name)
    shape = (data.shape[0], data.shape[1] * 2) if fmt is WeightFormat.MXFP4 else tuple(data.shape)
    return StoredTensor(fmt, data, scale.view(torch.uint8), shape).dequantize()
