"""Truths of the sampling family: plain integers and float64, one row and one token at a time."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from deepinfer.device.ops.sampling import (
    LogitControls,
    Logprobs,
    Penalties,
    Purpose,
    SampleParams,
    SampleWork,
)

_TWO_32 = 1 << 32


def _float32(value: float) -> float:
    """`value` rounded to the nearest fp32, ties to even."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def _philox_block(counter: list[int], key: list[int]) -> list[int]:
    """Four words of Philox4x32-10."""
    counter, key = list(counter), list(key)
    for _ in range(10):
        first = 0xD2511F53 * counter[0]
        second = 0xCD9E8D57 * counter[2]
        counter = [
            second // _TWO_32 ^ counter[1] ^ key[0],
            second % _TWO_32,
            first // _TWO_32 ^ counter[3] ^ key[1],
            first % _TWO_32,
        ]
        key = [(key[0] + 0x9E3779B9) % _TWO_32, (key[1] + 0xBB67AE85) % _TWO_32]
    return counter


def _uniform_row(seed: int, index: int, position: int, purpose: Purpose, num: int) -> list[float]:
    unsigned = seed % (1 << 64)
    key = [unsigned % _TWO_32, unsigned // _TWO_32]
    row: list[float] = []
    for column in range(num):
        words = _philox_block([column // 4, position, index, int(purpose)], key)
        value = _float32(_float32(words[column % 4]) + 0.5) / _TWO_32
        row.append(min(value, 1.0 - 2.0**-24))
    return row


def philox_uniform(
    seeds: Tensor, sample_index: Tensor, positions: Tensor, purpose: Purpose, num: int
) -> Tensor:
    """Uniform numbers in (0, 1); [N, num] fp32, exact."""
    rows = [
        _uniform_row(seed, index, position, purpose, num)
        for seed, index, position in zip(
            seeds.tolist(), sample_index.tolist(), positions.tolist(), strict=True
        )
    ]
    return torch.tensor(rows, dtype=torch.float32).view(len(rows), num)


def _penalised(value: float, *, row: int, token: int, penalties: Penalties) -> float:
    slot = int(penalties.slots[row])
    if slot < 0:
        return value
    count = int(penalties.output_counts[slot, token])
    count += penalties.pending[row].tolist().count(token)
    if count > 0 or bool(penalties.prompt_seen[slot, token]):
        repetition = float(penalties.repetition[row])
        value = value / repetition if value > 0 else value * repetition
    value -= count * float(penalties.frequency[row])
    if count > 0:
        value -= float(penalties.presence[row])
    return value


def apply_controls(logits: Tensor, controls: LogitControls) -> Tensor:
    """Masks, bias and penalties token by token; [N, V] float64."""
    result = logits.double().clone()
    banned: set[tuple[int, int]] = set()
    if controls.banned is not None:
        rows, ids = controls.banned
        banned.update(zip(rows.tolist(), ids.tolist(), strict=True))
    bias: dict[tuple[int, int], float] = {}
    if controls.bias is not None:
        rows, ids, values = controls.bias
        pairs = zip(rows.tolist(), ids.tolist(), strict=True)
        bias.update(zip(pairs, values.tolist(), strict=True))
    for row in range(logits.shape[0]):
        for token in range(logits.shape[1]):
            value = float(logits[row, token])
            allowed = controls.allowed is None or bool(controls.allowed[row, token])
            if not allowed or (row, token) in banned:
                value = -math.inf
            value += bias.get((row, token), 0.0)
            if controls.penalties is not None:
                value = _penalised(value, row=row, token=token, penalties=controls.penalties)
            result[row, token] = value
    return result


def _filtered_row(
    row: list[float], *, temperature: float, top_k: int, top_p: float, min_p: float
) -> list[float]:
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    best = row[order[0]]
    result = [-math.inf] * len(row)
    if temperature == 0.0:
        result[order[0]] = 0.0
        return result
    scaled = [(value - best) / temperature for value in row]
    kept = order[:top_k] if top_k else order
    total = math.fsum(math.exp(scaled[token]) for token in kept)
    reached = 0.0
    for place, token in enumerate(kept):
        within = top_p == 1.0 or place == 0 or reached < top_p * total
        reached += math.exp(scaled[token])
        if within and math.exp(scaled[token]) >= min_p:
            result[token] = scaled[token]
    return result


def filter_logits(logits: Tensor, params: SampleParams, work: SampleWork) -> Tensor:
    """Temperature, top-k, top-p and min-p row by row; [N, V] float64. `work` changes nothing."""
    rows = [
        _filtered_row(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for row, temperature, top_k, top_p, min_p in zip(
            logits.tolist(), *(column.tolist() for column in params[:4]), strict=True
        )
    ]
    return torch.tensor(rows, dtype=torch.float64).view(logits.shape)


def sample_tokens(
    logits: Tensor,
    params: SampleParams,
    work: SampleWork,
    *,
    purpose: Purpose = Purpose.SAMPLE,
) -> Tensor:
    """The Gumbel-max rule with float64 logarithms; [N] int64."""
    uniform = philox_uniform(
        params.seeds, params.sample_index, params.positions, purpose, logits.shape[1]
    )
    tokens: list[int] = []
    for kept, draws in zip(
        filter_logits(logits, params, work).tolist(), uniform.tolist(), strict=True
    ):
        scores = [z - math.log(-math.log1p(-u)) for z, u in zip(kept, draws, strict=True)]
        tokens.append(scores.index(max(scores)))
    return torch.tensor(tokens, dtype=torch.int64)


def token_logprobs(logits: Tensor, ids: Tensor, num_top: int) -> Logprobs:
    """Log probabilities, ranks and best tokens from a full sort of each row; values float64."""
    chosen: list[float] = []
    ranks: list[int] = []
    top_ids: list[list[int]] = []
    top_values: list[list[float]] = []
    for row, token in zip(logits.tolist(), ids.tolist(), strict=True):
        best = max(row)
        log_total = best + math.log(math.fsum(math.exp(value - best) for value in row))
        order = sorted(range(len(row)), key=lambda other: (-row[other], other))
        chosen.append(row[token] - log_total)
        ranks.append(order.index(token) + 1)
        top_ids.append(order[:num_top])
        top_values.append([row[other] - log_total for other in order[:num_top]])
    shape = (len(chosen), num_top)
    return Logprobs(
        chosen=torch.tensor(chosen, dtype=torch.float64),
        rank=torch.tensor(ranks, dtype=torch.int64),
        top_ids=torch.tensor(top_ids, dtype=torch.int64).view(shape),
        top_values=torch.tensor(top_values, dtype=torch.float64).view(shape),
    )


def finite_rows(logits: Tensor) -> Tensor:
    """Rows without NaN or +inf and with something finite; [N] bool."""
    usable = [
        all(not math.isnan(value) and value != math.inf for value in row)
        and any(value != -math.inf for value in row)
        for row in logits.tolist()
    ]
    return torch.tensor(usable, dtype=torch.bool)


def count_tokens(ids: Tensor, slots: Tensor, output_counts: Tensor) -> None:
    """Count one token at a time, in place."""
    for token, slot in zip(ids.tolist(), slots.tolist(), strict=True):
        if slot >= 0:
            output_counts[slot, token] += 1
