"""What the content of a cached block depends on, apart from its tokens."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

from deepinfer.config import EngineConfig

# Enough to tell two trainings of one model apart, and quick to read.
_TAIL_BYTES = 1 << 16


def cache_identity(config: EngineConfig) -> dict[str, str | int]:
    """Everything that has to agree before one engine may use the blocks of another.

    Args:
        config: resolved configuration; its checkpoint folder is read.
    """
    checkpoint = config.checkpoint
    directory = checkpoint.directory
    weights = f"random {checkpoint.seed}" if checkpoint.random_weights else _weights(directory)
    return {
        "model": _digest(directory / "config.json"),
        "weights": weights,
        "tokenizer": _digest(directory / "tokenizer.json"),
        "controls": repr(config.measurement),
        "backend": config.backend.name,
        "numerics": config.numerics.value,
        "block_size": config.cache.block_size,
    }


def _digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()


def _weights(directory: Path) -> str:
    """A digest of every shard's name, size, header and last bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for shard in sorted(directory.glob("*.safetensors")):
        num_bytes = shard.stat().st_size
        digest.update(f"{shard.name} {num_bytes} ".encode())
        with shard.open("rb") as file:
            prefix = file.read(8)
            digest.update(file.read(struct.unpack("<Q", prefix)[0]))
            file.seek(max(0, num_bytes - _TAIL_BYTES))
            digest.update(file.read())
    return digest.hexdigest()
