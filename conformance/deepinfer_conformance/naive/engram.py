"""Truths of the engram family."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.device.ops.engram import HashConstants
from deepinfer.device.samples.canonical import CanonicalEngram, CanonicalFetch
from deepinfer_conformance.naive import stored


def _classes(tokens: list[int], max_ngram: int, *, token_map: list[int], pad: int) -> list[int]:
    """Compressed ids of the newest token and those before it; pad once one is dead or absent."""
    result: list[int] = []
    for shift in range(max_ngram):
        token = tokens[-1 - shift] if shift < len(tokens) else -1
        if token < 0:
            return result + [pad] * (max_ngram - shift)
        result.append(token_map[token])
    return result


def ngram_hash(
    ids: Tensor, history: Tensor, row_seq: Tensor, row_offset: Tensor, *, constants: HashConstants
) -> Tensor:
    """Token by token with unbounded integers; [T, L, columns] int64."""
    num_layers, max_ngram = constants.multipliers.shape
    heads = constants.primes.shape[1] // (max_ngram - 1)
    flat: list[int] = ids.tolist()
    token_map: list[int] = constants.token_map.tolist()
    rows: list[list[list[int]]] = []
    for row, (seq, offset) in enumerate(zip(row_seq.tolist(), row_offset.tolist(), strict=True)):
        tokens = history[seq].tolist() + flat[row - offset : row + 1]
        classes = _classes(tokens, max_ngram, token_map=token_map, pad=constants.pad)
        layers: list[list[int]] = []
        for layer in range(num_layers):
            rolling, columns = 0, []
            for shift, value in enumerate(classes):
                rolling ^= value * int(constants.multipliers[layer, shift])
                for head in range(heads if shift else 0):
                    column = (shift - 1) * heads + head
                    prime = int(constants.primes[layer, column])
                    columns.append(rolling % prime + int(constants.offsets[layer, column]))
            layers.append(columns)
        rows.append(layers)
    shape = (len(rows), num_layers, constants.primes.shape[1])
    return torch.tensor(rows, dtype=torch.int64).view(shape)


def engram_fetch_start(table: CanonicalEngram, rows: Tensor) -> Tensor:
    """What a wait for this fetch gives; float64 stands for the activation dtype."""
    values = stored.weight(table.table)
    fetched = [[value for row in columns for value in values[row]] for columns in rows.tolist()]
    shape = (rows.shape[0], rows.shape[1] * table.table.shape[1])
    return torch.tensor(fetched, dtype=torch.float64).view(shape)


def engram_fetch_wait(handle: CanonicalFetch) -> Tensor:
    """Rows of the fetch."""
    return engram_fetch_start(handle.table, handle.rows)


def _gate(hidden: list[float], key: list[float], weight: list[float], *, eps: float) -> float:
    width = len(hidden)
    dot = math.fsum(h * w * k for h, w, k in zip(hidden, weight, key, strict=True))
    dot /= math.sqrt(math.fsum(h * h for h in hidden) / width + eps)
    dot /= math.sqrt(math.fsum(k * k for k in key) / width + eps)
    dot /= math.sqrt(width)
    logit = math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)
    return 1.0 / (1.0 + math.exp(-logit))


def engram_inject(
    streams: Tensor, kv: Tensor, query_key_weight: Tensor, dead: Tensor | None, *, eps: float
) -> Tensor:
    """Token by token, stream by stream; [T, M, D] in the streams' dtype."""
    _, num_streams, width = streams.shape
    weights = stored.matrix(query_key_weight)
    rows = []
    for token, (hidden, keys) in enumerate(
        zip(streams.double().tolist(), stored.matrix(kv), strict=True)
    ):
        value = keys[num_streams * width :]
        silent = dead is not None and bool(dead[token])
        row = []
        for stream in range(num_streams):
            key = keys[stream * width : (stream + 1) * width]
            gate = 0.0 if silent else _gate(hidden[stream], key, weights[stream], eps=eps)
            row.append([h + gate * v for h, v in zip(hidden[stream], value, strict=True)])
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64).view(streams.shape).to(streams.dtype)
