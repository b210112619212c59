"""Sampling family: from logits to token ids, log probabilities and counts, and the random numbers.

Random numbers are a pure function of (request seed, sample index, absolute position, purpose):
no state, no call order. A row therefore draws the same token in any batch, after a preemption,
and on every backend. All ops are batch invariant: a row's result depends on that row alone.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from torch import Tensor

from deepinfer.device.comparison import Close, Distribution, Exact
from deepinfer.device.op import op


class Purpose(enum.IntEnum):
    """What a random number is for; the last word of its counter, so that streams never meet."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    BONUS = 4


class SampleWork(enum.IntEnum):
    """The most that any row of a step needs, known to the host; each level includes the lower.

    GREEDY: every temperature is 0. RANDOM: no row uses top-k or top-p, so nothing is sorted.
    SORTED: everything.
    """

    GREEDY = 0
    RANDOM = 1
    SORTED = 2


class SparseBias(NamedTuple):
    """Values to add at (row, id) pairs, each pair at most once.

    Attributes:
        rows: [B] int64; -1 skips the entry.
        ids: [B] int64 token ids below V.
        values: [B] fp32, finite.
    """

    rows: Tensor
    ids: Tensor
    values: Tensor


class SparseIds(NamedTuple):
    """(row, id) pairs; a pair may be repeated.

    Attributes:
        rows: [B] int64; -1 skips the entry.
        ids: [B] int64 token ids below V.
    """

    rows: Tensor
    ids: Tensor


class Penalties(NamedTuple):
    """Penalties of each row and the counts they look at.

    Attributes:
        repetition: [N] fp32 above 0; 1 changes nothing.
        presence: [N] fp32; 0 changes nothing.
        frequency: [N] fp32; 0 changes nothing.
        slots: [N] int64 persistent slot of the row's sequence; -1: no penalties for the row.
        output_counts: [S, V] int32 times each token was output so far.
        prompt_seen: [S, V] bool, the token stands in the prompt.
        pending: [N, P] int64 tokens before the row that output_counts does not have yet, such as
            the drafts before it in the same step; each counts as output once; -1 none.
    """

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    slots: Tensor
    output_counts: Tensor
    prompt_seen: Tensor
    pending: Tensor


class LogitControls(NamedTuple):
    """What changes logits before a token is chosen; None costs nothing.

    Attributes:
        allowed: [N, V] bool, False removes the token (grammar, allowed ids).
        banned: pairs to remove (end tokens before `min_tokens`, ids never to be output).
        bias: values to add.
        penalties: repetition, presence and frequency penalties.
    """

    allowed: Tensor | None = None
    banned: SparseIds | None = None
    bias: SparseBias | None = None
    penalties: Penalties | None = None


