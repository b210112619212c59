"""A row's bits do not depend on the rows computed with it, at the thread counts streams use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from deepinfer.device.backend import Backend, CacheKind
from deepinfer.device.numerics import Numerics
from deepinfer.device.ops import (
    attention,
    compress,
    engram,
    indexer,
    mhc,
    moe,
    norm,
    quant,
    sampling,
    spec,
)
from deepinfer.device.ops.mhc import MhcWeights
from deepinfer.device.samples import draws
from deepinfer.device.weights import WeightFormat
from deepinfer_reference.backend import ReferenceBackend
from deepinfer_reference.gemm import in_whole_vectors

ROWS = 150  # with GATE_WIDTH columns: enough values for torch to split them over threads
GROUPS = (1, 2, 3, 5, 7, 8, 16, 17, 33)
WIDTH = 1056  # no multiple of the inner piece, and beyond two of them
GATE_WIDTH = 510  # no multiple of a vector
STREAMS = 4
HEADS = 3

# What an op gives for some rows, in ascending order; built once per numerics and thread count.
RowsFunction = Callable[[Tensor], Sequence[Tensor]]
Build = Callable[[Backend, torch.Generator], RowsFunction]


def _draw(backend: Backend, generator: torch.Generator, *shape: int) -> Tensor:
    dtype = draws.activation_dtype(backend.numerics)
    return draws.normal(generator, *shape, dtype=dtype)


def _linear(fmt: WeightFormat) -> Build:
    def build(backend: Backend, generator: torch.Generator) -> RowsFunction:
        x = _draw(backend, generator, ROWS, WIDTH)
        weight = backend.pack_linear([draws.matrix(generator, 96, WIDTH, fmt)])
        return lambda rows: (backend.ops[quant.linear](x[rows], weight),)

    return build


def _linear_f32(backend: Backend, generator: torch.Generator) -> RowsFunction:
    x = _draw(backend, generator, ROWS, WIDTH)
    weight = backend.pack_linear([draws.matrix(generator, 33, WIDTH, WeightFormat.BF16)])
    return lambda rows: (backend.ops[quant.linear_f32](x[rows], weight),)


def _grouped_linear(backend: Backend, generator: torch.Generator) -> RowsFunction:
    x = _draw(backend, generator, ROWS, 2, WIDTH)
    matrix = draws.matrix(generator, 2 * 64, WIDTH, WeightFormat.BF16)
    weight = backend.pack_grouped(matrix, 2)
    return lambda rows: (backend.ops[quant.grouped_linear](x[rows], weight),)


def _rmsnorm(backend: Backend, generator: torch.Generator) -> RowsFunction:
    x = _draw(backend, generator, ROWS, WIDTH)
    weight = 1 + draws.normal(generator, WIDTH)
    return lambda rows: (backend.ops[norm.rmsnorm](x[rows], weight, 1e-6),)


def _mhc_mix(backend: Backend, generator: torch.Generator) -> RowsFunction:
    streams = _draw(backend, generator, ROWS, STREAMS, WIDTH)
    mixes = STREAMS * (STREAMS + 2)
    fn = draws.normal(generator, mixes, STREAMS * WIDTH) / WIDTH**0.5
    weights = MhcWeights(fn, draws.normal(generator, 3), draws.normal(generator, mixes))
    run = backend.ops[mhc.mhc_mix]
    return lambda rows: run(streams[rows], weights, norm_eps=1e-6, hc_eps=1e-6, num_iters=20)


def _mhc_collapse(backend: Backend, generator: torch.Generator) -> RowsFunction:
    streams = _draw(backend, generator, ROWS, STREAMS, WIDTH)
    pre = torch.rand((ROWS, STREAMS), generator=generator)
    return lambda rows: (backend.ops[mhc.mhc_collapse](streams[rows], pre[rows]),)


def _mhc_collapse_norm(backend: Backend, generator: torch.Generator) -> RowsFunction:
    streams = _draw(backend, generator, ROWS, STREAMS, WIDTH)
    pre = torch.rand((ROWS, STREAMS), generator=generator)
    weight = 1 + draws.normal(generator, WIDTH)
    run = backend.ops[mhc.mhc_collapse_norm]
    return lambda rows: (run(streams[rows], pre[rows], weight, 1e-6),)


def _mhc_expand(backend: Backend, generator: torch.Generator) -> RowsFunction:
    y = _draw(backend, generator, ROWS, WIDTH)
    streams = _draw(backend, generator, ROWS, STREAMS, WIDTH)
    post = torch.rand((ROWS, STREAMS), generator=generator)
    comb = torch.rand((ROWS, STREAMS, STREAMS), generator=generator)
    run = backend.ops[mhc.mhc_expand]
    return lambda rows: (run(y[rows], streams[rows], post[rows], comb[rows]),)


def _attention(num_heads: int) -> Build:
    """More keys than the inner piece; rows see different numbers of them."""

    def build(backend: Backend, generator: torch.Generator) -> RowsFunction:
        width, num_slots = 64, 800
        q = _draw(backend, generator, ROWS, num_heads, width)
        window, chosen = (
            backend.create_cache(kind, num_slots, width)
            for kind in (CacheKind.WINDOW, CacheKind.COMPRESSED)
        )
        every = torch.arange(num_slots)
        window.pack(every, draws.normal(generator, num_slots, width).bfloat16().float())
        chosen.pack(every, draws.normal(generator, num_slots, width).bfloat16().float())
        window_slots = draws.integers(generator, num_slots, ROWS, 40)
        chosen_slots = draws.integers(generator, num_slots, ROWS, 550)
        chosen_slots[torch.arange(550) > 4 * torch.arange(ROWS).unsqueeze(1)] = -1
        sink = draws.normal(generator, num_heads)
        run = backend.ops[attention.sparse_attention]
        return lambda rows: (
            run(
                q[rows],
                window,
                window_slots[rows],
                chosen,
                chosen_slots[rows],
                sink=sink,
                scale=width**-0.5,
            ),
        )

    return build


def _index_scores(backend: Backend, generator: torch.Generator) -> RowsFunction:
    """Rows see twice their number of entries; fewer columns are computed for early rows."""
    width, per_block = 64, 8
    num_blocks = -(-2 * ROWS // per_block)
    num_slots = num_blocks * per_block
    q = _draw(backend, generator, ROWS, HEADS, width)
    head_weights = _draw(backend, generator, ROWS, HEADS)
    cache = backend.create_cache(CacheKind.INDEX, num_slots, width)
    keys = draws.normal(generator, num_slots, width)
    keys = draws.representable(keys, CacheKind.INDEX, backend.numerics)
    cache.pack(torch.arange(num_slots), keys)
    table = torch.randperm(num_blocks, generator=generator).unsqueeze(0)

    def run(rows: Tensor) -> Sequence[Tensor]:
        visible = 2 * (rows + 1)
        most = int(visible.max())
        scores = backend.ops[indexer.index_scores](
            q[rows],
            head_weights[rows],
            cache,
            table,
            torch.zeros_like(rows),
            visible,
            entries_per_block=per_block,
            max_visible=most,
            max_query_len=rows.shape[0],
        )
        missing = 2 * ROWS - most
        return (torch.nn.functional.pad(scores, (0, missing), value=-torch.inf),)

    return run


def _moe(fmt: WeightFormat) -> Build:
    """Gate, dispatch, experts and combine, with a quarter of the rows invalid."""

    def build(backend: Backend, generator: torch.Generator) -> RowsFunction:
        num_experts, inner = 6, 544
        x = _draw(backend, generator, ROWS, WIDTH)
        shared = _draw(backend, generator, ROWS, WIDTH)
        gate = backend.pack_linear([draws.matrix(generator, num_experts, WIDTH, WeightFormat.BF16)])
        bias = 0.1 * draws.normal(generator, num_experts)
        gates, ups, downs = (
            [draws.matrix(generator, rows, cols, fmt) for _ in range(num_experts)]
            for rows, cols in ((inner, WIDTH), (inner, WIDTH), (WIDTH, inner))
        )
        experts = backend.pack_experts(gates, ups, downs)
        valid = torch.rand(ROWS, generator=generator) > 0.25
        physical = torch.randperm(num_experts, generator=generator)
        ops = backend.ops

        def run(rows: Tensor) -> Sequence[Tensor]:
            routing = ops[moe.moe_gate](x[rows], gate, bias, num_experts_per_tok=3, route_scale=1.5)
            batch = ops[moe.moe_dispatch](x[rows], routing, physical, valid[rows])
            slots = ops[moe.moe_experts](batch, experts, 7.0)
            return *routing, ops[moe.moe_combine](slots, batch, shared[rows])

        return run

    return build


def _moe_gate(backend: Backend, generator: torch.Generator) -> RowsFunction:
    """A gate as wide as a real one, so that its scores are split over threads."""
    x = _draw(backend, generator, ROWS, WIDTH)
    matrix = draws.matrix(generator, GATE_WIDTH, WIDTH, WeightFormat.BF16)
    gate, bias = backend.pack_linear([matrix]), torch.zeros(GATE_WIDTH)
    run = backend.ops[moe.moe_gate]
    return lambda rows: run(x[rows], gate, bias, num_experts_per_tok=GATE_WIDTH, route_scale=1.5)


def _swiglu(backend: Backend, generator: torch.Generator) -> RowsFunction:
    gate_up = 4 * _draw(backend, generator, ROWS, 2 * GATE_WIDTH)
    return lambda rows: (backend.ops[moe.swiglu](gate_up[rows], 7.0),)


def _engram_inject(backend: Backend, generator: torch.Generator) -> RowsFunction:
    streams = _draw(backend, generator, ROWS, STREAMS, WIDTH)
    kv = _draw(backend, generator, ROWS, (STREAMS + 1) * WIDTH)
    weight = draws.normal(generator, STREAMS, WIDTH)
    dead = torch.rand(ROWS, generator=generator) < 0.2
    run = backend.ops[engram.engram_inject]
    return lambda rows: (run(streams[rows], kv[rows], weight, dead[rows], eps=1e-6),)


def _compress_pair(backend: Backend, generator: torch.Generator) -> RowsFunction:
    """Every row completes a pair whose first half is in the ring."""
    values_gates = draws.normal(generator, ROWS, 2 * GATE_WIDTH)
    ring = draws.normal(generator, ROWS, 2 * GATE_WIDTH)
    like = _draw(backend, generator, 1)

    def run(rows: Tensor) -> Sequence[Tensor]:
        absent, emit = torch.full_like(rows, -1), torch.arange(rows.shape[0])
        pooled = backend.ops[compress.compress_pair](
            values_gates[rows], absent, rows, absent, emit, ring=ring, like=like
        )
        return (pooled,)

    return run


def _token_logprobs(backend: Backend, generator: torch.Generator) -> RowsFunction:
    logits = 5 * draws.normal(generator, ROWS, GATE_WIDTH)
    ids = draws.integers(generator, GATE_WIDTH, ROWS)
    return lambda rows: backend.ops[sampling.token_logprobs](logits[rows], ids[rows], 3)


def _markov_step(backend: Backend, generator: torch.Generator) -> RowsFunction:
    vocab, rank = GATE_WIDTH, 40
    base = draws.normal(generator, ROWS, vocab)
    tokens = draws.integers(generator, vocab, ROWS)
    matrix = draws.matrix(generator, vocab, rank, WeightFormat.BF16)
    table, head = backend.pack_embedding(matrix), backend.pack_linear([matrix])
    return lambda rows: backend.ops[spec.markov_step](base[rows], tokens[rows], table, head)


def _draft_confidence(backend: Backend, generator: torch.Generator) -> RowsFunction:
    rank = 40
    hidden = _draw(backend, generator, ROWS, WIDTH)
    features = _draw(backend, generator, ROWS, rank)
    matrix = draws.matrix(generator, 1, WIDTH + rank, WeightFormat.BF16)
    weight = backend.pack_linear([matrix])
    scales = 0.5 + torch.rand(ROWS, generator=generator)
    run = backend.ops[spec.draft_confidence]
    return lambda rows: run(hidden[rows], features[rows], weight, scales[rows])


CASES: dict[str, Build] = {
    "linear-bf16": _linear(WeightFormat.BF16),
    "linear-fp8": _linear(WeightFormat.FP8_TILE32),
    "linear_f32": _linear_f32,
    "grouped_linear": _grouped_linear,
    "rmsnorm": _rmsnorm,
    "mhc_mix": _mhc_mix,
    "mhc_collapse": _mhc_collapse,
    "mhc_collapse_norm": _mhc_collapse_norm,
    "mhc_expand": _mhc_expand,
    "sparse_attention-heads=3": _attention(3),
    "sparse_attention-heads=16": _attention(16),
    "index_scores": _index_scores,
    "moe_gate": _moe_gate,
    "moe-mxfp4": _moe(WeightFormat.MXFP4),
    "moe-bf16": _moe(WeightFormat.BF16),
    "swiglu": _swiglu,
    "engram_inject": _engram_inject,
    "compress_pair": _compress_pair,
    "markov_step": _markov_step,
    "draft_confidence": _draft_confidence,
    "token_logprobs": _token_logprobs,
}


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of intra-op threads; undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _groups(size: int) -> Iterator[Tensor]:
    """First and last rows, and rows around the borders of a third of all rows."""
    for start in (0, size, ROWS // 3, 2 * ROWS // 3, ROWS - size):
        yield torch.arange(start, start + size)


@pytest.mark.parametrize("threads", [1, 2], ids=lambda count: f"threads={count}")
@pytest.mark.parametrize("numerics", list(Numerics), ids=lambda mode: mode.value)
@pytest.mark.parametrize("build", CASES.values(), ids=CASES.keys())
def test_rows_have_the_same_bits_in_any_group(
    backends: dict[Numerics, ReferenceBackend],
    set_threads: Callable[[int], None],
    build: Build,
    numerics: Numerics,
    threads: int,
) -> None:
    set_threads(threads)
    function = build(backends[numerics], torch.Generator().manual_seed(7))
    whole = list(function(torch.arange(ROWS)))
    for size in GROUPS:
        for rows in _groups(size):
            for alone, together in zip(function(rows), whole, strict=True):
                assert torch.equal(alone, together[rows]), f"rows {rows.tolist()}"


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("function", [torch.sigmoid, silu, softplus, torch.exp])
def test_elementwise_functions_do_not_show_the_number_of_values(
    set_threads: Callable[[int], None], function: Callable[[Tensor], Tensor], threads: int
) -> None:
    set_threads(threads)
    # Without care, torch makes two, three or four parts of these, each with a tail of its own.
    counts = (66544, 96256, 131200)
    x = 4 * draws.normal(torch.Generator().manual_seed(7), max(counts))
    pieces = [in_whole_vectors(function, piece) for piece in x.split(1000)]
    expected = torch.cat(pieces)
    for count in (1, 17, 999, *counts):
        assert torch.equal(in_whole_vectors(function, x[:count]), expected[:count]), count
