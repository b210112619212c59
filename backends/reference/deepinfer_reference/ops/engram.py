"""Reference of the Engram family."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.handles import EngramTable, FetchHandle
from deepinfer.device.op import OpTable
from deepinfer.device.ops import engram
from deepinfer.device.ops.engram import HashConstants
from deepinfer_reference.gemm import in_whole_vectors
from deepinfer_reference.handles import EngramRows, StartedFetch, own_handle

_DOT_FLOOR = 1e-6


def ngram_hash(
    ids: Tensor, history: Tensor, row_seq: Tensor, row_offset: Tensor, *, constants: HashConstants
) -> Tensor:
    max_ngram = constants.multipliers.shape[1]
    num_heads = constants.primes.shape[1] // (max_ngram - 1)
    before = history.index_select(0, row_seq)
    alive = torch.ones_like(ids, dtype=torch.bool)
    rolling: Tensor | None = None
    columns = []
    for shift in range(max_ngram):
        # Token `shift` positions back: in this step's rows, else in the request's history.
        in_step = ids.roll(shift)
        column = (max_ngram - 1) - shift + row_offset
        from_history = before.gather(1, column.clamp(0, max_ngram - 2).unsqueeze(1)).squeeze(1)
        token = torch.where(row_offset >= shift, in_step, from_history)
        alive = alive & (token >= 0)
        mapped = constants.token_map.index_select(0, token.clamp_min(0)).long()
        compressed = torch.where(alive, mapped, constants.pad)
        term = compressed.unsqueeze(1) * constants.multipliers[:, shift]
        rolling = term if rolling is None else rolling ^ term
        if shift > 0:
            heads = slice((shift - 1) * num_heads, shift * num_heads)
            primes = constants.primes[:, heads]
            columns.append(rolling.unsqueeze(-1) % primes + constants.offsets[:, heads])
    return torch.cat(columns, dim=-1)


def engram_fetch_start(table: EngramTable, rows: Tensor) -> FetchHandle:
    return StartedFetch(own_handle(table, EngramRows), rows)


def engram_fetch_wait(handle: FetchHandle) -> Tensor:
    started = own_handle(handle, StartedFetch)
    return started.table.fetch(started.rows)


def engram_inject(
    streams: Tensor, kv: Tensor, query_key_weight: Tensor, dead: Tensor | None, *, eps: float
) -> Tensor:
    _, num_streams, width = streams.shape
    hidden = streams.float()
    split: Tensor = kv.float().unflatten(1, (num_streams + 1, width))
    keys, value = split[:, :num_streams], split[:, num_streams:]
    dot = (hidden * query_key_weight * keys).sum(-1)
    dot = dot * torch.rsqrt(hidden.square().mean(-1) + eps)
    dot = dot * torch.rsqrt(keys.square().mean(-1) + eps) * width**-0.5
    root = torch.copysign(dot.abs().clamp_min(_DOT_FLOOR).sqrt(), dot)
    gate = in_whole_vectors(torch.sigmoid, root)
    if dead is not None:
        gate = gate.masked_fill(dead.unsqueeze(1), 0.0)
    return (hidden + gate.unsqueeze(-1) * value).to(streams.dtype)


def register(table: OpTable) -> None:
    """Add this family's implementations to `table`."""
    table.implements(engram.ngram_hash)(ngram_hash)
    table.implements(engram.engram_fetch_start)(engram_fetch_start)
    table.implements(engram.engram_fetch_wait)(engram_fetch_wait)
    table.implements(engram.engram_inject)(engram_inject)