class SampleParams(NamedTuple):
    """How each row draws, and which random numbers are its own.

    Attributes:
        temperature: [N] fp32; 0 takes the most likely token, otherwise at least 1e-4.
        top_k: [N] int64 tokens kept; 0 keeps all.
        top_p: [N] fp32 in [0, 1] share of probability kept; 1 keeps all.
        min_p: [N] fp32 in [0, 1] least probability kept, relative to the most likely token's.
        seeds: [N] int64, all 64 bits count.
        sample_index: [N] int64 in [0, 2^32), which of the request's answers.
        positions: [N] int64 in [0, 2^32), absolute position of the token to be drawn.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    sample_index: Tensor
    positions: Tensor


class Logprobs(NamedTuple):
    """Log probabilities of the raw distribution.

    Attributes:
        chosen: [N] fp32 of the given id.
        rank: [N] int64 place of the given id, 1 for the most likely.
        top_ids: [N, num_top] int64 most likely tokens, best first.
        top_values: [N, num_top] fp32 of these.
    """

    chosen: Tensor
    rank: Tensor
    top_ids: Tensor
    top_values: Tensor


@op(family="sampling", compare=Exact())
def philox_uniform(
    seeds: Tensor, sample_index: Tensor, positions: Tensor, purpose: Purpose, num: int
) -> Tensor:
    """Uniform random numbers of each row, from the counter-based generator Philox4x32-10.

    Args:
        seeds: [N] int64.
        sample_index: [N] int64 in [0, 2^32).
        positions: [N] int64 in [0, 2^32).
        purpose: what the numbers are for.
        num: numbers per row, at most 2^34.

    Returns:
        [N, num] fp32, at least 2^-33 and at most 1 - 2^-24.

    Contract: bit for bit. With words of 32 bits, column c of row n is
        key = (seed mod 2^32, seed div 2^32), the seed read as an unsigned 64-bit number;
        counter = (c div 4, position, sample index, purpose);
        x = word c mod 4 of the ten-round Philox4x32 block of that key and counter;
        u = min((fp32(x) + 0.5) * 2^-32, 1 - 2^-24), the conversion and the sum each rounded to
        nearest even. Small u keep all 32 bits, so that rare events stay resolved.
    Source: "Parallel random numbers: as easy as 1, 2, 3" (SC11), Philox4x32-10.
    """
    raise NotImplementedError


@op(
    family="sampling",
    compare=Close(rtol=2.0**-22, atol=1e-6, origin="up to four fp32 roundings, no reduction"),
)
def apply_controls(logits: Tensor, controls: LogitControls) -> Tensor:
    """Logits after masks, bias and penalties, in this order.

    1. Tokens not in `allowed`, then those in `banned`, become -inf and stay so.
    2. `bias` is added.
    3. Penalties: a token of prompt or output is divided by `repetition` where its logit is
       positive and multiplied by it elsewhere; then count * `frequency` and, for tokens that
       were output at all, `presence` are subtracted (prompt tokens do not count for these two).

    Args:
        logits: [N, V] fp32, not changed.
        controls: what applies; all None returns `logits` itself.

    Returns:
        [N, V] fp32.

    Contract: rows are independent; zero rows allowed.
    """
    raise NotImplementedError


@op(
    family="sampling",
    compare=Close(rtol=2.0**-21, atol=1e-6, origin="fp32 difference and quotient; no reduction"),
)
def filter_logits(logits: Tensor, params: SampleParams, work: SampleWork) -> Tensor:
    """Logits of the distribution that a row is drawn from.

    With z = (logit - row maximum) / temperature, in this order:
    1. `top_k`: the k tokens of largest z stay.
    2. `top_p`: of the probabilities of what is left, in falling order, the shortest run whose
       sum reaches top_p stays; the first always does.
    3. `min_p`: tokens with exp(z) below min_p go.
    Equal logits are ordered by id, lowest first. At temperature 0 only the first token stays.

    Args:
        logits: [N, V] fp32, as `apply_controls` returns them; -inf is never kept by choice.
        params: [N] each.
        work: host bound; what lies above it must be off in every row.

    Returns:
        [N, V] fp32: z, or -inf where removed; softmax of it is the distribution. A row with a
        NaN, +inf, or nothing but -inf gives an unspecified row.

    Contract: rows are independent; zero rows allowed.
    """
    raise NotImplementedError


@op(family="sampling", compare=Distribution())
def sample_tokens(
    logits: Tensor,
    params: SampleParams,
    work: SampleWork,
    *,
    purpose: Purpose = Purpose.SAMPLE,
) -> Tensor:
    """One token for each row, by the Gumbel-max rule.

    The token is argmax over v of z[v] - log(-log1p(-u[v])), with z from `filter_logits` and
    u from `philox_uniform(seeds, sample_index, positions, purpose, V)`; equal values go to the
    lowest id. Rows of temperature 0 read no random numbers.

    Args:
        logits: [N, V] fp32, as `apply_controls` returns them.
        params: [N] each.
        work: host bound; what lies above it must be off in every row.
        purpose: which stream of random numbers is used.

    Returns:
        [N] int64 in [0, V), also for rows that `finite_rows` refuses (there meaningless).

    Contract: arithmetic in fp32 or wider, so backends draw the same token unless the best two
    values lie within rounding of each other. Rows are independent; zero rows allowed.
    """
    raise NotImplementedError


@op(
    family="sampling",
    compare={
        "chosen": Close(),
        "rank": Exact(),
        "top_ids": Exact(),
        "top_values": Close(),
    },
)
def token_logprobs(logits: Tensor, ids: Tensor, num_top: int) -> Logprobs:
    """Log probabilities of given and of the most likely tokens at temperature 1.

    Args:
        logits: [N, V] fp32, raw: before controls and filters.
        ids: [N] int64 in [0, V).
        num_top: most likely tokens wanted, 0 to V.

    Returns:
        The log probabilities; order and rank are those of the logits, equal ones by lowest id.

    Contract: log-softmax in fp32 or wider; -inf for a logit of -inf. Rows are independent;
    zero rows allowed.
    """
    raise NotImplementedError


@op(family="sampling", compare=Exact())
def finite_rows(logits: Tensor) -> Tensor:
    """Which rows can be sampled from.

    Args:
        logits: [N, V] fp32.

    Returns:
        [N] bool: False where a row holds NaN or +inf, or nothing but -inf.
    """
    raise NotImplementedError


@op(family="sampling", compare={"output_counts": Exact()}, mutates=("output_counts",))
def count_tokens(ids: Tensor, slots: Tensor, output_counts: Tensor) -> None:
    """Count output tokens for the penalties; changes `output_counts` in place.

    Args:
        ids: [n] int64 tokens that were output, in [0, V); any value where the slot is -1.
        slots: [n] int64 persistent slot of each token's sequence; -1 skips.
        output_counts: [S, V] int32; 1 is added for each token, repeated pairs add up.
    """
    raise NotImplementedError
