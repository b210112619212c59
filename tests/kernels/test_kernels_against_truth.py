"""Kernels against the plain torch that stands beside them, at shapes the op cases do not have."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from triton.runtime import interpreter as triton_interpreter

from deepinfer.device import formats
from deepinfer_kernels.attention import rope_triton, sparse_attention_triton
from deepinfer_kernels.compress import pair_triton
from deepinfer_kernels.engram import hash_triton, inject_triton
from deepinfer_kernels.indexer import scores_triton, select_triton
from deepinfer_kernels.kv import store_triton
from deepinfer_kernels.mhc import mix_triton, streams_triton
from deepinfer_kernels.moe import gate_triton, slots_triton, swiglu_triton
from deepinfer_kernels.norm import rmsnorm_triton
from deepinfer_kernels.quant import gemm_triton, quantize_triton
from deepinfer_kernels.quant.gemm_triton import Operand
from deepinfer_kernels.sampling import controls_triton, philox_triton, sample_triton
from deepinfer_kernels.spec import admit_triton, draft_triton, verify_triton
from deepinfer_kernels.state import correct_triton, plans_triton

DTYPES = [torch.float32, torch.bfloat16]


def table(positions: int, rotated: int) -> torch.Tensor:
    angles = torch.outer(
        torch.arange(positions).float(), 1e3 ** -torch.linspace(0, 1, rotated // 2)
    )
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def close(value: torch.Tensor, truth: torch.Tensor, tolerance: float = 2e-6) -> None:
    """Equal up to rounding: one bf16 step for bf16 results."""
    scale = float(truth.double().abs().max()) or 1.0
    step = 2.0**-8 if truth.dtype is torch.bfloat16 else tolerance
    assert float((value.double() - truth.double()).abs().max()) <= step * scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 1280])
def test_rmsnorm(generator: torch.Generator, dtype: torch.dtype, width: int) -> None:
    x = torch.randn(2, 3, width, generator=generator).to(dtype)
    weight = torch.rand(width, generator=generator)
    value = rmsnorm_triton.rmsnorm(x, weight, 1e-20)
    close(value, rmsnorm_triton.rmsnorm_truth(x, weight, 1e-20))


@pytest.mark.parametrize("inverse", [False, True])
def test_rope_of_a_strided_view(generator: torch.Generator, inverse: bool) -> None:
    x = torch.randn(4, 3, 96, generator=generator)[:, :, :64]
    positions = torch.tensor([0, 5, 63, 7])
    value = rope_triton.rope(x, positions, table(64, 16), inverse=inverse)
    close(value, rope_triton.rope_truth(x, positions, table(64, 16), inverse=inverse))


def test_quantised_activations_of_every_magnitude(generator: torch.Generator) -> None:
    x = torch.randn(64, 64, generator=generator) * torch.logspace(-6, 6, 64).unsqueeze(1)
    codes, scales = quantize_triton.quantize_a8(x)
    truth_codes, truth_scales = quantize_triton.quantize_a8_truth(x)
    assert torch.equal(scales, truth_scales)
    assert torch.equal(codes.view(torch.uint8), truth_codes.view(torch.uint8))


def test_rounded_activations_are_what_quantised_ones_hold(generator: torch.Generator) -> None:
    x = torch.randn(64, 64, generator=generator) * torch.logspace(-6, 6, 64).unsqueeze(1)
    assert torch.equal(quantize_triton.round_a8(x), quantize_triton.round_a8_truth(x))


def test_codes_are_refused_where_values_are_needed(generator: torch.Generator) -> None:
    left, right = operand(generator, "mxfp8", 4, 64), operand(generator, "mxfp8", 32, 64)
    with pytest.raises(ValueError, match="round_a8"):
        gemm_triton.gemm(left, right, torch.float32)


def operand(generator: torch.Generator, fmt: str, *shape: int) -> Operand:
    values = torch.randn(shape, generator=generator)
    if fmt == "mxfp8":
        codes, scales = formats.quantize_a8(values)
        return Operand(fmt, codes.view(torch.uint8), scales)
    if fmt == "mxfp4":
        return Operand(fmt, *formats.quantize_q4_ue8m0(values))
    return Operand("plain", values.to(torch.bfloat16 if fmt == "bf16" else torch.float32), None)


@pytest.mark.parametrize(
    ("x", "w", "inner"),
    [
        ("bf16", "mxfp8", 32),
        ("bf16", "mxfp8", 1056),  # several inner tiles and a remainder: the sum is split
        ("bf16", "mxfp4", 160),
        ("bf16", "bf16", 70),
        ("f32", "f32", 70),
        ("bf16", "f32", 64),
    ],
)
def test_product(generator: torch.Generator, x: str, w: str, inner: int) -> None:
    left = operand(generator, x, 35, inner)
    right = operand(generator, w, 72, inner)
    value = gemm_triton.gemm(left, right, torch.float32)
    close(value, gemm_triton.gemm_truth(left, right, torch.float32), 3e-6)


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
def test_dequantised_matrix_has_the_stored_values(generator: torch.Generator, fmt: str) -> None:
    stored = operand(generator, fmt, 3, 18, 288)
    values = gemm_triton.dequantize(stored)
    assert torch.equal(values.data.float(), gemm_triton.dequantize_truth(stored))


def test_block_diagonal_product(generator: torch.Generator) -> None:
    left, right = operand(generator, "bf16", 3, 2, 64), operand(generator, "bf16", 2, 40, 64)
    value = gemm_triton.gemm(left, right, torch.float32)
    close(value, gemm_triton.gemm_truth(left, right, torch.float32), 3e-6)


@pytest.mark.parametrize("num_rows", [1, 17, 33, 65, 129])  # one of every tile
def test_product_of_a_row_does_not_depend_on_its_company(
    generator: torch.Generator, num_rows: int
) -> None:
    left, right = operand(generator, "bf16", 520, 256), operand(generator, "mxfp8", 32, 256)
    whole = gemm_triton.gemm(left, right, torch.float32)
    part = Operand("plain", left.data[:num_rows], None)
    assert torch.equal(gemm_triton.gemm(part, right, torch.float32), whole[:num_rows])


@pytest.mark.parametrize("product", ["_gemm", "_gemm_described"])
@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
def test_product_of_many_rows_is_that_of_few(
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    fmt: str,
    product: str,
) -> None:
    left, right = operand(generator, "bf16", 130, 1056), operand(generator, fmt, 144, 1056)
    few = gemm_triton.gemm(left, right, torch.float32)  # three parts, as the matrix says
    tile = gemm_triton.Tile(rows=32, outputs=32, inner=64, num_warps=4)
    many = gemm_triton.MANY_ROWS._replace(
        rows=130, tile=tile, descriptors=product == "_gemm_described"
    )
    monkeypatch.setattr(gemm_triton, "MANY_ROWS", many)
    launched: Counter[str] = Counter()
    launch = triton_interpreter.GridExecutor.__call__

    def counted(executor, *arguments: object, **named: object) -> None:
        launched[executor.fn.__name__] += 1
        launch(executor, *arguments, **named)

    monkeypatch.setattr(triton_interpreter.GridExecutor, "__call__", counted)
    value = gemm_triton.gemm(left, right, torch.float32)
    assert launched == {"_dequantize": 1, product: 1, "_add_splits": 1}
    assert torch.equal(value, few)


def test_block_diagonal_product_of_many_rows_is_that_of_few(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = operand(generator, "bf16", 130, 2, 544), operand(generator, "mxfp8", 2, 40, 544)
    few = gemm_triton.gemm(left, right, torch.float32)
    monkeypatch.setattr(gemm_triton, "MANY_ROWS", gemm_triton.MANY_ROWS._replace(rows=130))
    assert torch.equal(gemm_triton.gemm(left, right, torch.float32), few)


@pytest.mark.parametrize(("offset", "inner"), [(0, 70), (4, 72)])
def test_matrix_that_has_no_descriptor(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, offset: int, inner: int
) -> None:
    """Its rows do not begin at multiples of 16 bytes."""
    monkeypatch.setattr(gemm_triton, "MANY_ROWS", gemm_triton.MANY_ROWS._replace(rows=130))
    memory = torch.randn(130 * inner + offset, generator=generator).bfloat16()
    left = Operand("plain", memory[offset:].view(130, inner), None)
    right = operand(generator, "bf16", 40, inner)
    value = gemm_triton.gemm(left, right, torch.float32)
    close(value, gemm_triton.gemm_truth(left, right, torch.float32), 3e-6)


@pytest.mark.parametrize("num_rows", [37, 400])
def test_slots_hold_every_valid_row_once(generator: torch.Generator, num_rows: int) -> None:
    num_experts, k = 5, 2
    ids = torch.rand(num_rows, num_experts, generator=generator).topk(k).indices
    weights = torch.rand(num_rows, k, generator=generator)
    physical = torch.randperm(num_experts, generator=generator) + 3
    valid = torch.rand(num_rows, generator=generator) < 0.8
    slots = slots_triton.place_rows(ids, weights, physical, valid)
    rows = len(slots.slot_rows) // len(slots.tile_experts)
    assert rows == (256 if num_rows == 400 else 16)
    found = [
        (int(row), int(slots.tile_experts[slot // rows]))
        for slot, row in enumerate(slots.slot_rows)
        if row >= 0
    ]
    assert found == slots_triton.place_rows_truth(ids, physical, valid)
    for row in range(num_rows):
        own = slots.row_slots[row]
        if not valid[row]:
            assert (own == -1).all()
            continue
        order = ids[row].argsort()
        assert slots.slot_rows[own.long()].tolist() == [row] * k
        assert torch.equal(slots.slot_weights[own.long()], weights[row][order])


def test_experts_are_chosen_as_by_sorting(generator: torch.Generator) -> None:
    logits = torch.randn(9, 24, generator=generator) * 8.0
    bias = torch.randn(24, generator=generator) * 0.1
    ids, weights = gate_triton.choose_experts(logits, bias, k=6, route_scale=1.5)
    truth_ids, truth_weights = gate_triton.choose_experts_truth(logits, bias, k=6, route_scale=1.5)
    assert torch.equal(ids, truth_ids)
    close(weights, truth_weights, 5e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_and_combine(generator: torch.Generator, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(19, 600, generator=generator) * 6.0).to(dtype)
    close(swiglu_triton.swiglu(gate_up, 10.0), swiglu_triton.swiglu_truth(gate_up, 10.0))
    outputs = torch.randn(48, 40, generator=generator).to(dtype)
    shared = torch.randn(7, 40, generator=generator).to(dtype)
    row_slots = torch.randint(-1, 48, (7, 3), generator=generator).int()
    value = swiglu_triton.combine(outputs, row_slots, shared)
    close(value, swiglu_triton.combine_truth(outputs, row_slots, shared))


@pytest.mark.parametrize("width", [64, 288])  # one split, and two with a remainder
def test_mixing(generator: torch.Generator, width: int) -> None:
    streams = torch.randn(5, 4, width, generator=generator)
    fn = torch.randn(24, 4 * width, generator=generator) * (4 * width) ** -0.5
    scale, base = torch.tensor([1.0, 0.7, 1.3]), torch.randn(24, generator=generator)
    value = mix_triton.mix(streams, fn, scale, base, norm_eps=1e-20, hc_eps=1e-6, num_iters=20)
    truth = mix_triton.mix_truth(
        streams, fn, scale, base, norm_eps=1e-20, hc_eps=1e-6, num_iters=20
    )
    for own, expected in zip(value, truth, strict=True):
        close(own, expected, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_streams(generator: torch.Generator, dtype: torch.dtype) -> None:
    streams = torch.randn(3, 4, 1100, generator=generator).to(dtype)
    y = torch.randn(3, 1100, generator=generator).to(dtype)
    post, comb = torch.rand(3, 4, generator=generator), torch.rand(3, 4, 4, generator=generator)
    weight = torch.rand(1100, generator=generator)
    close(
        streams_triton.expand(y, streams, post, comb),
        streams_triton.expand_truth(y, streams, post, comb),
    )
    mean = torch.full((3, 4), 0.25)
    close(streams_triton.collapse(streams, mean), streams.float().mean(1).to(dtype))
    close(
        streams_triton.collapse_norm(streams, post, weight, 1e-20),
        streams_triton.collapse_norm_truth(streams, post, weight, 1e-20),
    )


def test_attention_over_several_tiles_and_chunks(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows, heads, width = 2, 3, 512
    values = torch.randn(80, width, generator=generator)
    codes, scales = formats.quantize_a8(values)
    window = torch.cat((codes.view(torch.uint8), scales), dim=1)
    packed, small = formats.quantize_q4_e4m3(values)
    compressed = torch.cat((packed, small.view(torch.uint8)), dim=1)
    q = torch.randn(num_rows, heads, width, generator=generator).bfloat16()
    near = torch.randint(-1, 80, (num_rows, 70), generator=generator)
    far = torch.randint(-1, 80, (num_rows, 70), generator=generator)
    near[0, :64] = -1  # a tile without entries
    sink = torch.randn(heads, generator=generator)
    value = sparse_attention_triton.sparse_attention(
        q, window, near, compressed, far, sink=sink, scale=width**-0.5
    )
    # What many rows use: a program folds all tiles of a row.
    monkeypatch.setattr(sparse_attention_triton, "_SPLIT_PROGRAMS", 0)
    whole = sparse_attention_triton.sparse_attention(
        q, window, near, compressed, far, sink=sink, scale=width**-0.5
    )
    assert torch.equal(value, whole)
    held = (formats.dequantize_a8(codes, scales), formats.dequantize_q4_e4m3(packed, small))
    keys = torch.cat(
        [rows[slots.clamp_min(0)] for rows, slots in zip(held, (near, far), strict=True)], 1
    )
    truth = sparse_attention_triton.sparse_attention_truth(
        q, keys, torch.cat((near, far), 1) >= 0, sink=sink, scale=width**-0.5
    )
    error = (value.double() - truth.double()).norm() / truth.double().norm()
    assert error < 4e-3  # P is rounded to bf16 before the product with V


def test_wider_heads_than_compiled_for_are_refused() -> None:
    q = torch.zeros(1, 1, 1024).bfloat16()
    slots = torch.zeros(1, 1, dtype=torch.int64)
    rows = torch.zeros(1, 1056, dtype=torch.uint8)
    with pytest.raises(ValueError, match="heads have 1024 values, at most 512"):
        sparse_attention_triton.sparse_attention(
            q, rows, slots, None, None, sink=torch.zeros(1), scale=1.0
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [5, 40])  # one tile of heads, and two
def test_index_scores_of_several_tiles(
    generator: torch.Generator, dtype: torch.dtype, heads: int
) -> None:
    num_rows, width, entries = 2, 64, 150
    values = torch.randn(160, width, generator=generator)
    cache = values
    if dtype is torch.bfloat16:
        packed, scales = formats.quantize_q4_ue8m0(values)
        cache = torch.cat((packed, scales), dim=1)
        values = formats.dequantize_q4_ue8m0(packed, scales)
    q = torch.randn(num_rows, heads, width, generator=generator).to(dtype)
    weights = torch.randn(num_rows, heads, generator=generator).to(dtype)
    table_rows = torch.randperm(20, generator=generator).unsqueeze(0)
    value = scores_triton.index_scores(
        q, weights, cache, table_rows, torch.zeros(2, dtype=torch.int64),
        torch.tensor([entries, 70]), entries_per_block=8, max_visible=entries,
    )  # fmt: skip
    slots = table_rows[0].repeat_interleave(8)[:entries] * 8 + torch.arange(entries) % 8
    truth = scores_triton.index_scores_truth(q, weights, values[slots].expand(2, -1, -1))
    close(value[0], truth[0].bfloat16() if dtype is torch.bfloat16 else truth[0], 1e-5)
    assert (value[1, 70:] == -torch.inf).all()


def test_index_scores_of_rows_that_share_keys(generator: torch.Generator) -> None:
    width, entries = 64, 150
    packed, scales = formats.quantize_q4_ue8m0(torch.randn(480, width, generator=generator))
    q = torch.randn(27, 3, width, generator=generator).bfloat16()
    weights = torch.randn(27, 3, generator=generator).bfloat16()
    seq = torch.tensor([0] * 5 + [2] * 9 + [1] * 13)
    visible = torch.randint(1, entries + 1, (27,), generator=generator)

    def scores(rows: slice) -> torch.Tensor:
        return scores_triton.index_scores(
            q[rows], weights[rows], torch.cat((packed, scales), dim=1),
            torch.arange(60).view(3, 20), seq[rows], visible[rows], entries_per_block=8,
            max_visible=entries,
        )  # fmt: skip

    together = scores(slice(None))
    for row in range(27):
        assert torch.equal(scores(slice(row, row + 1))[0], together[row])


@pytest.mark.parametrize("columns", [37, 9000, 33000])  # rows in registers, and a long one
def test_selection_with_ties_across_blocks(generator: torch.Generator, columns: int) -> None:
    scores = torch.randn(4, columns, generator=generator)
    scores[1] = (scores[1] * 2.0).round() / 2.0
    scores[2, 5:] = -torch.inf
    scores[3] = 1.0
    value = select_triton.select_topk(scores, 33)
    assert torch.equal(value, select_triton.select_topk_truth(scores, 33))


def test_entry_slots(generator: torch.Generator) -> None:
    entries = torch.randint(-1, 24, (50, 30), generator=generator)
    seq = torch.randint(0, 3, (50,), generator=generator)
    blocks = torch.randint(-1, 9, (3, 6), generator=generator)
    value = store_triton.entry_slots(entries, seq, blocks, 4)
    assert torch.equal(value, store_triton.entry_slots_truth(entries, seq, blocks, 4))


def test_pairs_are_pooled(generator: torch.Generator) -> None:
    rows = torch.randn(6, 80, generator=generator)
    ring = torch.randn(4, 80, generator=generator)
    held = ring[2].clone()
    value = pair_triton.compress_pair(
        rows, torch.tensor([-1, 0, 1, 2, -1, 4]), torch.tensor([2, 0, 0, 0, 0, 0]),
        torch.tensor([-1, -1, -1, -1, 2, 3]), torch.tensor([0, 3, -1]), ring=ring,
        dtype=torch.float32,
    )  # fmt: skip
    truth = pair_triton.compress_pair_truth(torch.stack((held, rows[2])), rows[[0, 3]])
    close(value[:2], truth)
    assert (value[2] == 0).all()
    assert torch.equal(ring[2:], rows[4:])


def test_hash_of_an_ngram_is_that_of_plain_integers() -> None:
    multipliers = torch.tensor([[2**61 + 1, 2**60 + 7, 2**59 + 3]])
    primes = torch.tensor([[10007, 10009, 10037, 10039]])
    offsets = torch.tensor([[0, 10007, 20016, 30053]])
    token_map = torch.tensor([7, 3, 5, 0, 11, 2])
    ids, history = torch.tensor([4, 1, -1, 2]), torch.tensor([[5, -1]])
    value = hash_triton.ngram_hash(
        ids, history, torch.zeros(4, dtype=torch.int64), torch.arange(4), token_map=token_map,
        multipliers=multipliers, primes=primes, offsets=offsets, pad=9,
    )  # fmt: skip
    sequence = [*history[0].tolist(), *ids.tolist()]
    for row in range(4):
        recent = sequence[row : row + 3][::-1]
        compressed = [int(token_map[token]) if token >= 0 else -1 for token in recent]
        for column in range(4):
            truth = hash_triton.ngram_hash_truth(
                compressed[: 2 + column // 2],
                multipliers=multipliers[0].tolist(),
                prime=int(primes[0, column]),
                offset=int(offsets[0, column]),
                pad=9,
            )
            assert value[row, 0, column] == truth


@pytest.mark.parametrize("dtype", DTYPES)
def test_engram_rows_and_injection(generator: torch.Generator, dtype: torch.dtype) -> None:
    codes, scales = formats.quantize_row32(torch.randn(20, 64, generator=generator))
    rows = torch.randint(0, 20, (3, 4), generator=generator)
    fetched = inject_triton.fetch(codes.view(torch.uint8), scales, rows, dtype)
    assert torch.equal(fetched, inject_triton.fetch_truth(codes, scales, rows, dtype))
    streams = torch.randn(3, 2, 48, generator=generator).to(dtype)
    kv = torch.randn(3, 144, generator=generator).to(dtype)
    weight, dead = torch.rand(2, 48, generator=generator), torch.tensor([False, True, False])
    value = inject_triton.inject(streams, kv, weight, dead, eps=1e-20)
    close(value, inject_triton.inject_truth(streams, kv, weight, dead, eps=1e-20))


def test_rows_are_laid_out_as_by_a_loop() -> None:
    lens, contexts = [3, 0, 70, 1], [5, 9, 0, 2]
    rows = plans_triton.row_layout(torch.tensor(lens), torch.tensor(contexts), 80)
    columns = (rows.row_seq, rows.row_offset, rows.positions, rows.valid)
    found = list(zip(*(column.tolist() for column in columns), strict=True))
    assert found == plans_triton.row_layout_truth(lens, contexts, 80)
    assert rows.query_starts.tolist() == [0, 3, 3, 73, 74]


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_inputs_are_corrected_as_by_a_loop(generator: torch.Generator, num_drafts: int) -> None:
    lens, remap = [1 + num_drafts, 4, 1, 1 + num_drafts, 70], [2, -1, 0, 1, -1]
    total = sum(lens)
    host = correct_triton.Inputs(
        torch.arange(100, 100 + total + 5), torch.tensor(lens), torch.tensor([0, 7, 0, 0, 30]),
        torch.randint(0, 99, (5, 2), generator=generator),
    )  # fmt: skip
    results = correct_triton.Results(
        torch.randint(200, 299, (3, 1 + num_drafts), generator=generator),
        torch.randint(0, 1 + num_drafts, (3,), generator=generator),
        torch.tensor([40, 50, 60]), torch.randint(300, 399, (3, 2), generator=generator),
    )  # fmt: skip
    drafts = torch.randint(400, 499, (5, 3), generator=generator)
    drafts[3, 2:] = -1
    limits = [61, 9, 40, 99, 999]
    value = correct_triton.correct_inputs(
        host, drafts, torch.tensor(limits), torch.tensor(remap), results
    )
    truth = correct_triton.correct_inputs_truth(host, drafts, limits, remap, results)
    assert value.input_ids.tolist() == truth[0] + [0] * (total + 5 - len(truth[0]))
    assert value.query_lens.tolist() == truth[1]
    assert value.context_lens.tolist() == truth[2]
    assert value.history.tolist() == truth[3]


@pytest.mark.parametrize("decodes", [True, False])
def test_next_inputs_are_those_of_lists(decodes: bool) -> None:
    inputs = correct_triton.Inputs(
        torch.arange(100, 112), torch.tensor([4, 1, 0, 6]), torch.tensor([9, 0, 5, 20]),
        torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [-1, -1, 10]]),
    )  # fmt: skip
    seqs, accepted = [3, 0, 1, 2], [2, 0, 3, 0]
    contexts, history = correct_triton.next_inputs(
        inputs, torch.tensor(seqs), torch.tensor(accepted), decodes=decodes
    )
    for row, (seq, num_accepted) in enumerate(zip(seqs, accepted, strict=True)):
        truth = correct_triton.next_inputs_truth(inputs, seq, num_accepted, decodes=decodes)
        assert (int(contexts[row]), history[row].tolist()) == truth


def test_draft_blocks_lie_where_a_loop_puts_them() -> None:
    anchors, slots, floors = [3, 40, 9], [2, 0, 1], [0, 30, 0]
    valid = torch.tensor([True, True, False])
    positions, write, read, rows = draft_triton.draft_plan(
        torch.tensor(anchors), torch.tensor(slots), torch.tensor(floors), valid, block_size=4,
        window=8, ring=13,
    )  # fmt: skip
    for seq in range(2):
        part = slice(4 * seq, 4 * seq + 4)
        truth = draft_triton.draft_plan_truth(
            anchors[seq], slots[seq], floors[seq], block_size=4, window=8, ring=13
        )
        assert positions[part].tolist() == truth[0]
        assert write[part].tolist() == truth[1]
        assert read[part].tolist() == [truth[2]] * 4
    assert (write[8:] == -1).all()
    assert (read[8:] == -1).all()
    assert rows.tolist() == [True] * 8 + [False] * 4


def test_draft_context_keeps_final_rows_only() -> None:
    value = draft_triton.draft_context(
        torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2, 0, 1, 0]),
        torch.tensor([5, 6, 7, 0, 1, 0]), torch.tensor([True] * 5 + [False]),
        torch.tensor([2, 5]), torch.tensor([1, 3]), ring=4,
    )  # fmt: skip
    # Of the second request the first row is older than a ring of its 5 final rows.
    assert value.tolist() == [4 + 1, 4 + 2, -1, -1, 12 + 1, -1]


def test_drafts_are_accepted_as_by_a_loop(generator: torch.Generator) -> None:
    num_seqs, num_drafts, vocab = 12, 3, 700
    rows = torch.arange(num_seqs * (1 + num_drafts))
    target = torch.randn(len(rows), vocab, generator=generator)
    drafter = torch.randn(num_seqs, num_drafts, vocab, generator=generator)
    ids = torch.randint(0, vocab, (num_seqs, num_drafts), generator=generator)
    tokens, accepted = verify_triton.verify_drafts(
        target, temperature=torch.full(rows.shape, 0.7), seeds=rows * 31, sample_index=rows,
        positions=rows + 9, query_starts=torch.arange(0, len(rows) + 1, 1 + num_drafts),
        draft_ids=ids, draft_logits=drafter,
    )  # fmt: skip
    shares = torch.softmax(target, -1).view(num_seqs, 1 + num_drafts, vocab)
    proposed = torch.softmax(drafter / 0.7, -1)
    uniforms = philox_triton.uniform(rows * 31, rows, rows + 9, 2, 1).view(num_seqs, -1)
    for seq in range(num_seqs):
        truth = verify_triton.accepted_truth(
            shares[seq], proposed[seq], uniforms[seq].tolist(), ids[seq].tolist()
        )
        assert int(accepted[seq]) == truth
        assert tokens[seq, :truth].tolist() == ids[seq, :truth].tolist()
        assert (tokens[seq, 1 + truth :] == -1).all()
    assert accepted.unique().numel() > 2


def test_probability_is_a_tempered_sigmoid(generator: torch.Generator) -> None:
    logit = torch.randn(300, generator=generator) * 8.0
    temperature = torch.rand(300, generator=generator) + 0.5
    close(draft_triton.probability(logit, temperature), torch.sigmoid(logit / temperature))


@pytest.mark.parametrize("num_drafts", [1, 8])
@pytest.mark.parametrize("budget", [0, 7, 300])
def test_admitted_drafts_are_the_first_of_a_sort(
    generator: torch.Generator, num_drafts: int, budget: int
) -> None:
    # More drafts than a tile, many of them equal.
    confidences = torch.randint(1, 5, (90, num_drafts), generator=generator) / 4.0
    survival = confidences.cumprod(1)
    available = torch.randint(0, num_drafts + 1, (90,), generator=generator)
    value = admit_triton.admit_drafts(survival, available, torch.tensor([budget]), floor=2.0**-5)
    truth = admit_triton.admit_drafts_truth(survival, available, budget, floor=2.0**-5)
    assert value.tolist() == truth


def test_random_numbers_are_those_of_plain_integers() -> None:
    seed, sample, position = -(2**63) + 12345, 3, 2**32 - 1
    value = philox_triton.uniform(
        torch.tensor([seed]), torch.tensor([sample]), torch.tensor([position]), 4, 11
    )
    for column in range(11):
        assert value[0, column] == philox_triton.uniform_truth(seed, sample, position, 4, column)


def test_penalties(generator: torch.Generator) -> None:
    logits = torch.randn(1, 50, generator=generator) * 4.0
    counts = torch.randint(0, 3, (2, 50), generator=generator).int()
    seen = torch.rand(2, 50, generator=generator) < 0.3
    pending = torch.tensor([[7, -1, 7, 30]])
    counted = counts[1] + torch.bincount(pending[pending >= 0], minlength=50)
    truth = controls_triton.penalise_truth(logits[0], 1.3, 0.5, 0.25, counted, seen[1])
    controls_triton.penalise(
        logits, repetition=torch.tensor([1.3]), presence=torch.tensor([0.5]),
        frequency=torch.tensor([0.25]), slots=torch.tensor([1]), output_counts=counts,
        prompt_seen=seen, pending=pending,
    )  # fmt: skip
    close(logits[0], truth)


def test_draws_are_those_of_float64_noise(generator: torch.Generator) -> None:
    logits = torch.randn(40, 3000, generator=generator)
    numbers = torch.arange(40)
    value = sample_triton.draw(
        logits, temperature=torch.ones(40), seeds=numbers * 977, sample_index=numbers,
        positions=numbers + 5, purpose=1,
    )  # fmt: skip
    uniforms = philox_triton.uniform(numbers * 977, numbers, numbers + 5, 1, 3000)
    assert torch.equal(value, sample_triton.draw_truth(logits, uniforms))
