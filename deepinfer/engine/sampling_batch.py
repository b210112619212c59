"""Host tensors of one step's sampling, made from what each row's request asks for.

Controls that no row uses are None, so a step of plain greedy rows builds two small tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.device.errors import ContractError
from deepinfer.device.ops.sampling import (
    LogitControls,
    Penalties,
    SampleParams,
    SampleWork,
    SparseBias,
    SparseIds,
)
from deepinfer.engine.host_tensor import float32_tensor, int64_tensor
from deepinfer.engine.request_controls import PLAIN_CHOICE, RequestControls
from deepinfer.engine.sampling_params import SamplingParams

# Rows of `reals` and `integers` for a row of which nothing is asked; also the padding.
_PLAIN_REALS = (*PLAIN_CHOICE, 1.0, 0.0, 0.0)
_PLAIN_INTEGERS = (0, 0, 0, 0, -1)


class SamplingRow(NamedTuple):
    """One row of logits whose token is to be chosen.

    Attributes:
        params: what the request asks for.
        controls: the same, worked out.
        seed: 64-bit signed seed of the request; drawn at admission if it named none, so that
            a neighbour without a seed never moves a seeded request.
        sample_index: which of the request's answers.
        position: absolute position of the token to be chosen.
        num_output_tokens: tokens of the answer before this one, those in flight included.
        slot: persistent slot of the sequence, where its penalty counts live.
        mask: [vocab_size] bool on the host, tokens that a constraint allows; None: all.
    """

    params: SamplingParams
    controls: RequestControls
    seed: int
    sample_index: int
    position: int
    num_output_tokens: int
    slot: int
    mask: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Everything the sampling ops of one step need, but the persistent penalty counts.

    Attributes:
        reals: [6, N] fp32 temperature, top_p, min_p and the three penalties of `Penalties`.
        integers: [5, N] int64 top_k, seeds, sample index, position, slot of penalised rows or -1.
        work: host bound of what the rows need.
        allowed, banned, bias: controls, or None.
        has_penalties: whether any row is penalised.
        num_top: most log probabilities beside the chosen token's that a row wants; None: no row
            wants any log probability.
    """

    reals: Tensor
    integers: Tensor
    work: SampleWork
    allowed: Tensor | None
    banned: SparseIds | None
    bias: SparseBias | None
    has_penalties: bool
    num_top: int | None

    def to(self, device: torch.device) -> SamplingBatch:
        """The same batch on `device`."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return SamplingBatch(
            reals=move(self.reals),
            integers=move(self.integers),
            work=self.work,
            allowed=None if self.allowed is None else move(self.allowed),
            banned=None if self.banned is None else SparseIds(*map(move, self.banned)),
            bias=None if self.bias is None else SparseBias(*map(move, self.bias)),
            has_penalties=self.has_penalties,
            num_top=self.num_top,
        )

    @property
    def params(self) -> SampleParams:
        """Views for `sample_tokens` and `filter_logits`."""
        temperature, top_p, min_p = self.reals[:3].unbind()
        top_k, seeds, sample_index, positions = self.integers[:4].unbind()
        return SampleParams(temperature, top_k, top_p, min_p, seeds, sample_index, positions)

    def controls(self, output_counts: Tensor, prompt_seen: Tensor) -> LogitControls:
        """Controls for `apply_controls`.

        Args:
            output_counts: [S, vocab_size] int32 on the batch's device.
            prompt_seen: [S, vocab_size] bool on the batch's device.
        """
        penalties = None
        if self.has_penalties:
            repetition, presence, frequency = self.reals[3:].unbind()
            slots = self.integers[4]
            pending = slots.new_empty((slots.shape[0], 0))
            penalties = Penalties(
                repetition, presence, frequency, slots, output_counts, prompt_seen, pending
            )
        return LogitControls(self.allowed, self.banned, self.bias, penalties)


Controlled = Sequence[tuple[int, SamplingRow]]
"""Rows with controls of their own, and their numbers in the batch."""


def _allowed(rows: Controlled, capacity: int, vocab_size: int) -> Tensor | None:
    restricted = [
        (index, row)
        for index, row in rows
        if row.mask is not None or row.params.allowed_token_ids is not None
    ]
    if not restricted:
        return None
    allowed = torch.ones(capacity, vocab_size, dtype=torch.bool)
    for index, row in restricted:
        if row.params.allowed_token_ids is not None:
            allowed[index] = False
            allowed[index, row.params.allowed_token_ids] = True
        if row.mask is not None:
            allowed[index] &= row.mask
    return allowed


def _banned(
    rows: Controlled,
    num_rows: int,
    eos_token_ids: Sequence[int],
    never_token_ids: Sequence[int],
) -> SparseIds | None:
    where = list(range(num_rows)) * len(never_token_ids)
    ids = [token_id for token_id in never_token_ids for _ in range(num_rows)]
    for index, row in rows:
        if row.num_output_tokens < row.params.min_tokens:
            ends = [*row.params.stop_token_ids]
            if not row.params.ignore_eos:
                ends += eos_token_ids
            ids += ends
            where += [index] * len(ends)
    return SparseIds(int64_tensor(where), int64_tensor(ids)) if ids else None


def _bias(rows: Controlled) -> SparseBias | None:
    where: list[int] = []
    ids: list[int] = []
    values: list[float] = []
    for index, row in rows:
        if row.params.logit_bias:
            where += [index] * len(row.params.logit_bias)
            ids += row.params.logit_bias.keys()
            values += row.params.logit_bias.values()
    if not ids:
        return None
    return SparseBias(int64_tensor(where), int64_tensor(ids), float32_tensor(values))


def build_sampling_batch(
    rows: Sequence[SamplingRow],
    vocab_size: int,
    *,
    capacity: int | None = None,
    eos_token_ids: Sequence[int] = (),
    never_token_ids: Sequence[int] = (),
) -> SamplingBatch:
    """Host tensors for the sampling of one step.

    Args:
        rows: one for each row of logits, in their order.
        vocab_size: V of the logits.
        capacity: rows of the tensors made; rows beyond `rows` are greedy and uncontrolled.
            None: as many as `rows`.
        eos_token_ids: end tokens of the model, removed while a row is short of `min_tokens`
            (unless its request ignores them); the request's stop ids likewise.
        never_token_ids: ids that no row may output, such as placeholders of other inputs.

    Raises:
        ContractError: more rows than `capacity`.
    """
    capacity = len(rows) if capacity is None else capacity
    if len(rows) > capacity:
        raise ContractError(
            f"sampling batch: {len(rows)} rows do not fit capacity={capacity}; "
            "schedule fewer sequences or raise the capacity"
        )
    num_padding = capacity - len(rows)
    # Column by column and flat: a tuple for each row, or a nested list, costs several times more.
    controls = [row.controls for row in rows]
    integers = (
        [each.top_k for each in controls],
        [row.seed for row in rows],
        [row.sample_index for row in rows],
        [row.position for row in rows],
        [row.slot if row.controls.has_penalties else -1 for row in rows],
    )
    flat = itertools.chain.from_iterable(
        column + [plain] * num_padding
        for column, plain in zip(integers, _PLAIN_INTEGERS, strict=True)
    )
    reals = [each.reals for each in controls] + [_PLAIN_REALS] * num_padding
    wanted = [row.params.logprobs for row in rows if row.params.logprobs is not None]
    controlled = [
        (index, row)
        for index, row in enumerate(rows)
        if row.mask is not None or not row.controls.is_free
    ]
    return SamplingBatch(
        reals=float32_tensor(itertools.chain.from_iterable(reals))
        .view(capacity, len(_PLAIN_REALS))
        .T.contiguous(),
        integers=int64_tensor(flat).view(len(_PLAIN_INTEGERS), capacity),
        work=max([each.work for each in controls], default=SampleWork.GREEDY),
        allowed=_allowed(controlled, capacity, vocab_size),
        banned=_banned(controlled, len(rows), eos_token_ids, never_token_ids),
        bias=_bias(controlled),
        has_penalties=any(each.has_penalties for each in controls),
        num_top=max(wanted, default=None),
    )
