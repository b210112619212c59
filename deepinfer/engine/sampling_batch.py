"""Host tensors of one step's sampling, made from what each row's request asks for.

Controls that no row uses are None, so a step of plain greedy rows builds two small tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from deepinfer.engine.sampling_params import SamplingParams

_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row of logits whose token is to be chosen.

    Attributes:
        params: what the request asks for.
        seed: 64-bit signed seed of the request; drawn at admission if it named none, so that
            a neighbour without a seed never moves a seeded request.
        sample_index: which of the request's answers.
        position: absolute position of the token to be chosen.
        num_output_tokens: tokens of the answer before this one, those in flight included.
        slot: persistent slot of the sequence, where its penalty counts live.
        mask: [vocab_size] bool on the host, tokens that a constraint allows; None: all.
    """

    params: SamplingParams
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
            penalties = Penalties(
                repetition, presence, frequency, self.integers[4], output_counts, prompt_seen
            )
        return LogitControls(self.allowed, self.banned, self.bias, penalties)


# Rows of `reals` and `integers` for a row of which nothing is asked; also the padding.
_PLAIN_REALS = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
_PLAIN_INTEGERS = (0, 0, 0, 0, -1)


def _row_numbers(
    row: SamplingRow, vocab_size: int
) -> tuple[tuple[float, ...], tuple[int, ...], SampleWork]:
    """The row's columns of `reals` and `integers`, and the work it needs."""
    params = row.params
    penalties, slot = _PLAIN_REALS[3:], -1
    if params.has_penalties:
        penalties = (
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        slot = row.slot
    if params.is_greedy:
        return (
            (*_PLAIN_REALS[:3], *penalties),
            (0, row.seed, row.sample_index, row.position, slot),
            SampleWork.GREEDY,
        )
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    work = SampleWork.SORTED if top_k or params.top_p < 1.0 else SampleWork.RANDOM
    # Beyond float32 the temperature would be infinite, and -inf divided by it NaN.
    temperature = min(params.temperature, _LARGEST_FLOAT32)
    return (
        (temperature, params.top_p, params.min_p, *penalties),
        (top_k, row.seed, row.sample_index, row.position, slot),
        work,
    )


def _columns(rows: Sequence[tuple[float, ...]], width: int, dtype: torch.dtype) -> Tensor:
    """[width, len(rows)]; the list is flattened first, which is far cheaper than a nested one."""
    flat = torch.tensor([number for row in rows for number in row], dtype=dtype)
    return flat.view(-1, width).T.contiguous()


def _allowed(rows: Sequence[SamplingRow], capacity: int, vocab_size: int) -> Tensor | None:
    if not any(row.mask is not None or row.params.allowed_token_ids is not None for row in rows):
        return None
    allowed = torch.ones(capacity, vocab_size, dtype=torch.bool)
    for index, row in enumerate(rows):
        if row.params.allowed_token_ids is not None:
            allowed[index] = False
            allowed[index, row.params.allowed_token_ids] = True
        if row.mask is not None:
            allowed[index] &= row.mask
    return allowed


def _banned(
    rows: Sequence[SamplingRow], eos_token_ids: Sequence[int], never_token_ids: Sequence[int]
) -> SparseIds | None:
    where: list[int] = []
    ids: list[int] = []
    for index, row in enumerate(rows):
        num_before = len(ids)
        ids += never_token_ids
        if row.num_output_tokens < row.params.min_tokens:
            ids += row.params.stop_token_ids
            if not row.params.ignore_eos:
                ids += eos_token_ids
        where += [index] * (len(ids) - num_before)
    return SparseIds(torch.tensor(where), torch.tensor(ids)) if ids else None


def _bias(rows: Sequence[SamplingRow]) -> SparseBias | None:
    where: list[int] = []
    ids: list[int] = []
    values: list[float] = []
    for index, row in enumerate(rows):
        if row.params.logit_bias:
            where += [index] * len(row.params.logit_bias)
            ids += row.params.logit_bias.keys()
            values += row.params.logit_bias.values()
    if not ids:
        return None
    return SparseBias(
        torch.tensor(where), torch.tensor(ids), torch.tensor(values, dtype=torch.float32)
    )


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
    numbers = [_row_numbers(row, vocab_size) for row in rows]
    reals = [real for real, _, _ in numbers] + [_PLAIN_REALS] * num_padding
    integers = [integer for _, integer, _ in numbers] + [_PLAIN_INTEGERS] * num_padding
    wanted = [row.params.logprobs for row in rows if row.params.logprobs is not None]
    return SamplingBatch(
        reals=_columns(reals, len(_PLAIN_REALS), torch.float32),
        integers=_columns(integers, len(_PLAIN_INTEGERS), torch.int64),
        work=max((work for _, _, work in numbers), default=SampleWork.GREEDY),
        allowed=_allowed(rows, capacity, vocab_size),
        banned=_banned(rows, eos_token_ids, never_token_ids),
        bias=_bias(rows),
        has_penalties=any(integer[-1] >= 0 for integer in integers),
        num_top=max(wanted, default=None),
    )
