"""Constants of the Engram n-gram hash: multipliers, primes and row offsets.

All of them follow from the configuration; a wrong one silently reads other table rows, so nothing
here is rounded, cached on disk or taken from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from deepinfer.device.errors import CheckpointError

if TYPE_CHECKING:
    from deepinfer.model.config import V41Config

_SEED_PER_LAYER = 10007
_INT64_MAX = 2**63 - 1
# These witnesses decide primality for every n below 3.3e24, so for every int64.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


@dataclass(frozen=True, slots=True)
class EngramHashConstants:
    """What the hash op needs beside the token map.

    Attributes:
        multipliers: [num_engram_layers, max_ngram] int64, odd; column s: token s back.
        primes: [num_engram_layers, max_ngram - 1, num_heads] int64, moduli in (order, head) order.
        offsets: same shape int64; first table row of each hash column.
        pad_id: compressed id used for tokens before the start of the sequence and dead ones.
    """

    multipliers: torch.Tensor
    primes: torch.Tensor
    offsets: torch.Tensor
    pad_id: int

    @property
    def num_columns(self) -> int:
        """Hash columns of one layer: (max_ngram - 1) * num_heads."""
        return int(self.primes.shape[1] * self.primes.shape[2])


def is_prime(value: int) -> bool:
    """Return whether `value` is prime; exact for every int64.

    Source: Miller-Rabin with the fixed witness set that is proven up to 3.3e24.
    """
    if value < 2:
        return False
    for witness in _WITNESSES:
        if value % witness == 0:
            return value == witness
    odd, twos = value - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(value, witness, odd, twos) for witness in _WITNESSES)


def _passes(value: int, witness: int, odd: int, twos: int) -> bool:
    power = pow(witness, odd, value)
    if power in (1, value - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % value
        if power == value - 1:
            return True
    return False


def engram_primes(
    num_layers: int, max_ngram: int, *, num_heads: int, start: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return the moduli as [layer][order - 2][head].

    Each order searches upwards from `start`; a prime handed out once is never handed out again, in
    any layer or order.

    Args:
        num_layers: number of Engram layers.
        max_ngram: largest n-gram order (orders 2..max_ngram have columns).
        num_heads: hash heads of one order.
        start: smallest candidate (`engram_vocab_size`).
    Source: Engram hash constants.
    """
    used: set[int] = set()

    def unused_primes() -> Iterator[int]:
        candidate = start
        while True:
            if candidate not in used and is_prime(candidate):
                used.add(candidate)
                yield candidate
            candidate += 1

    layers: list[tuple[tuple[int, ...], ...]] = []
    for _ in range(num_layers):
        orders: list[tuple[int, ...]] = []
        for _ in range(max_ngram - 1):
            source = unused_primes()
            orders.append(tuple(next(source) for _ in range(num_heads)))
        layers.append(tuple(orders))
    return tuple(layers)


def engram_multipliers(layer_id: int, max_ngram: int, *, num_classes: int) -> tuple[int, ...]:
    """Return the odd multipliers of one layer, one for each token of the n-gram.

    Args:
        layer_id: id of the Engram layer in the backbone; seeds the generator.
        max_ngram: largest n-gram order.
        num_classes: number of compressed token ids; bounds the product below 2**63.
    Source: Engram hash constants.
    """
    bound = max(1, (_INT64_MAX // num_classes) // 2)
    generator = np.random.default_rng(_SEED_PER_LAYER * layer_id)
    draws = generator.integers(0, bound, size=max_ngram, dtype=np.int64)
    return tuple(2 * int(draw) + 1 for draw in draws)


def build_hash_constants(config: V41Config, token_map: torch.Tensor) -> EngramHashConstants:
    """Return the constants of every Engram layer of `config`, in the order of its layer ids.

    Args:
        config: the model configuration; without Engram layers all arrays have zero rows.
        token_map: [vocab_size] int32 compressed id of each token (see `token_map`).
    Raises:
        CheckpointError: the token map does not belong to this configuration.
    """
    if token_map.shape != (config.vocab_size,):
        raise CheckpointError(
            f"token map has shape {tuple(token_map.shape)}, vocab_size is {config.vocab_size}; "
            "build the map from the tokenizer of the same checkpoint"
        )
    layer_ids = config.engram_layer_ids
    orders, heads = config.engram_max_ngram_size - 1, config.engram_n_heads
    shape = (len(layer_ids), orders, heads)
    multipliers = [
        engram_multipliers(
            layer, config.engram_max_ngram_size, num_classes=config.engram_compressed_vocab_size
        )
        for layer in layer_ids
    ]
    primes = torch.tensor(
        engram_primes(len(layer_ids), orders + 1, num_heads=heads, start=config.engram_vocab_size),
        dtype=torch.int64,
    ).reshape(shape)
    columns = primes.reshape(len(layer_ids), orders * heads)
    offsets = (columns.cumsum(dim=1) - columns).reshape(shape)
    return EngramHashConstants(
        multipliers=torch.tensor(multipliers, dtype=torch.int64).reshape(
            len(layer_ids), orders + 1
        ),
        primes=primes,
        offsets=offsets,
        pad_id=int(token_map[config.engram_pad_token_id]) if layer_ids else 0,
    )
