"""From logits to tokens: filters, Gumbel-max with shared random numbers, log probabilities.

Draws, maxima and checks split a row in parts of fixed length, a program each; a second program
takes the best of the parts, of equal ones the first. Sums walk over a row in one program. Either
way a row's result does not depend on its company. Sorting (top-k, top-p, most likely tokens) is
torch's stable device sort.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.compile_case import CompileCase
from deepinfer_kernels.sampling.philox_triton import philox_block

# A row is one program's work: wide blocks keep many loads in flight.
_COLUMNS = 8192
_WARPS = 16
_PART = 1024
_BAD, _USABLE = tl.constexpr(2), tl.constexpr(1)


@triton.jit
def _largest(value, place):
    """Largest value of a block and the lowest of its places; NaN counts as -inf."""
    value = tl.where(value > float("-inf"), value, float("-inf"))
    top = tl.max(value, axis=0)
    return top, tl.min(tl.where(value == top, place, 0x7FFFFFFF), axis=0)


@triton.jit
def _largest_part(tops_ptr, places_ptr, row, num_parts, PARTS: tl.constexpr):
    """Largest value of a row and its first column, from those of its parts."""
    part = tl.arange(0, PARTS)
    inside = part < num_parts
    tops = tl.load(tops_ptr + row * num_parts + part, mask=inside, other=float("-inf"))
    places = tl.load(places_ptr + row * num_parts + part, mask=inside, other=0x7FFFFFFF)
    return _largest(tops, places)


@triton.jit
def _best(logits_ptr, vocab, COLUMNS: tl.constexpr):
    """Largest value of a row and its first column, walking over the row."""
    offset = tl.arange(0, COLUMNS)
    value = tl.full([COLUMNS], float("-inf"), tl.float32)
    place = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, vocab, COLUMNS):
        column = start + offset
        logits = tl.load(logits_ptr + column, mask=column < vocab, other=float("-inf"))
        better = logits > value
        value = tl.where(better, logits, value)
        place = tl.where(better, column, place)
    top = tl.max(value, axis=0)
    first = tl.min(tl.where(value == top, place, 0x7FFFFFFF), axis=0)
    # A row of NaN equals nothing: any valid column will do.
    return top, tl.where(first == 0x7FFFFFFF, 0, first)


@triton.jit
def gumbel(u):
    """-log(-log1p(-u)) for u in (0, 1)."""
    # log1p by its series below 1/16, where 1 - u would lose the digits of u.
    series = u * (
        1.0 + u * (0.5 + u * (1.0 / 3.0 + u * (0.25 + u * (0.2 + u * (1.0 / 6.0 + u / 7.0)))))
    )
    exponential = tl.where(u < 0.0625, series, -tl.log(1.0 - u))
    return -tl.log(exponential)


@triton.jit
def _part_best(logits_ptr, tops_ptr, places_ptr, vocab, num_parts, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    logits = tl.load(logits_ptr + row * vocab + column, mask=column < vocab, other=float("-inf"))
    top, place = _largest(logits, column)
    tl.store(tops_ptr + row * num_parts + part, top)
    tl.store(places_ptr + row * num_parts + part, place)


@triton.jit
def _row_best(tops_ptr, places_ptr, out_ptr, num_parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, place = _largest_part(tops_ptr, places_ptr, row, num_parts, PARTS)
    tl.store(out_ptr + row, place.to(tl.int64))


@triton.jit
def _scale(
    logits_ptr, tops_ptr, places_ptr, temperature_ptr, min_p_ptr, out_ptr, vocab, num_parts,
    GREEDY: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    logits = tl.load(logits_ptr + row * vocab + column, mask=column < vocab, other=float("-inf"))
    top, place = _largest_part(tops_ptr, places_ptr, row, num_parts, PARTS)
    temperature = tl.load(temperature_ptr + row)
    is_greedy = temperature == 0.0
    if GREEDY:
        is_greedy = temperature == temperature
    divisor = tl.where(is_greedy, 1.0, temperature)
    min_p = tl.load(min_p_ptr + row)
    z = tl.div_rn(logits - top, tl.zeros([COLUMNS], tl.float32) + divisor)
    z = tl.where(tl.exp(z) < min_p, float("-inf"), z)
    one_hot = tl.where(column == place, 0.0, float("-inf"))
    z = tl.where(is_greedy, one_hot, z)
    tl.store(out_ptr + row * vocab + column, z, mask=column < vocab)


@triton.jit
def _num_kept(
    sorted_ptr, temperature_ptr, top_k_ptr, top_p_ptr, kept_ptr, vocab, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    base = sorted_ptr + row * vocab
    temperature = tl.load(temperature_ptr + row)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    top = tl.load(base)
    top_k = tl.load(top_k_ptr + row)
    limit = tl.where((top_k > 0) & (top_k < vocab), top_k, vocab).to(tl.int32)
    offset = tl.arange(0, COLUMNS)
    total = tl.zeros([1], tl.float64)
    for start in range(0, vocab, COLUMNS):
        column = start + offset
        logits = tl.load(base + column, mask=column < limit, other=float("-inf"))
        z = tl.div_rn(logits - top, tl.zeros([COLUMNS], tl.float32) + divisor)
        weight = tl.where(column < limit, tl.exp(z), 0.0).to(tl.float64)
        total += tl.sum(weight, axis=0)
    # fp32 top_p times the sum, both in fp64, as the contract's "reaches" needs.
    wanted = tl.load(top_p_ptr + row).to(tl.float64) * total
    everything = tl.load(top_p_ptr + row) >= 1.0
    before = tl.zeros([1], tl.float64)
    kept = tl.zeros([1], tl.int32)
    for start in range(0, vocab, COLUMNS):
        column = start + offset
        logits = tl.load(base + column, mask=column < limit, other=float("-inf"))
        z = tl.div_rn(logits - top, tl.zeros([COLUMNS], tl.float32) + divisor)
        weight = tl.where(column < limit, tl.exp(z), 0.0).to(tl.float64)
        reached = before + tl.cumsum(weight, axis=0) - weight
        stays = (column < limit) & (everything | (reached < wanted))
        kept += tl.sum(stays.to(tl.int32), axis=0)
        before += tl.sum(weight, axis=0)
    kept = tl.maximum(kept, 1)
    tl.store(kept_ptr + row + tl.arange(0, 1), kept)


@triton.jit
def _cut(z_ptr, order_ptr, kept_ptr, temperature_ptr, vocab, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    cut = (column < vocab) & (column >= tl.load(kept_ptr + row))
    cut = cut & (tl.load(temperature_ptr + row) != 0.0)
    token = tl.load(order_ptr + row * vocab + column, mask=cut, other=0)
    removed = tl.full([COLUMNS], float("-inf"), tl.float32)
    tl.store(z_ptr + row * vocab + token, removed, mask=cut)


@triton.jit(do_not_specialize=["purpose"])
def _part_draw(
    z_ptr, temperature_ptr, seeds_ptr, samples_ptr, positions_ptr, tops_ptr, places_ptr, purpose,
    vocab, num_parts, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    start = part * COLUMNS
    column = start + tl.arange(0, COLUMNS)
    z = tl.load(z_ptr + row * vocab + column, mask=column < vocab, other=float("-inf"))
    seed = tl.load(seeds_ptr + row)
    sample = tl.load(samples_ptr + row)
    position = tl.load(positions_ptr + row)
    is_greedy = tl.load(temperature_ptr + row) == 0.0
    noise = gumbel(philox_block(seed, sample, position, purpose, start, COLUMNS))
    top, place = _largest(z + tl.where(is_greedy, 0.0, noise), column)
    tl.store(tops_ptr + row * num_parts + part, top)
    tl.store(places_ptr + row * num_parts + part, place)


@triton.jit
def _logprobs(
    logits_ptr, ids_ptr, chosen_ptr, rank_ptr, normalizer_ptr, vocab, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * vocab
    top, _ = _best(base, vocab, COLUMNS)
    token = tl.load(ids_ptr + row)
    own = tl.load(base + token)
    offset = tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    ahead = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, vocab, COLUMNS):
        column = start + offset
        inside = column < vocab
        logits = tl.load(base + column, mask=inside, other=float("-inf"))
        total += tl.where(inside, tl.exp(logits - top), 0.0)
        better = inside & ((logits > own) | ((logits == own) & (column < token)))
        ahead += better.to(tl.int32)
    normalizer = top + tl.log(tl.sum(total, axis=0))
    tl.store(normalizer_ptr + row, normalizer)
    tl.store(chosen_ptr + row, own - normalizer)
    tl.store(rank_ptr + row, tl.sum(ahead, axis=0).to(tl.int64) + 1)


@triton.jit
def _part_finite(logits_ptr, found_ptr, vocab, num_parts, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    logits = tl.load(logits_ptr + row * vocab + column, mask=column < vocab, other=float("-inf"))
    below = logits < float("inf")  # false for NaN too
    bad = tl.max((~below).to(tl.int32), axis=0)
    usable = tl.max((below & (logits > float("-inf"))).to(tl.int32), axis=0)
    tl.store(found_ptr + row * num_parts + part, bad * _BAD + usable * _USABLE)


@triton.jit
def _row_finite(found_ptr, out_ptr, num_parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    found = tl.load(found_ptr + row * num_parts + part, mask=part < num_parts, other=0)
    tl.store(out_ptr + row, (tl.max(found, axis=0) < _BAD) & (tl.max(found & _USABLE, axis=0) > 0))


def _block(vocab: int) -> dict[str, int]:
    """Columns that a program takes at once, and its warps."""
    columns = min(_COLUMNS, max(16, triton.next_power_of_2(vocab)))
    return {"COLUMNS": columns, "num_warps": _WARPS if columns == _COLUMNS else 4}


class _Parts(NamedTuple):
    """Parts of rows of logits, and their best values.

    Attributes:
        tops: [N, num_parts] fp32 largest value.
        places: [N, num_parts] int32 its first column.
        columns: of a part.
        block: num_parts as a power of two.
    """

    tops: Tensor
    places: Tensor
    columns: int
    block: int

    @property
    def grid(self) -> tuple[int, int]:
        """Rows, and parts of each."""
        num_rows, num_parts = self.tops.shape
        return num_rows, num_parts

    @classmethod
    def of(cls, logits: Tensor) -> _Parts:
        """Uninitialised, for rows of logits [N, V]."""
        num_rows, vocab = logits.shape
        columns = min(_PART, max(16, triton.next_power_of_2(vocab)))
        num_parts = triton.cdiv(vocab, columns)
        tops = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
        places = torch.empty_like(tops, dtype=torch.int32)
        return cls(tops, places, columns, triton.next_power_of_2(num_parts))

    @classmethod
    def best_of(cls, logits: Tensor) -> _Parts:
        """Of contiguous logits [N, V]; N, V >= 1."""
        parts = cls.of(logits)
        _part_best[parts.grid](
            logits, parts.tops, parts.places, logits.shape[1], parts.grid[1],
            COLUMNS=parts.columns,
        )  # fmt: skip
        return parts

    def first(self) -> Tensor:
        """[N] int64 column of the largest value of each row, the first among equals."""
        out = torch.empty(self.grid[0], dtype=torch.int64, device=self.tops.device)
        _row_best[(self.grid[0],)](self.tops, self.places, out, self.grid[1], PARTS=self.block)
        return out


def argmax(logits: Tensor) -> Tensor:
    """[N] int64 column of the largest of logits [N, V] fp32, the first among equals."""
    if logits.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    return _Parts.best_of(logits.contiguous()).first()


def filter_logits(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    greedy: bool,
    sorts: bool,
) -> Tensor:
    """Logits of the distribution that each row is drawn from, relative to the row's maximum.

    Args:
        logits: [N, V] fp32.
        temperature: [N] fp32; 0 keeps the first most likely token only.
        top_k: [N] int64; 0 keeps all.
        top_p: [N] fp32; 1 keeps all.
        min_p: [N] fp32.
        greedy: every temperature is 0.
        sorts: some row uses top_k or top_p.

    Returns:
        [N, V] fp32, -inf where removed.
    """
    logits = logits.contiguous()
    num_rows, vocab = logits.shape
    out = torch.empty_like(logits)
    if out.numel() == 0:
        return out
    temperature = temperature.contiguous()
    parts = _Parts.best_of(logits)
    _scale[parts.grid](
        logits, parts.tops, parts.places, temperature, min_p.contiguous(), out, vocab,
        parts.grid[1], GREEDY=greedy, COLUMNS=parts.columns, PARTS=parts.block,
    )  # fmt: skip
    if sorts and not greedy:
        block = _block(vocab)
        ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
        kept = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
        _num_kept[(num_rows,)](
            ordered, temperature, top_k.contiguous(), top_p.contiguous(), kept, vocab,
            **block,
        )  # fmt: skip
        _cut[(num_rows, triton.cdiv(vocab, block["COLUMNS"]))](
            out, order, kept, temperature, vocab, **block
        )
    return out


def draw(
    filtered: Tensor,
    *,
    temperature: Tensor,
    seeds: Tensor,
    sample_index: Tensor,
    positions: Tensor,
    purpose: int,
) -> Tensor:
    """[N] int64 tokens by the Gumbel-max rule; rows of temperature 0 take their maximum.

    Args:
        filtered: [N, V] fp32 from `filter_logits`.
        temperature: [N] fp32.
        seeds: [N] int64.
        sample_index: [N] int64.
        positions: [N] int64.
        purpose: which stream of random numbers.
    """
    num_rows, vocab = filtered.shape
    if num_rows == 0:
        return torch.empty(0, dtype=torch.int64, device=filtered.device)
    parts = _Parts.of(filtered)
    _part_draw[parts.grid](
        filtered, temperature.contiguous(), seeds.contiguous(), sample_index.contiguous(),
        positions.contiguous(), parts.tops, parts.places, purpose, vocab, parts.grid[1],
        COLUMNS=parts.columns,
    )  # fmt: skip
    return parts.first()


def token_logprobs(
    logits: Tensor, ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log probability and rank of given tokens, and the most likely tokens.

    Args:
        logits: [N, V] fp32.
        ids: [N] int64.
        num_top: most likely tokens wanted.

    Returns:
        chosen [N] fp32, rank [N] int64, top ids [N, num_top] int64, top values fp32.
    """
    logits = logits.contiguous()
    num_rows, vocab = logits.shape
    chosen = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    normalizer = torch.empty_like(chosen)
    rank = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _logprobs[(num_rows,)](
            logits, ids.contiguous(), chosen, rank, normalizer, vocab, **_block(vocab)
        )
    if num_top == 0:
        return chosen, rank, ids.new_empty((num_rows, 0)), logits.new_empty((num_rows, 0))
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    top_values = ordered[:, :num_top] - normalizer.unsqueeze(1)
    return chosen, rank, order[:, :num_top].contiguous(), top_values


