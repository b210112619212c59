"""Sparse attention over window and compressed rows, read from their records.

Two kernels. `_attend_records` (normative): a block of heads against tiles of keys dequantised to
bf16, products on tensor cores, online softmax. `_attend_fp32` (exact): one head, fp32 keys, sums
instead of matrix products, so that nothing is rounded below fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase
from deepinfer_kernels.kv.records_triton import load_fp4, load_mxfp8

_HEADS = 16
_KEYS = 32
_WARPS = 8
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
def _fold(
    q_rows, q_inside, base, slots_ptr, num_slots, start, scale, top, total, a0, a1, a2, a3,
    RECORD: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One tile of keys into the running softmax; `a0` .. `a3` are chunks of the output."""
    entry = start + tl.arange(0, KEYS)
    slot = tl.load(slots_ptr + entry, mask=entry < num_slots, other=-1)
    scores = tl.zeros([HEADS, KEYS], dtype=tl.float32)
    for chunk in tl.static_range(CHUNKS):
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        q = tl.load(
            q_rows[:, None] + column[None, :],
            mask=q_inside[:, None] & (column < WIDTH)[None, :],
            other=0.0,
        )
        keys = _keys(base, slot, RECORD, WIDTH, chunk * CHUNK, KEYS, CHUNK)
        scores = tl.dot(q, tl.trans(keys), scores)
    scores = tl.where((slot >= 0)[None, :], scores * scale, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    # Nothing seen yet keeps the maximum at -inf; 0 keeps the exponentials at zero, not NaN.
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    decay = tl.exp(top - safe)
    p = tl.exp(scores - safe[:, None])
    total = total * decay + tl.sum(p, axis=1)
    p = p.to(tl.bfloat16)
    decay = decay[:, None]
    a0 = tl.dot(p, _keys(base, slot, RECORD, WIDTH, 0, KEYS, CHUNK), a0 * decay)
    if CHUNKS > 1:
        a1 = tl.dot(p, _keys(base, slot, RECORD, WIDTH, CHUNK, KEYS, CHUNK), a1 * decay)
    if CHUNKS > 2:
        a2 = tl.dot(p, _keys(base, slot, RECORD, WIDTH, 2 * CHUNK, KEYS, CHUNK), a2 * decay)
        a3 = tl.dot(p, _keys(base, slot, RECORD, WIDTH, 3 * CHUNK, KEYS, CHUNK), a3 * decay)
    return new_top, total, a0, a1, a2, a3


@triton.jit
def _store_chunk(
    out_rows, inside, acc, total, CHUNK_INDEX: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    column = CHUNK_INDEX * CHUNK + tl.arange(0, CHUNK)
    tl.store(
        out_rows[:, None] + column[None, :],
        (acc / total[:, None]).to(out_rows.dtype.element_ty),
        mask=inside[:, None] & (column < WIDTH)[None, :],
    )


@triton.jit
def _attend_records(
    q_ptr, window_ptr, window_slots_ptr, compressed_ptr, compressed_slots_ptr, sink_ptr, out_ptr,
    num_heads, num_window, num_compressed, scale,
    WIDTH: tl.constexpr, COMPRESSED: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = head < num_heads
    at = (row * num_heads + head) * WIDTH
    q_rows = q_ptr + at
    top = tl.full([HEADS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([HEADS], dtype=tl.float32)
    # Output in chunks of columns, so that neither queries nor keys are in registers whole.
    a0 = tl.zeros([HEADS, CHUNK], dtype=tl.float32)
    a1 = tl.zeros([HEADS, CHUNK], dtype=tl.float32)
    a2 = tl.zeros([HEADS, CHUNK], dtype=tl.float32)
    a3 = tl.zeros([HEADS, CHUNK], dtype=tl.float32)
    for start in range(0, num_window, KEYS):
        top, total, a0, a1, a2, a3 = _fold(
            q_rows, inside, window_ptr, window_slots_ptr + row * num_window, num_window, start,
            scale, top, total, a0, a1, a2, a3, "mxfp8", WIDTH, KEYS, CHUNK, CHUNKS, HEADS,
        )  # fmt: skip
    if COMPRESSED:
        for start in range(0, num_compressed, KEYS):
            top, total, a0, a1, a2, a3 = _fold(
                q_rows, inside, compressed_ptr, compressed_slots_ptr + row * num_compressed,
                num_compressed, start, scale, top, total, a0, a1, a2, a3, "nvfp4", WIDTH, KEYS,
                CHUNK, CHUNKS, HEADS,
            )  # fmt: skip
    sink = tl.load(sink_ptr + head, mask=inside, other=0.0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total += tl.exp(sink - safe)
    _store_chunk(out_ptr + at, inside, a0, total, 0, WIDTH, CHUNK)
    if CHUNKS > 1:
        _store_chunk(out_ptr + at, inside, a1, total, 1, WIDTH, CHUNK)
    if CHUNKS > 2:
        _store_chunk(out_ptr + at, inside, a2, total, 2, WIDTH, CHUNK)
        _store_chunk(out_ptr + at, inside, a3, total, 3, WIDTH, CHUNK)


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
    num_compressed = 0
    if compressed_slots is not None:
        compressed_slots = compressed_slots.contiguous()
        num_compressed = compressed_slots.shape[1]
    block = max(32, triton.next_power_of_2(width))
    arguments = (
        q, window, window_slots, compressed, compressed_slots, sink, out, num_heads,
        window_slots.shape[1], num_compressed, scale,
    )  # fmt: skip
    if window.dtype is torch.float32:
        _attend_fp32[(num_rows, num_heads)](
            *arguments, WIDTH=width, COMPRESSED=compressed is not None, KEYS=_FP32_KEYS,
            BLOCK=block,
        )  # fmt: skip
    else:
        chunk = max(32, min(_CHUNK, block))
        _attend_records[(num_rows, triton.cdiv(num_heads, _HEADS))](
            *arguments, WIDTH=width, COMPRESSED=compressed is not None, HEADS=_HEADS, KEYS=_KEYS,
            CHUNK=chunk, CHUNKS=block // chunk, num_warps=_WARPS,
        )  # fmt: skip
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
_FLOATS = dict.fromkeys(("q_ptr", "window_ptr", "compressed_ptr", "out_ptr"), "*fp32")
COMPILE_CASES = (
    CompileCase(
        "_attend_records", _SIGNATURE,
        {
            "WIDTH": 512, "COMPRESSED": True, "HEADS": _HEADS, "KEYS": _KEYS, "CHUNK": _CHUNK,
            "CHUNKS": 4,
        },
        num_warps=_WARPS, record_bytes=(528, 288),
    ),
    CompileCase(
        "_attend_records", _SIGNATURE,
        {
            "WIDTH": 64, "COMPRESSED": False, "HEADS": _HEADS, "KEYS": _KEYS, "CHUNK": 64,
            "CHUNKS": 1,
        },
        num_warps=_WARPS, record_bytes=(66,),
    ),
    CompileCase(
        "_attend_fp32", {**_SIGNATURE, **_FLOATS},
        {"WIDTH": 512, "COMPRESSED": True, "KEYS": _FP32_KEYS, "BLOCK": 512},
    ),
)  # fmt: skip
