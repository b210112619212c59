"""Work of hot kernels at V4.1 shapes, beside the same in plain torch; timed by `kernels.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepinfer.device import formats
from deepinfer.device.ops.sampling import Purpose, SampleParams
from deepinfer_kernels.attention.sparse_attention_triton import sparse_attention
from deepinfer_kernels.indexer.scores_triton import index_scores
from deepinfer_kernels.indexer.select_triton import select_topk
from deepinfer_kernels.mhc.mix_triton import mix, mix_truth
from deepinfer_kernels.mhc.streams_triton import collapse_norm, collapse_norm_truth, expand
from deepinfer_kernels.moe.slots_triton import Slots, place_rows
from deepinfer_kernels.norm.rmsnorm_triton import rmsnorm, rmsnorm_truth
from deepinfer_kernels.quant.gemm_triton import Operand, expert_gemm, gemm
from deepinfer_kernels.quant.quantize_triton import round_a8
from deepinfer_kernels.sampling.sample_triton import draw, filter_logits
from deepinfer_reference.ops.sampling import gumbel_noise

DEVICE = "cuda"
WIDTH, HEADS, HEAD_WIDTH, STREAMS, VOCAB = 5120, 64, 512, 4, 129280
WINDOW, TOPK = 128, 512
EXPERTS, PER_TOKEN, INNER = 48, 6, 2304
ROWS = (1, 64, 1024)


class Case(NamedTuple):
    """One kernel at one shape.

    Attributes:
        name: kernel and shape.
        rows: tokens.
        own: the kernel.
        composed: the same work in plain torch.
        num_bytes: bytes that have to move once.
        operations: multiplications and additions.
        dequantised: the product alone on bf16 copies of quantised operands, or None.
    """

    name: str
    rows: int
    own: Callable[[], object]
    composed: Callable[[], object]
    num_bytes: float
    operations: float
    dequantised: Callable[[], object] | None = None


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def dense(name: str, outputs: int, inner: int) -> Iterator[Case]:
    """W8A8 with 32-wide groups."""
    matrix = normal(outputs, inner) * inner**-0.5
    codes, scales = formats.quantize_row32(matrix.float())
    weight = Operand("mxfp8", codes.view(torch.uint8), scales)
    for rows in ROWS:
        x = normal(rows, inner)

        def own(x: Tensor = x) -> object:
            return gemm(Operand("plain", round_a8(x), None), weight, torch.bfloat16)

        def composed(x: Tensor = x) -> object:
            values = formats.dequantize_a8(codes, scales).bfloat16()
            return formats.round_trip_a8(x).bfloat16() @ values.T

        yield Case(
            f"{name} {outputs}x{inner}", rows, own, composed,
            outputs * inner * (1 + 1 / 32) + rows * (2 * inner + 2 * outputs),
            2.0 * rows * outputs * inner, lambda x=x: x @ matrix.T,
        )  # fmt: skip


def head() -> Iterator[Case]:
    matrix = normal(VOCAB, WIDTH)
    for rows in ROWS[:2]:
        x = normal(rows, WIDTH)
        yield Case(
            f"lm_head {VOCAB}x{WIDTH}", rows,
            lambda x=x: gemm(
                Operand("plain", x, None), Operand("plain", matrix, None), torch.float32
            ),
            lambda x=x: (x @ matrix.T).float(),
            2.0 * VOCAB * WIDTH + rows * 4 * VOCAB, 2.0 * rows * VOCAB * WIDTH,
        )  # fmt: skip


def experts() -> Iterator[Case]:
    """Gate and up of routed experts, W4A8; torch multiplies expert by expert."""
    shape = (EXPERTS, 2 * INNER, WIDTH)
    packed = torch.randint(0, 256, (*shape[:2], WIDTH // 2), dtype=torch.uint8, device=DEVICE)
    scales = torch.full((*shape[:2], WIDTH // 32), 120, dtype=torch.uint8, device=DEVICE)
    weight = Operand("mxfp4", packed, scales)
    plain = normal(*shape) * 0.02
    physical = torch.arange(EXPERTS, device=DEVICE)
    for rows in ROWS:
        x = normal(rows, WIDTH)
        ids = torch.rand(rows, EXPERTS, device=DEVICE).topk(PER_TOKEN).indices
        weights = torch.ones(rows, PER_TOKEN, device=DEVICE)
        slots = place_rows(ids, weights, physical, torch.ones(rows, device=DEVICE).bool())
        chosen = [((ids == expert).any(1)).nonzero().flatten() for expert in range(EXPERTS)]
        touched = sum(1 for found in chosen if found.numel())

        def own(x: Tensor = x, slots: Slots = slots) -> object:
            return expert_gemm(
                Operand("plain", round_a8(x), None), weight, slots.tile_experts, slots.slot_rows,
                gather=True, dtype=torch.bfloat16,
            )  # fmt: skip

        def composed(x: Tensor = x, chosen: list[Tensor] = chosen) -> object:
            values = formats.round_trip_a8(x).bfloat16()
            return [
                values[f] @ formats.dequantize_q4_ue8m0(packed[e], scales[e]).bfloat16().T
                for e, f in enumerate(chosen)
                if f.numel()
            ]

        def dequantised(x: Tensor = x, chosen: list[Tensor] = chosen) -> object:
            return [x[f] @ plain[e].T for e, f in enumerate(chosen) if f.numel()]

        yield Case(
            f"expert gate_up {2 * INNER}x{WIDTH}, {touched} experts", rows, own, composed,
            touched * 2 * INNER * WIDTH * (0.5 + 1 / 32),
            2.0 * rows * PER_TOKEN * 2 * INNER * WIDTH, dequantised,
        )  # fmt: skip


def window_values(records: Tensor) -> Tensor:
    """bf16 [.., 512] of gathered 528-byte records."""
    codes = records[..., :HEAD_WIDTH].contiguous().view(torch.float8_e4m3fn)
    return formats.dequantize_a8(codes, records[..., HEAD_WIDTH:]).bfloat16()


def compressed_values(records: Tensor) -> Tensor:
    """bf16 [.., 512] of gathered 288-byte records."""
    codes, scales = records.split((HEAD_WIDTH // 2, HEAD_WIDTH // 16), dim=-1)
    scales = scales.contiguous().view(torch.float8_e4m3fn)
    return formats.dequantize_q4_e4m3(codes, scales).bfloat16()


def attention() -> Iterator[Case]:
    window_rows, compressed_rows = 1 << 14, 1 << 16
    window = torch.randint(0, 100, (window_rows, 528), dtype=torch.uint8, device=DEVICE)
    window[:, 512:] = 120
    compressed = torch.randint(0, 256, (compressed_rows, 288), dtype=torch.uint8, device=DEVICE)
    compressed[:, 256:] = 40
    plain_window = normal(window_rows, HEAD_WIDTH)
    plain_compressed = normal(compressed_rows, HEAD_WIDTH)
    sink = torch.zeros(HEADS, device=DEVICE)
    for rows in ROWS:
        q = normal(rows, HEADS, HEAD_WIDTH)
        near = torch.randint(0, window_rows, (rows, WINDOW), device=DEVICE)
        far = torch.randint(0, compressed_rows, (rows, TOPK), device=DEVICE)

        def attend(q: Tensor, keys: Tensor) -> Tensor:
            scores = torch.bmm(q, keys.transpose(1, 2)).float() * HEAD_WIDTH**-0.5
            column = sink.view(1, -1, 1).expand(q.shape[0], -1, 1)
            p = torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
            return torch.bmm(p.bfloat16(), keys)

        def composed(q: Tensor = q, near: Tensor = near, far: Tensor = far) -> object:
            return attend(
                q, torch.cat((window_values(window[near]), compressed_values(compressed[far])), 1)
            )

        def dequantised(q: Tensor = q, near: Tensor = near, far: Tensor = far) -> object:
            return attend(q, torch.cat((plain_window[near], plain_compressed[far]), dim=1))

        yield Case(
            f"sparse attention {HEADS} heads, {WINDOW}+{TOPK} rows", rows,
            lambda q=q, near=near, far=far: sparse_attention(
                q, window, near, compressed, far, sink=sink, scale=HEAD_WIDTH**-0.5
            ),
            composed, rows * (WINDOW * 528 + TOPK * 288 + 4 * HEADS * HEAD_WIDTH),
            rows * 4.0 * HEADS * HEAD_WIDTH * (WINDOW + TOPK), dequantised,
        )  # fmt: skip


def indexer(entries: int = 32768) -> Iterator[Case]:
    heads, width, per_block = 32, 128, 64
    cache = torch.randint(0, 256, (entries, 68), dtype=torch.uint8, device=DEVICE)
    cache[:, 64:] = 120
    keys = normal(entries, width)
    table = torch.arange(entries // per_block, device=DEVICE).unsqueeze(0)
    for rows in ROWS[:2]:
        q, weights = normal(rows, heads, width), normal(rows, heads)
        seq = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        visible = torch.full((rows,), entries, device=DEVICE)

        def own(
            q: Tensor = q, weights: Tensor = weights, seq: Tensor = seq, visible: Tensor = visible
        ) -> object:
            scores = index_scores(
                q, weights, cache, table, seq, visible, entries_per_block=per_block,
                max_visible=entries,
            )  # fmt: skip
            return select_topk(scores, TOPK)

        def best(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
            scores = ((q @ keys.T).relu() * weights.unsqueeze(-1)).sum(1, dtype=torch.float32)
            return scores.topk(TOPK).indices.sort().values

        def composed(q: Tensor = q, weights: Tensor = weights) -> object:
            values = formats.dequantize_q4_ue8m0(cache[:, :64], cache[:, 64:])
            return best(q, weights, values.bfloat16())

        def dequantised(q: Tensor = q, weights: Tensor = weights) -> object:
            return best(q, weights, keys)

        yield Case(
            f"index select, top {TOPK} of {entries}", rows, own, composed,
            entries * 68 + rows * entries * 4, 2.0 * rows * heads * width * entries, dequantised,
        )  # fmt: skip


def streams() -> Iterator[Case]:
    outputs = (2 + STREAMS) * STREAMS
    fn = normal(outputs, STREAMS * WIDTH, dtype=torch.float32) * 0.01
    scale, base = torch.ones(3, device=DEVICE), torch.zeros(outputs, device=DEVICE)
    weight = torch.ones(WIDTH, device=DEVICE)
    constants: dict[str, Any] = {"norm_eps": 1e-20, "hc_eps": 1e-6, "num_iters": 20}
    for rows in ROWS:
        x, y = normal(rows, STREAMS, WIDTH), normal(rows, WIDTH)
        pre, post, comb = mix(x, fn, scale, base, **constants)
        row = 2.0 * WIDTH
        yield Case(
            "mhc mix", rows, lambda x=x: mix(x, fn, scale, base, **constants),
            lambda x=x: mix_truth(x, fn, scale, base, **constants),
            rows * STREAMS * row + fn.numel() * 4, 2.0 * rows * fn.numel(),
        )  # fmt: skip
        yield Case(
            "mhc expand", rows, lambda x=x, y=y, p=post, c=comb: expand(y, x, p, c),
            lambda x=x, y=y, p=post, c=comb: (
                torch.einsum("tij,tid->tjd", c, x.float()) + p.unsqueeze(-1) * y.unsqueeze(1)
            ).bfloat16(),
            rows * row * (2 * STREAMS + 1), 0.0,
        )  # fmt: skip
        yield Case(
            "mhc collapse and norm", rows,
            lambda x=x, p=pre: collapse_norm(x, p, weight, 1e-20),
            lambda x=x, p=pre: collapse_norm_truth(x, p, weight, 1e-20),
            rows * row * (STREAMS + 1), 0.0,
        )  # fmt: skip
        yield Case(
            "rmsnorm", rows, lambda y=y: rmsnorm(y, weight, 1e-20),
            lambda y=y: rmsnorm_truth(y, weight, 1e-20), 2 * rows * row, 0.0,
        )  # fmt: skip


def sampler() -> Iterator[Case]:
    for rows in ROWS[:2]:
        logits = torch.randn(rows, VOCAB, device=DEVICE)
        ones = torch.ones(rows, device=DEVICE)
        zeros = torch.zeros(rows, dtype=torch.int64, device=DEVICE)

        def own(logits: Tensor = logits, ones: Tensor = ones, zeros: Tensor = zeros) -> object:
            z = filter_logits(
                logits, temperature=ones, top_k=zeros, top_p=ones, min_p=zeros.float(),
                greedy=False, sorts=False,
            )  # fmt: skip
            return draw(
                z, temperature=ones, seeds=zeros, sample_index=zeros, positions=zeros, purpose=0
            )

        params = SampleParams(ones, zeros, ones, zeros.float(), zeros, zeros, zeros)

        def composed(logits: Tensor = logits, params: SampleParams = params) -> object:
            noise = gumbel_noise(params, Purpose.SAMPLE, VOCAB)
            return (logits.double() / params.temperature.unsqueeze(1) + noise).argmax(-1)

        yield Case(f"temperature sampling of {VOCAB}", rows, own, composed, rows * VOCAB * 4.0, 0.0)


def cases() -> Iterator[Case]:
    yield from dense("wq_a+wkv", 1792, 5120)
    yield from dense("wq_b", 32768, 1280)
    yield from dense("wo_b", 5120, 8192)
    yield from experts()
    yield from attention()
    yield from streams()
    yield from indexer()
    yield from head()
    yield from sampler()
