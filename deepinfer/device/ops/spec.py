"""Spec family: what the DSpark drafter adds to the backbone's ops.

Nothing here reads device data on the host: which rows were accepted, where a block starts and
what was drafted are tensors, so that a step may be drafted before its result is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from deepinfer.device.comparison import Close, Distribution, Exact
from deepinfer.device.handles import EmbeddingTable, LinearWeight
from deepinfer.device.op import OpTable, op
from deepinfer.device.ops.quant import embed, linear_f32
from deepinfer.device.ops.sampling import SampleParams, SampleWork
from deepinfer.device.ops.state import RowLayout

SURVIVAL_FLOOR = 2.0**-20
"""About 1e-6, and exact in fp32: a draft less likely to be reached and accepted is not verified."""


@op(family="spec", compare=Exact())
def draft_context(rows: RowLayout, num_accepted: Tensor, seq_slots: Tensor, *, ring: int) -> Tensor:
    """Draft window rows that the rows of a step are written to.

    Row j of request r goes to seq_slots[r] * ring + position % ring when j < num_accepted[r] and
    j >= num_accepted[r] - ring; all others are skipped, so that rejected rows leave no trace and
    the rows of a long chunk are distinct.

    Args:
        rows: the row layout of the step.
        num_accepted: [R] int64 rows of each request that are final: its anchor and accepted
            drafts, or all rows of a prompt's chunk; 0 writes none.
        seq_slots: [R] int64 persistent slot of each request.
        ring: rows of a draft ring.

    Returns:
        [T] int64 cache rows; -1 skips.

    Source: context KV injection of DSpark.
    """
    raise NotImplementedError


class Verified(NamedTuple):
    """What a verification leaves of the drafts.

    Attributes:
        token_ids: [R, 1 + D] int64 accepted drafts, the token after them, then -1.
        num_accepted: [R] int64 in [0, D].
    """

    token_ids: Tensor
    num_accepted: Tensor


@op(family="spec", compare={"token_ids": Distribution(), "num_accepted": Exact()})
def verify_drafts(
    logits: Tensor,
    params: SampleParams,
    work: SampleWork,
    query_starts: Tensor,
    draft_ids: Tensor,
    draft_logits: Tensor | None,
) -> Verified:
    """Accept drafts as far as the target's distribution allows, and draw the token after them.

    Rows query_starts[r] .. query_starts[r + 1] - 1 belong to request r: that of its anchor, then
    those of the drafts it verifies, which are draft_ids[r] from the first on. The token that row
    j decides has the distribution p_j, the softmax of `filter_logits` of that row. Draft x after
    row j was drawn from q_j, the softmax of draft_logits[r, j] / temperature over all tokens; it
    is certain (q_j = 1 at x) where `draft_logits` is None and in rows of temperature 0.
    1. A draft is accepted if those before it are and u * q_j(x) < p_j(x), with u the number that
       `philox_uniform` has for the row and purpose ACCEPT. At temperature 0 this says that x is
       the most likely token.
    2. At the first draft that is not accepted, the token is drawn from max(p_j - q_j, 0),
       normalised, with purpose RESIDUAL; where that is 0 everywhere, from p_j.
    3. Where no draft is left, or the draft is -1, the token is drawn from p_j: with purpose
       BONUS after an accepted draft, else as a plain one with purpose SAMPLE.
    Tokens are drawn by the Gumbel-max rule of `sample_tokens`.

    Args:
        logits: [N, V] fp32, as `apply_controls` returns them; rows of no request mean nothing.
        params: [N] each; the position is that of the token which the row decides.
        work: host bound of the rows; what lies above it must be off in every row.
        query_starts: [R + 1] int64 prefix sums of the query lengths, of at most 1 + D each.
        draft_ids: [R, D] int64; -1 and what follows are no drafts.
        draft_logits: [R, D, V] fp32 that the drafts were drawn from; None: they are certain.

    Returns:
        Accepted drafts and the token after them; of a request without rows nothing but -1.

    Contract: the tokens are distributed as if each were drawn from its row alone, whatever
    proposed the drafts. p and q are computed in fp32 or wider. Requests are independent; zero
    rows allowed. A row that `finite_rows` refuses decides nothing that means anything, and ends
    nothing before it.
    Source: acceptance of DSpark (rejection sampling).
    """
    raise NotImplementedError


class DraftPlan(NamedTuple):
    """Rows of the draft blocks, block after block; B rows for each of R requests.

    Attributes:
        positions: [R * B] int64 anchor position + index in the block; 0 for padding.
        write: [R * B] int64 ring row of each block row; -1 for padding.
        read: [R * B, W + B] int64 ring rows of the W positions before the anchor, oldest first,
            then of the block; the same for all rows of a block; -1 absent.
        valid: [R * B] bool.
    """

    positions: Tensor
    write: Tensor
    read: Tensor
    valid: Tensor


@op(family="spec", compare=Exact())
def draft_plan(
    anchor_positions: Tensor,
    seq_slots: Tensor,
    floors: Tensor,
    valid: Tensor,
    *,
    block_size: int,
    window: int,
    ring: int,
) -> DraftPlan:
    """Where the block of every request lies and what its rows see.

    Args:
        anchor_positions: [R] int64 position P of the anchor, the first that is not in the cache.
        seq_slots: [R] int64 persistent slot of each request.
        floors: [R] int64 first position with a draft row (0, or a replay start).
        valid: [R] bool; other requests are padding.
        block_size: B rows of a block, the anchor included.
        window: W positions before the anchor that may be seen.
        ring: rows of a draft ring, at least W + B: block rows are scratch beside the window.

    Returns:
        The plan. All rows of a block see each other (the block is bidirectional) and the context
        of the anchor; the window does not slide inside the block.

    Source: block pass of DSpark.
    """
    raise NotImplementedError


class MarkovStep(NamedTuple):
    """One step of the Markov stage.

    Attributes:
        logits: [N, V] fp32 base logits plus the bias of the previous token.
        features: [N, r] activation dtype, Markov embedding of the previous token.
    """

    logits: Tensor
    features: Tensor


def _compose_markov(ops: OpTable) -> Callable[..., MarkovStep]:
    rows_of, product = ops[embed], ops[linear_f32]

    def step(
        base: Tensor, tokens: Tensor, embedding: EmbeddingTable, head: LinearWeight
    ) -> MarkovStep:
        features = rows_of(tokens, embedding)
        return MarkovStep(base + product(features, head), features)

    return step


@op(
    family="spec",
    compare={
        "logits": Close(rtol=1e-4, atol=1e-4, origin="fp32 sum order over the rank"),
        "features": Exact(),
    },
    compose=_compose_markov,
)
def markov_step(
    base: Tensor, tokens: Tensor, embedding: EmbeddingTable, head: LinearWeight
) -> MarkovStep:
    """Base logits with the bias that the token before gives.

    Args:
        base: [N, V] fp32, not changed.
        tokens: [N] int64 token before each draft, valid ids in every row.
        embedding: [V, r].
        head: packed from one unquantised [V, r] matrix.

    Returns:
        base + features @ head^T with operands of the activation dtype, fp32 accumulation and an
        fp32 sum.

    Contract: rows are independent; zero rows allowed.
    Source: vanilla Markov head of DSpark.
    """
    raise NotImplementedError


class Confidence(NamedTuple):
    """How likely each draft is accepted, given that those before it are.

    Attributes:
        logit: [N] fp32, as the head gives it.
        probability: [N] fp32 sigmoid(logit / temperature).
    """

    logit: Tensor
    probability: Tensor


@op(
    family="spec",
    compare={
        "logit": Close(rtol=1e-4, atol=1e-4, origin="fp32 sum order over D + r terms"),
        "probability": Close(rtol=1e-4, atol=1e-4, origin="the logit's bound; the slope is < 1"),
    },
)
def draft_confidence(
    hidden: Tensor, features: Tensor, weight: LinearWeight, temperature: Tensor
) -> Confidence:
    """The confidence head on [hidden, features].

    Args:
        hidden: [N, D] activation dtype, block output of each draft's row.
        features: [N, r] activation dtype, Markov embedding of the token before the draft.
        weight: packed from one unquantised [1, D + r] matrix.
        temperature: [N] fp32 above 0: calibration of the draft's place in the block.

    Returns:
        Logit and probability in fp32; the product has fp32 operands.

    Contract: rows are independent; zero rows allowed.
    Source: confidence head of DSpark; it never sees the draft that it judges.
    """
    raise NotImplementedError


@op(family="spec", compare=Exact())
def admit_drafts(survival: Tensor, available: Tensor, budget: Tensor) -> Tensor:
    """How many drafts of each request a step verifies: the likeliest of the batch.

    Draft j of request r may be admitted when j < available[r] and survival[r, j] is at least
    SURVIVAL_FLOOR. Of those, the first `budget` are, by survival from the highest, then by j from
    the lowest, then by r from the lowest. Survival does not rise within a request, so what is
    admitted of a request is always its first drafts.

    Args:
        survival: [R, D] fp32 running product of a request's confidences, not rising along j; NaN
            is below the floor.
        available: [R] int64 drafts that the request has, 0 to D; 0 for padding.
        budget: [1] int64 most drafts of the whole batch, from 0.

    Returns:
        [R] int64 drafts to verify; their sum is at most `budget`, and less only when no more may
        be admitted.

    Contract: the choice depends on survival, places and request order alone, never on a drafted
    token that a survival did not already depend on; so the output keeps its distribution when
    `budget` does not depend on this step's drafts. Zero requests allowed; a request's count
    depends on its company.
    Source: batch-wide choice of DSpark; ties as its losslessness argument needs them.
    """
    raise NotImplementedError
