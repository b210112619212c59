"""Sparse attention over window and compressed rows, read from their records.

`_attend_records` (normative): up to 64 heads against tiles of keys, dequantised to bf16 once for
both products on tensor cores; online softmax. Few rows would leave most of a GPU idle: then every
tile is a program of its own and `_combine` adds the tiles in order, with the same operations, so
that a row's bits do not depend on how many rows there are. `_attend_fp32` (exact): one head, fp32
keys, sums instead of matrix products, so that nothing is rounded below fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase
from deepinfer_kernels.kv.records_triton import load_fp4, load_mxfp8

_HEADS = 64
_SM100_HEADS = 32
"""Triton 3.6 gives every product its own tensor memory, and with 64 heads more than exists."""
_KEYS = 64
_WARPS = 8
_SPLIT_PROGRAMS = 32
"""Up to so many programs of whole rows, every tile of keys becomes a program."""
_COMBINE_STAGES = tl.constexpr(4)
_CHUNK = 128
_MAX_WIDTH = 4 * _CHUNK
_FP32_KEYS = 32


@triton.jit
def _keys(
    base, slot, RECORD: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr,
    KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """[KEYS, CHUNK] bf16 values of rows `slot` from column FIRST on; zero for absent rows."""
    if RECORD == "mxfp8":
        return load_mxfp8(base, slot, slot >= 0, WIDTH, FIRST, KEYS, CHUNK, tl.bfloat16)
    else:
        return load_fp4(base, slot, slot >= 0, WIDTH, FIRST, 16, KEYS, CHUNK, tl.bfloat16)


@triton.jit
def _queries(q_ptr, at, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """[HEADS, CHUNK] queries of the heads that start `at`, from column FIRST on."""
    column = FIRST + tl.arange(0, CHUNK)
    mask = inside[:, None] & (column < WIDTH)[None, :]
    return tl.load(q_ptr + at[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _weights(top, other):
    """The larger of two maxima, and the factors of what was summed below each of them."""
    new_top = tl.maximum(top, other)
    # Nothing seen yet keeps the maximum at -inf; 0 keeps the exponentials at zero, not NaN.
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, tl.exp(top - safe), tl.exp(other - safe)


@triton.jit
def _fold(
    q0, q1, q2, q3, base, slots_ptr, num_slots, start, scale, top, total, a0, a1, a2, a3,
    RECORD: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """One tile of keys into the running softmax; q, keys and output are in chunks of columns.

    The tile's own sums are scaled and added as `_combine` adds them (`fma` leaves the compiler no
    choice), so that tiles folded by one program or by many give the same bits.
    """
    entry = start + tl.arange(0, KEYS)
    slot = tl.load(slots_ptr + entry, mask=entry < num_slots, other=-1)
    k0 = _keys(base, slot, RECORD, WIDTH, 0, KEYS, CHUNK)
    scores = tl.dot(q0, tl.trans(k0))
    if CHUNKS > 1:
        k1 = _keys(base, slot, RECORD, WIDTH, CHUNK, KEYS, CHUNK)
        scores = tl.dot(q1, tl.trans(k1), scores)
    if CHUNKS > 2:
        k2 = _keys(base, slot, RECORD, WIDTH, 2 * CHUNK, KEYS, CHUNK)
        scores = tl.dot(q2, tl.trans(k2), scores)
        k3 = _keys(base, slot, RECORD, WIDTH, 3 * CHUNK, KEYS, CHUNK)
        scores = tl.dot(q3, tl.trans(k3), scores)
    scores = tl.where((slot >= 0)[None, :], scores * scale, float("-inf"))
    tile_top = tl.max(scores, axis=1)
    p = tl.exp(scores - tl.where(tile_top == float("-inf"), 0.0, tile_top)[:, None])
    top, decay, weight = _weights(top, tile_top)
    total = tl.fma(total, decay, tl.sum(p, axis=1) * weight)
    p = p.to(tl.bfloat16)
    decay = decay[:, None]
    weight = weight[:, None]
    a0 = tl.fma(a0, decay, tl.dot(p, k0) * weight)
    if CHUNKS > 1:
        a1 = tl.fma(a1, decay, tl.dot(p, k1) * weight)
    if CHUNKS > 2:
        a2 = tl.fma(a2, decay, tl.dot(p, k2) * weight)
        a3 = tl.fma(a3, decay, tl.dot(p, k3) * weight)
    return top, total, a0, a1, a2, a3


@triton.jit
def _with_sink(top, total, sink):
    safe = tl.where(top == float("-inf"), 0.0, top)
    return total + tl.exp(sink - safe)


@triton.jit
def _store_chunk(
    out_ptr, at, inside, acc, total, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    column = FIRST + tl.arange(0, CHUNK)
    tl.store(
        out_ptr + at[:, None] + column[None, :],
        (acc / total[:, None]).to(out_ptr.dtype.element_ty),
        mask=inside[:, None] & (column < WIDTH)[None, :],
    )


@triton.jit(do_not_specialize=["num_tiles"])
def _attend_records(
    q_ptr, window_ptr, window_slots_ptr, compressed_ptr, compressed_slots_ptr, sink_ptr, out_ptr,
    tops_ptr, totals_ptr, num_heads, num_window, num_compressed, num_tiles, scale,
    WIDTH: tl.constexpr, COMPRESSED: tl.constexpr, SPLIT: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = head < num_heads
    at = (row * num_heads + head) * WIDTH
    q0 = _queries(q_ptr, at, inside, 0, WIDTH, CHUNK)
    q1 = q0
    q2 = q0
    q3 = q0
    if CHUNKS > 1:
        q1 = _queries(q_ptr, at, inside, CHUNK, WIDTH, CHUNK)
    if CHUNKS > 2:
        q2 = _queries(q_ptr, at, inside, 2 * CHUNK, WIDTH, CHUNK)
        q3 = _queries(q_ptr, at, inside, 3 * CHUNK, WIDTH, CHUNK)
    top = tl.full([HEADS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([HEADS], dtype=tl.float32)
    a0 = tl.zeros([HEADS, CHUNK], dtype=tl.float32)
    a1 = tl.zeros([HEADS, CHUNK], dtype=tl.float32)
    a2 = tl.zeros([HEADS, CHUNK], dtype=tl.float32)
    a3 = tl.zeros([HEADS, CHUNK], dtype=tl.float32)
    window_start = 0
    window_end = num_window
    compressed_start = 0
    compressed_end = num_compressed
    if SPLIT:
        # One tile, of the window or of the compressed rows.
        window_start = tl.program_id(2) * KEYS
        window_end = tl.minimum(window_start + KEYS, num_window)
        compressed_start = window_start - tl.cdiv(num_window, KEYS) * KEYS
        compressed_end = tl.where(compressed_start >= 0, compressed_start + 1, compressed_start)
    for start in range(window_start, window_end, KEYS):
        top, total, a0, a1, a2, a3 = _fold(
            q0, q1, q2, q3, window_ptr, window_slots_ptr + row * num_window, num_window, start,
            scale, top, total, a0, a1, a2, a3, "mxfp8", WIDTH, KEYS, CHUNK, CHUNKS,
        )  # fmt: skip
    if COMPRESSED:
        for start in range(compressed_start, compressed_end, KEYS):
            top, total, a0, a1, a2, a3 = _fold(
                q0, q1, q2, q3, compressed_ptr, compressed_slots_ptr + row * num_compressed,
                num_compressed, start, scale, top, total, a0, a1, a2, a3, "nvfp4", WIDTH, KEYS,
                CHUNK, CHUNKS,
            )  # fmt: skip
    if SPLIT:
        tile = (row * num_tiles + tl.program_id(2)) * num_heads + head
        tl.store(tops_ptr + tile, top, mask=inside)
        tl.store(totals_ptr + tile, total, mask=inside)
        at = tile * WIDTH
        total = tl.full([HEADS], 1.0, dtype=tl.float32)
    else:
        total = _with_sink(top, total, tl.load(sink_ptr + head, mask=inside, other=0.0))
    _store_chunk(out_ptr, at, inside, a0, total, 0, WIDTH, CHUNK)
    if CHUNKS > 1:
        _store_chunk(out_ptr, at, inside, a1, total, CHUNK, WIDTH, CHUNK)
    if CHUNKS > 2:
        _store_chunk(out_ptr, at, inside, a2, total, 2 * CHUNK, WIDTH, CHUNK)
        _store_chunk(out_ptr, at, inside, a3, total, 3 * CHUNK, WIDTH, CHUNK)


@triton.jit(do_not_specialize=["num_tiles"])
def _combine(
    tops_ptr, totals_ptr, partial_ptr, sink_ptr, out_ptr, num_heads, num_tiles,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    sink = tl.load(sink_ptr + head)
    # Scalars that a loop changes need their type from the start.
    top = sink * 0.0 + float("-inf")
    total = sink * 0.0
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for tile in tl.range(num_tiles, num_stages=_COMBINE_STAGES):
        at = (row * num_tiles + tile) * num_heads + head
        top, decay, weight = _weights(top, tl.load(tops_ptr + at))
        total = tl.fma(total, decay, tl.load(totals_ptr + at) * weight)
        part = tl.load(partial_ptr + at * WIDTH + column, mask=inside, other=0.0)
        acc = tl.fma(acc, decay, part * weight)
    total = _with_sink(top, total, sink)
    out = out_ptr + (row * num_heads + head) * WIDTH + column
    tl.store(out, (acc / total).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _fold_fp32(q, base, slot, column, inside, WIDTH: tl.constexpr, scale, top, total, acc):
    """One tile of fp32 rows into the running softmax of one head."""
    present = slot >= 0
    keys = tl.load(
        base + slot[:, None] * WIDTH + column[None, :],
        mask=present[:, None] & inside[None, :],
        other=0.0,
    )
    scores = tl.sum(keys * q[None, :], axis=1) * scale
    scores = tl.where(present, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=0))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    decay = tl.exp(top - safe)
    p = tl.exp(scores - safe)
    total = total * decay + tl.sum(p, axis=0)
    acc = acc * decay + tl.sum(p[:, None] * keys, axis=0)
    return new_top, total, acc


@triton.jit
def _attend_fp32(
    q_ptr, window_ptr, window_slots_ptr, compressed_ptr, compressed_slots_ptr, sink_ptr, out_ptr,
    num_heads, num_window, num_compressed, scale,
    WIDTH: tl.constexpr, COMPRESSED: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = (row * num_heads + head) * WIDTH + column
    q = tl.load(q_ptr + at, mask=inside, other=0.0)
    sink = tl.load(sink_ptr + head)
    # Scalars that a loop changes need their type from the start.
    top = sink * 0.0 + float("-inf")
    total = sink * 0.0
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, num_window, KEYS):
        entry = start + tl.arange(0, KEYS)
        slot = tl.load(
            window_slots_ptr + row * num_window + entry, mask=entry < num_window, other=-1
        )
        top, total, acc = _fold_fp32(
            q, window_ptr, slot, column, inside, WIDTH, scale, top, total, acc
        )
    if COMPRESSED:
        for start in range(0, num_compressed, KEYS):
            entry = start + tl.arange(0, KEYS)
            slot = tl.load(
                compressed_slots_ptr + row * num_compressed + entry,
                mask=entry < num_compressed,
                other=-1,
            )
            top, total, acc = _fold_fp32(
                q, compressed_ptr, slot, column, inside, WIDTH, scale, top, total, acc
            )
    safe = tl.where(top == float("-inf"), 0.0, top)
    tl.store(out_ptr + at, acc / (total + tl.exp(sink - safe)), mask=inside)


def _most_heads(device: torch.device) -> int:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0):
        return _SM100_HEADS
    return _HEADS


def sparse_attention(
    q: Tensor,
    window: Tensor,
    window_slots: Tensor,
    compressed: Tensor | None,
    compressed_slots: Tensor | None,
    *,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """Attention of each row over its gathered rows and a sink; keys are the values.

    Args:
        q: [T, H, C] bf16 with record caches, fp32 with fp32 caches.
        window: [rows, C + C / 32] uint8 (`mxfp8`), or [rows, C] fp32.
        window_slots: [T, W] int64; -1 absent.
        compressed: [rows, C / 2 + C / 16] uint8 (`nvfp4`), [rows, C] fp32, or None.
        compressed_slots: [T, K] int64; -1 absent; None without `compressed`.
        sink: [H] fp32.
        scale: factor of the products.

    Returns:
        [T, H, C] in q's dtype; zeros for a row without entries.
    """
    q = q.contiguous()
    num_rows, num_heads, width = q.shape
    if width > _MAX_WIDTH:
        raise ValueError(
            f"sparse_attention: heads have {width} values, at most {_MAX_WIDTH} are compiled for; "
            "add chunks to _attend_records"
        )
    out = torch.empty_like(q)
    if out.numel() == 0:
        return out
    window_slots = window_slots.contiguous()
    num_window, num_compressed = window_slots.shape[1], 0
    if compressed_slots is not None:
        compressed_slots = compressed_slots.contiguous()
        num_compressed = compressed_slots.shape[1]
    block = max(32, triton.next_power_of_2(width))
    if window.dtype is torch.float32:
        _attend_fp32[(num_rows, num_heads)](
            q, window, window_slots, compressed, compressed_slots, sink, out, num_heads,
            num_window, num_compressed, scale, WIDTH=width, COMPRESSED=compressed is not None,
            KEYS=_FP32_KEYS, BLOCK=block,
        )  # fmt: skip
        return out
    heads = max(16, min(_most_heads(q.device), triton.next_power_of_2(num_heads)))
    chunk = min(_CHUNK, block)
    num_tiles = triton.cdiv(num_window, _KEYS) + triton.cdiv(num_compressed, _KEYS)
    grid = (num_rows, triton.cdiv(num_heads, heads), 1)
    split = grid[0] * grid[1] <= _SPLIT_PROGRAMS and num_tiles > 1
    target, tops, totals = out, None, None
    if split:
        grid = (grid[0], grid[1], num_tiles)
        target = out.new_empty((num_rows, num_tiles, num_heads, width), dtype=torch.float32)
        tops = target.new_empty(target.shape[:-1])
        totals = torch.empty_like(tops)
    _attend_records[grid](
        q, window, window_slots, compressed, compressed_slots, sink, target, tops, totals,
        num_heads, num_window, num_compressed, num_tiles, scale, WIDTH=width,
        COMPRESSED=compressed is not None, SPLIT=split, HEADS=heads, KEYS=_KEYS, CHUNK=chunk,
        CHUNKS=block // chunk, num_warps=_WARPS,
    )  # fmt: skip
    if split:
        _combine[(num_rows, num_heads)](
            tops, totals, target, sink, out, num_heads, num_tiles, WIDTH=width, BLOCK=block
        )
    return out


def sparse_attention_truth(
    q: Tensor, keys: Tensor, present: Tensor, *, sink: Tensor, scale: float
) -> Tensor:
    """The same over gathered values, in plain torch.

    Args:
        q: [T, H, C].
        keys: [T, n, C] fp32 values of all entries.
        present: [T, n] bool.
        sink: [H] fp32.
        scale: factor of the products.
    """
    scores = torch.einsum("thc,tnc->thn", q.double(), keys.double()) * scale
    scores = scores.masked_fill(~present.unsqueeze(1), -torch.inf)
    column = sink.double().view(1, -1, 1).expand(q.shape[0], -1, 1)
    p = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
    keys = keys.double().masked_fill(~present.unsqueeze(-1), 0.0)
    return torch.einsum("thn,tnc->thc", p, keys).to(q.dtype)


_SIGNATURE = {
    "q_ptr": "*bf16", "window_ptr": "*u8", "window_slots_ptr": "*i64", "compressed_ptr": "*u8",
    "compressed_slots_ptr": "*i64", "sink_ptr": "*fp32", "out_ptr": "*bf16", "num_heads": "i32",
    "num_window": "i32", "num_compressed": "i32", "scale": "fp32",
}  # fmt: skip
_RECORDS = {
    **_SIGNATURE, "tops_ptr": "*fp32", "totals_ptr": "*fp32", "num_tiles": "i32"
}  # fmt: skip
_FLOATS = dict.fromkeys(("q_ptr", "window_ptr", "compressed_ptr", "out_ptr"), "*fp32")
COMPILE_CASES = (
    *(
        CompileCase(
            "_attend_records",
            {**_RECORDS, "out_ptr": "*fp32" if split else "*bf16"},
            {
                "WIDTH": 512, "COMPRESSED": True, "SPLIT": split, "HEADS": heads, "KEYS": _KEYS,
                "CHUNK": _CHUNK, "CHUNKS": 4,
            },
            num_warps=_WARPS, required={90: ("wgmma",), 100: ("mma.sync",)},
            record_bytes=(528, 288), max_spill_bytes=spills, architectures=(arch,),
        )
        for arch, heads, spills in ((90, _HEADS, 448), (100, _SM100_HEADS, 48))
        for split in (False, True)
    ),
    CompileCase(
        "_attend_records", _RECORDS,
        {
            "WIDTH": 64, "COMPRESSED": False, "SPLIT": False, "HEADS": 16, "KEYS": _KEYS,
            "CHUNK": 64, "CHUNKS": 1,
        },
        num_warps=_WARPS, record_bytes=(66,),
    ),
    CompileCase(
        "_combine",
        {
            "tops_ptr": "*fp32", "totals_ptr": "*fp32", "partial_ptr": "*fp32",
            "sink_ptr": "*fp32", "out_ptr": "*bf16", "num_heads": "i32", "num_tiles": "i32",
        },
        {"WIDTH": 512, "BLOCK": 512},
    ),
    CompileCase(
        "_attend_fp32", {**_SIGNATURE, **_FLOATS},
        {"WIDTH": 512, "COMPRESSED": True, "KEYS": _FP32_KEYS, "BLOCK": 512},
    ),
)  # fmt: skip