def finite_rows(logits: Tensor) -> Tensor:
    """[N] bool: no NaN, no +inf, and something above -inf in logits [N, V] fp32."""
    logits = logits.contiguous()
    out = torch.empty(logits.shape[0], dtype=torch.bool, device=logits.device)
    if out.numel():
        parts = _Parts.of(logits)
        num_parts = parts.grid[1]
        _part_finite[parts.grid](
            logits, parts.places, logits.shape[1], num_parts, COLUMNS=parts.columns
        )
        _row_finite[(out.shape[0],)](parts.places, out, num_parts, PARTS=parts.block)
    return out


def draw_truth(filtered: Tensor, uniforms: Tensor) -> Tensor:
    """Gumbel-max in float64 over uniforms [N, V], for rows with a temperature."""
    noise = -torch.log(-torch.log1p(-uniforms.double()))
    return (filtered.double() + noise).argmax(-1)


_SIZES = {"COLUMNS": _COLUMNS}
_PARTIAL = {"tops_ptr": "*fp32", "places_ptr": "*i32", "num_parts": "i32"}
COMPILE_CASES = (
    CompileCase(
        "_part_best", {"logits_ptr": "*fp32", **_PARTIAL, "vocab": "i32"}, {"COLUMNS": _PART}
    ),
    CompileCase("_row_best", {**_PARTIAL, "out_ptr": "*i64"}, {"PARTS": 128}),
    CompileCase(
        "_scale",
        {
            "logits_ptr": "*fp32", **_PARTIAL, "temperature_ptr": "*fp32", "min_p_ptr": "*fp32",
            "out_ptr": "*fp32", "vocab": "i32",
        },
        {"GREEDY": False, "COLUMNS": _PART, "PARTS": 128},
    ),
    CompileCase(
        "_num_kept",
        {
            "sorted_ptr": "*fp32", "temperature_ptr": "*fp32", "top_k_ptr": "*i64",
            "top_p_ptr": "*fp32", "kept_ptr": "*i32", "vocab": "i32",
        },
        _SIZES,
        num_warps=_WARPS,
    ),
    CompileCase(
        "_cut",
        {
            "z_ptr": "*fp32", "order_ptr": "*i64", "kept_ptr": "*i32",
            "temperature_ptr": "*fp32", "vocab": "i32",
        },
        _SIZES,
        num_warps=_WARPS,
    ),
    CompileCase(
        "_part_draw",
        {
            "z_ptr": "*fp32", "temperature_ptr": "*fp32", "seeds_ptr": "*i64",
            "samples_ptr": "*i64", "positions_ptr": "*i64", **_PARTIAL, "purpose": "i32",
            "vocab": "i32",
        },
        {"COLUMNS": _PART},
    ),
    CompileCase(
        "_logprobs",
        {
            "logits_ptr": "*fp32", "ids_ptr": "*i64", "chosen_ptr": "*fp32", "rank_ptr": "*i64",
            "normalizer_ptr": "*fp32", "vocab": "i32",
        },
        _SIZES,
        num_warps=_WARPS,
        max_spill_bytes=16,  # on SM100; not in the decode path
    ),
    CompileCase(
        "_part_finite",
        {"logits_ptr": "*fp32", "found_ptr": "*i32", "vocab": "i32", "num_parts": "i32"},
        {"COLUMNS": _PART},
    ),
    CompileCase(
        "_row_finite", {"found_ptr": "*i32", "out_ptr": "*i1", "num_parts": "i32"},
        {"PARTS": 128},
    ),
)  # fmt: skip
