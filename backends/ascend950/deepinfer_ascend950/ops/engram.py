"""Engram family. Tables stay in host memory: 98 GB a layer do not fit the device."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.formats import dequantize_a8
from deepinfer.device.handles import EngramTable, FetchHandle
from deepinfer.device.op import OpTable
from deepinfer.device.ops import engram
from deepinfer.device.ops.engram import HashConstants
from deepinfer_ascend950.handles import EngramRows, StartedFetch, own_handle

_DOT_FLOOR = 1e-6


def ngram_hash(
    ids: Tensor, history: Tensor, row_seq: Tensor, row_offset: Tensor, *, constants: HashConstants
) -> Tensor:
    max_ngram = constants.multipliers.shape[1]
    num_heads = constants.primes.shape[1] // (max_ngram - 1)
    before = history.index_select(0, row_seq)
    alive = torch.ones_like(ids, dtype=torch.bool)
    mixed = constants.multipliers.new_zeros((ids.shape[0], constants.multipliers.shape[0]))
    columns = []
    for shift in range(max_ngram):
        column = (row_offset - shift + max_ngram - 1).clamp(0, max_ngram - 2)
        earlier = before.gather(1, column.unsqueeze(1)).squeeze(1)
        token = torch.where(row_offset >= shift, ids.roll(shift), earlier)
        alive = alive & (token >= 0)
        mapped = constants.token_map.index_select(0, token.clamp_min(0)).long()
        compressed = torch.where(alive, mapped, constants.pad)
        mixed = mixed ^ (compressed.unsqueeze(1) * constants.multipliers[:, shift])
        if shift:
            heads = slice((shift - 1) * num_heads, shift * num_heads)
            hashed = mixed.unsqueeze(-1) % constants.primes[:, heads]
            columns.append(hashed + constants.offsets[:, heads])
    return torch.cat(columns, dim=-1)


def engram_fetch_start(table: EngramTable, rows: Tensor) -> FetchHandle:
    return StartedFetch(own_handle(table, EngramRows), rows)


def engram_fetch_wait(handle: FetchHandle) -> Tensor:
    started = own_handle(handle, StartedFetch)
    table, rows = started.table, started.rows
    # The host has to know the row numbers, so it waits for the device here.
    flat = rows.flatten().to(table.data.device)
    data = table.data.index_select(0, flat)
    if table.scale is None:
        values = data.float()
    else:
        codes = data.view(torch.float8_e4m3fn)
        values = dequantize_a8(codes, table.scale.index_select(0, flat))
    fetched = values.to(table.dtype).view(rows.shape[0], rows.shape[1] * table.width)
    return fetched.to(rows.device, non_blocking=True)


def engram_inject(
    streams: Tensor, kv: Tensor, query_key_weight: Tensor, dead: Tensor | None, *, eps: float
) -> Tensor:
    _, num_streams, width = streams.shape
    hidden = streams.float()
    split = kv.float().view(kv.shape[0], num_streams + 1, width)
    keys, value = split[:, :num_streams], split[:, num_streams:]
    dot = (hidden * query_key_weight * keys).sum(-1)
    norms = (hidden.square().mean(-1) + eps).rsqrt() * (keys.square().mean(-1) + eps).rsqrt()
    dot = dot * norms * width**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(_DOT_FLOOR).sqrt(), dot))
    if dead is not None:
        gate = gate.masked_fill(dead.unsqueeze(1), 0.0)
    return (hidden + gate.unsqueeze(-1) * value).to(streams.dtype)


def register(table: OpTable) -> None:
    """Add this family's implementations to `table`."""
    table.implements(
        engram.ngram_hash, reason="torch: int64 arithmetic, no operator", layout="int64"
    )(ngram_hash)
    table.implements(
        engram.engram_fetch_start,
        reason="torch: the table is in host memory",
        layout="row numbers int64 on the device",
    )(engram_fetch_start)
    table.implements(
        engram.engram_fetch_wait,
        reason="torch: host gather; the host waits for the row numbers",
        layout="e4m3 + ue8m0 rows decoded on the host, activation dtype to the device",
    )(engram_fetch_wait)
    table.implements(engram.engram_inject, reason="torch: no operator", layout="fp32, one cast")(
        engram_inject
    )
