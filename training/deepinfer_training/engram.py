"""Engram of whole sequences: hash rows that stop at document starts, gated injection."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from deepinfer.model.engram_hash import engram_multipliers, engram_primes
from deepinfer_training.architecture import Architecture
from deepinfer_training.weights import Weights

_DOT_FLOOR = 1e-6


class EngramHash(NamedTuple):
    """Constants of the n-gram hash.

    Attributes:
        token_map: [V] int64 compressed ids.
        multipliers: one tuple for each Engram layer.
        primes: [layer][order][head].
    """

    token_map: Tensor
    multipliers: tuple[tuple[int, ...], ...]
    primes: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    def of(cls, arch: Architecture, token_map: Tensor) -> EngramHash:
        """Constants that follow from the architecture and the tokenizer's token map [V]."""
        order, classes = arch.engram_max_ngram_size, arch.engram_compressed_vocab_size
        return cls(
            token_map.long(),
            tuple(
                engram_multipliers(layer, order, num_classes=classes)
                for layer in arch.engram_layer_ids
            ),
            engram_primes(
                len(arch.engram_layer_ids),
                order,
                num_heads=arch.engram_n_heads,
                start=arch.engram_vocab_size,
            ),
        )

    def rows(self, ids: Tensor, documents: Tensor, pad_token: int) -> tuple[Tensor, ...]:
        """Table rows [B, T, columns] int64 of each Engram layer.

        Args:
            ids: [B, T] int64 token ids.
            documents: [B, T] int64; the lookback ends where the number changes.
            pad_token: token that stands before a document's start.
        """
        current = self.token_map[ids]
        filler = self.token_map[pad_token]
        length = ids.shape[1]
        shifted = [current]
        alive = torch.ones_like(ids, dtype=torch.bool)
        for shift in range(1, len(self.multipliers[0])):
            before = pad(current, (shift, 0))[:, :length]
            alive = alive & (pad(documents, (shift, 0), value=-1)[:, :length] == documents)
            shifted.append(torch.where(alive, before, filler))
        result = []
        for multipliers, orders in zip(self.multipliers, self.primes, strict=True):
            rolling = shifted[0] * multipliers[0]
            columns, offset = [], 0
            for shift, heads in enumerate(orders, start=1):
                rolling = rolling ^ (shifted[shift] * multipliers[shift])
                for prime in heads:
                    columns.append(rolling % prime + offset)
                    offset += prime
            result.append(torch.stack(columns, dim=-1))
        return tuple(result)


def inject(
    streams: Tensor, rows: Tensor, weights: Weights, prefix: str, arch: Architecture
) -> Tensor:
    """Streams [N, m, D] with the gated value of table rows [N, columns] added."""
    fetched = weights.rows(rows, f"{prefix}embed.weight").flatten(1)
    kv = weights.linear(fetched, f"{prefix}wkv.weight").float()
    m, hidden = arch.hc_mult, arch.hidden_size
    split = kv.view(-1, m + 1, hidden)
    keys, value = split[:, :m], split[:, m:]
    values = streams.float()
    query_key = weights.fp32(f"{prefix}q_weight") * weights.fp32(f"{prefix}k_weight")
    dot = (values * query_key * keys).sum(-1)
    dot = dot * torch.rsqrt(values.square().mean(-1) + arch.rms_norm_eps)
    dot = dot * torch.rsqrt(keys.square().mean(-1) + arch.rms_norm_eps) * hidden**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(_DOT_FLOOR).sqrt(), dot))
    return (values + gate.unsqueeze(-1) * value).to(streams.dtype)
