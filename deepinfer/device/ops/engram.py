"""Engram family: n-gram hashes, table rows, gated injection.

The fetch is a pair of ops, start and wait: tables may lie on the device, in host memory,
memory-mapped or sharded over ranks.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from deepinfer.device.comparison import Exact, Ulp
from deepinfer.device.handles import EngramTable, FetchHandle
from deepinfer.device.op import op


class HashConstants(NamedTuple):
    """Constants of the n-gram hash, on the device.

    Attributes:
        token_map: [V] int32 token id -> compressed id.
        multipliers: [L, max_ngram] int64 per Engram layer and shift.
        primes: [L, (max_ngram - 1) * heads] int64, columns by order then head.
        offsets: [L, (max_ngram - 1) * heads] int64 first row of each column.
        pad: compressed id of the pad token.
    """

    token_map: Tensor
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor
    pad: int


@op(family="engram", compare=Exact())
def ngram_hash(
    ids: Tensor, history: Tensor, row_seq: Tensor, row_offset: Tensor, *, constants: HashConstants
) -> Tensor:
    """Table rows of every token's n-grams.

    Args:
        ids: [T] int64 token ids; -1 marks a dead token (image).
        history: [R, max_ngram - 1] int64 the tokens before each request's first row, oldest
            first; -1 where there is none or it is dead.
        row_seq: [T] int64 request of each row.
        row_offset: [T] int64 row's index within its request's rows of this step.
        constants: hash constants of all Engram layers.

    Returns:
        [T, L, (max_ngram - 1) * heads] int64. From the first dead or absent token backwards
        every deeper one counts as pad; a dead current token makes all of them pad.
    """
    raise NotImplementedError


@op(family="engram", compare=Exact())
def engram_fetch_start(table: EngramTable, rows: Tensor) -> FetchHandle:
    """Begin fetching table rows.

    Args:
        table: packed table.
        rows: [T, columns] int64.

    Returns:
        A handle that exactly one `engram_fetch_wait` takes; `rows` must stay unchanged till then.
    """
    raise NotImplementedError


@op(family="engram", compare=Exact())
def engram_fetch_wait(handle: FetchHandle) -> Tensor:
    """Rows of a started fetch: [T, columns * width] activation dtype, column-major in id order."""
    raise NotImplementedError


@op(family="engram", compare=Ulp())
def engram_inject(
    streams: Tensor, kv: Tensor, query_key_weight: Tensor, dead: Tensor | None, *, eps: float
) -> Tensor:
    """Add the gated n-gram value to every stream.

    Args:
        streams: [T, M, D] activation dtype.
        kv: [T, (M + 1) * D] activation dtype: one key per stream, then the shared value.
        query_key_weight: [M, D] fp32, product of both norm weights.
        dead: [T] bool rows without injection (image tokens), or None.
        eps: eps of both row norms.

    Returns:
        [T, M, D]: h + sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot)) * value, one cast, with
        dot = sum(h * qk * k) * rsqrt(mean h^2 + eps) * rsqrt(mean k^2 + eps) * D^-0.5.
    """
    raise NotImplementedError
