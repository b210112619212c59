"""Engram family on Triton kernels; a fetch is a launch on the stream that starts it."""

from __future__ import annotations

from torch import Tensor

from deepinfer.device.handles import EngramTable, FetchHandle
from deepinfer.device.op import OpTable
from deepinfer.device.ops import engram
from deepinfer.device.ops.engram import HashConstants
from deepinfer_cuda_sm100.handles import PackedEngram, StartedFetch, own_handle
from deepinfer_kernels.engram import hash_triton, inject_triton


def ngram_hash(
    ids: Tensor, history: Tensor, row_seq: Tensor, row_offset: Tensor, *, constants: HashConstants
) -> Tensor:
    return hash_triton.ngram_hash(
        ids,
        history,
        row_seq,
        row_offset,
        token_map=constants.token_map,
        multipliers=constants.multipliers,
        primes=constants.primes,
        offsets=constants.offsets,
        pad=constants.pad,
    )


def engram_fetch_start(table: EngramTable, rows: Tensor) -> FetchHandle:
    packed = own_handle(table, PackedEngram)
    return StartedFetch(inject_triton.fetch(packed.data, packed.scale, rows, packed.dtype))


def engram_fetch_wait(handle: FetchHandle) -> Tensor:
    return own_handle(handle, StartedFetch).values


def engram_inject(
    streams: Tensor, kv: Tensor, query_key_weight: Tensor, dead: Tensor | None, *, eps: float
) -> Tensor:
    return inject_triton.inject(streams, kv, query_key_weight, dead, eps=eps)


def register(table: OpTable, reason: str) -> None:
    """Add this family's implementations to `table`."""
    table.implements(engram.ngram_hash, reason=reason)(ngram_hash)
    table.implements(engram.engram_fetch_start, reason=reason)(engram_fetch_start)
    table.implements(
        engram.engram_fetch_wait, reason="the fetch is in stream order: nothing to wait for"
    )(engram_fetch_wait)
    table.implements(engram.engram_inject, reason=reason)(engram_inject)
