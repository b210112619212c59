"""How long a sequence may get, and how many KV blocks the engine takes."""

from __future__ import annotations

import logging

from deepinfer.cache.block_pool import blocks_for
from deepinfer.config import EngineConfig
from deepinfer.device.backend import Backend
from deepinfer.device.errors import ConfigError
from deepinfer.model.caches import cache_block_bytes
from deepinfer.model.config import V41Config

_log = logging.getLogger(__name__)
# Half of what is free is left for activations, the host process and its neighbours.
_SHARE_OF_FREE = 0.5


def longest_sequence(config: EngineConfig, model: V41Config) -> int:
    """Most tokens of a sequence, prompt and answer together."""
    limit = model.max_position_embeddings
    return min(config.max_model_len or limit, limit)


def num_kv_blocks(config: EngineConfig, model: V41Config, backend: Backend) -> int:
    """Blocks of the pool: as configured, else what all sequences can use and memory holds.

    Raises:
        ConfigError: the memory given holds no block.
    """
    size = config.cache.block_size
    if config.cache.num_blocks is not None:
        return config.cache.num_blocks
    useful = config.scheduler.max_num_seqs * blocks_for(longest_sequence(config, model), size)
    block_bytes = cache_block_bytes(model, size, backend)
    if block_bytes == 0:
        return useful  # no layer keeps compressed rows
    memory = config.cache.memory_bytes
    if memory is None:
        memory = int(backend.runtime.memory().free_bytes * _SHARE_OF_FREE)
    num_blocks = min(useful, memory // block_bytes)
    if num_blocks == 0:
        raise ConfigError(
            f"cache.memory of {memory} bytes holds no block of {block_bytes} bytes "
            f"(cache.block_size {size}); give it more"
        )
    _log.info(
        "KV cache: %d blocks of %d tokens, %.1f MiB", num_blocks, size,
        num_blocks * block_bytes / 2**20,
    )  # fmt: skip
    return num_blocks
