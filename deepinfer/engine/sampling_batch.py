"""Host tensors of one step's sampling, made from what each request asks for.

The host does not know at which positions a request's rows stand, nor how many there are: with
steps in flight it knows bounds. So everything here is about requests, and the device spreads it
over the rows of logits (`LogitRows`). Controls that no request uses are None, so a step of plain
greedy requests builds two small tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.device.ops.sampling import (
    LogitControls,
    Penalties,
    SampleParams,
    SampleWork,
    SparseBias,
    SparseIds,
)
from deepinfer.engine.host_tensor import float32_tensor, int64_tensor
from deepinfer.engine.logit_rows import LogitRows
from deepinfer.engine.request_controls import RequestControls
from deepinfer.engine.sampling_params import SamplingParams

_NUM_REALS, _NUM_INTEGERS = 6, 4
PACKED_ROWS = _NUM_REALS // 2 + _NUM_INTEGERS
"""Rows of int64 that hold the parameters of a batch, two reals in one number."""


class SampledRequest(NamedTuple):
    """One request whose rows of logits decide tokens.

    Attributes:
        params: what the request asks for.
        controls: the same, worked out.
        seed: 64-bit signed seed of the request; drawn at admission if it named none, so that
            a neighbour without a seed never moves a seeded request.
        sample_index: which of the request's answers.
        num_prompt_tokens: positions before its first output.
        slot: persistent slot of the sequence, where its penalty counts live.
        masks: tokens that a constraint allows in its first, second, ... row, [vocab_size] bool on
            the host; None: all. Rows that have no mask allow all.
    """

    params: SamplingParams
    controls: RequestControls
    seed: int
    sample_index: int
    num_prompt_tokens: int
    slot: int
    masks: tuple[Tensor | None, ...] = ()


class AllowedIds(NamedTuple):
    """Tokens that rows are restricted to.

    Attributes:
        masks: [A, V] bool; the last one allows everything.
        rows: [N, W] int64 mask of row j of each request.
    """

    masks: Tensor
    rows: Tensor


class BannedIds(NamedTuple):
    """Tokens removed from a request's rows as long as they decide early positions.

    Attributes:
        requests: [B] int64.
        ids: [B] int64 token ids.
        until: [B] int64 first position at which the token may stand.
    """

    requests: Tensor
    ids: Tensor
    until: Tensor


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Everything the sampling ops of one step need, but rows and persistent penalty counts.

    Attributes:
        reals: [6, N] fp32 temperature, top_p, min_p and the three penalties of `Penalties`.
        integers: [4, N] int64 top_k, seeds, sample index, slot of penalised requests or -1.
        work: host bound of what the rows need.
        never: [F] int64 ids that no row may output, or None; the same in every batch of a model.
        allowed, banned, bias: controls by request, or None; rows of `bias` are requests.
        has_penalties: whether any request is penalised.
        num_top: most log probabilities beside the chosen token's that a request wants; None: no
            request wants any log probability.
    """

    reals: Tensor
    integers: Tensor
    work: SampleWork
    never: Tensor | None
    allowed: AllowedIds | None
    banned: BannedIds | None
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
            never=None if self.never is None else move(self.never),
            allowed=None if self.allowed is None else AllowedIds(*map(move, self.allowed)),
            banned=None if self.banned is None else BannedIds(*map(move, self.banned)),
            bias=None if self.bias is None else SparseBias(*map(move, self.bias)),
            has_penalties=self.has_penalties,
            num_top=self.num_top,
        )

    @property
    def is_plain(self) -> bool:
        """Whether the parameters of drawing are all that its requests ask for."""
        changes = (self.allowed, self.banned, self.bias, self.num_top)
        return not self.has_penalties and all(change is None for change in changes)

    def pack_into(self, packed: Tensor) -> None:
        """Write the parameters of a plain batch where `plain` finds them.

        Args:
            packed: [7, C] int64 on the host, C >= N; the other columns become those of greedy
                requests.
        """
        packed.zero_()
        reals, integers = _unpacked(packed)
        count = self.reals.shape[1]
        reals[:, :count] = self.reals
        integers[:, :count] = self.integers

    @classmethod
    def plain(cls, packed: Tensor, work: SampleWork, never: Tensor | None) -> SamplingBatch:
        """A plain batch of C requests whose parameters are views of a tensor.

        Args:
            packed: [7, C] int64, as `pack_into` fills it now or later.
            work: host bound of what its rows will need.
            never: [F] int64 or None.
        """
        reals, integers = _unpacked(packed)
        return cls(
            reals=reals,
            integers=integers,
            work=work,
            never=never,
            allowed=None,
            banned=None,
            bias=None,
            has_penalties=False,
            num_top=None,
        )

    @property
    def penalised_slots(self) -> Tensor:
        """[N] int64 slot of each penalised request; -1 of the others."""
        return self.integers[3]

    def params(self, owner: Tensor, positions: Tensor) -> SampleParams:
        """Parameters of rows.

        Args:
            owner: [L] int64 request of each row.
            positions: [L] int64 position of the token that each row decides.
        """
        temperature, top_p, min_p = self.reals[:3].index_select(1, owner).unbind()
        top_k, seeds, sample_index = self.integers[:3].index_select(1, owner).unbind()
        return SampleParams(temperature, top_k, top_p, min_p, seeds, sample_index, positions)

    def controls(
        self, rows: LogitRows, pending: Tensor, counts: tuple[Tensor, Tensor] | None
    ) -> LogitControls:
        """Controls for `apply_controls`.

        Args:
            rows: of the logits.
            pending: [L, P] int64 drafts before each row, -1 none.
            counts: [S, vocab_size] int32 output counts and [S, vocab_size] bool prompt tokens by
                slot; None: no request with penalties has run yet.
        """
        penalties = None
        if self.has_penalties and counts is not None:
            values = self.reals[3:].index_select(1, rows.owner)
            slots = self.penalised_slots.index_select(0, rows.owner)
            penalties = Penalties(values[0], values[1], values[2], slots, *counts, pending)
        return LogitControls(
            self._allowed_of(rows), self._banned_of(rows), self._bias_of(rows), penalties
        )

    def _allowed_of(self, rows: LogitRows) -> Tensor | None:
        if self.allowed is None:
            return None
        width = self.allowed.rows.shape[1]
        place = rows.owner * width + rows.offset.clamp_max(width - 1)
        return self.allowed.masks.index_select(
            0, self.allowed.rows.flatten().index_select(0, place)
        )

    def _banned_of(self, rows: LogitRows) -> SparseIds | None:
        found: list[SparseIds] = []
        if self.never is not None:
            every = torch.arange(rows.owner.shape[0], device=rows.owner.device)
            ids = self.never.repeat(every.shape[0])
            found.append(SparseIds(every.repeat_interleave(self.never.shape[0]), ids))
        if self.banned is not None:
            targets = rows.of(self.banned.requests)
            positions = rows.positions.index_select(0, targets.clamp_min(0).flatten())
            early = positions.view_as(targets) < self.banned.until.unsqueeze(1)
            where = torch.where(early, targets, -1)
            ids = self.banned.ids.repeat_interleave(rows.width)
            found.append(SparseIds(where.flatten(), ids))
        if len(found) > 1:
            return SparseIds(*map(torch.cat, zip(*found, strict=True)))
        return found[0] if found else None

    def _bias_of(self, rows: LogitRows) -> SparseBias | None:
        if self.bias is None:
            return None
        ids, values = (part.repeat_interleave(rows.width) for part in self.bias[1:])
        return SparseBias(rows.of(self.bias.rows).flatten(), ids, values)


def _unpacked(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Reals [6, C] fp32 and integers [4, C] int64 as views of [7, C] int64."""
    num_rows = _NUM_REALS // 2
    reals = packed[:num_rows].view(torch.float32).view(_NUM_REALS, packed.shape[1])
    return reals, packed[num_rows:]


def _allowed(requests: Sequence[SampledRequest], vocab_size: int) -> AllowedIds | None:
    masks: list[Tensor] = []
    rows: list[list[Tensor | None]] = []
    for request in requests:
        own: list[Tensor | None] = list(request.masks) or [None]
        if request.params.allowed_token_ids is not None:
            given = torch.zeros(vocab_size, dtype=torch.bool)
            given[request.params.allowed_token_ids] = True
            own = [given if mask is None else given & mask for mask in own]
        rows.append(own)
    if all(mask is None for own in rows for mask in own):
        return None
    width = max(map(len, rows))
    places: list[int] = []
    for request, own in zip(requests, rows, strict=True):
        # What a request asks for itself holds in every row of it.
        last = None if request.masks else own[-1]
        for mask in own + [last] * (width - len(own)):
            places.append(-1 if mask is None else len(masks))
            if mask is not None:
                masks.append(mask)
    everything = torch.ones(vocab_size, dtype=torch.bool)
    table = torch.stack([*masks, everything])
    indices = int64_tensor(len(masks) if place < 0 else place for place in places)
    return AllowedIds(table, indices.view(len(rows), width))


def _banned(requests: Sequence[SampledRequest], eos_token_ids: Sequence[int]) -> BannedIds | None:
    where: list[int] = []
    ids: list[int] = []
    until: list[int] = []
    for index, request in enumerate(requests):
        params = request.params
        if params.min_tokens:
            ends = [*params.stop_token_ids]
            if not params.ignore_eos:
                ends += eos_token_ids
            ids += ends
            where += [index] * len(ends)
            until += [request.num_prompt_tokens + params.min_tokens] * len(ends)
    if not ids:
        return None
    return BannedIds(int64_tensor(where), int64_tensor(ids), int64_tensor(until))


def _bias(requests: Sequence[SampledRequest]) -> SparseBias | None:
    where: list[int] = []
    ids: list[int] = []
    values: list[float] = []
    for index, request in enumerate(requests):
        if request.params.logit_bias:
            where += [index] * len(request.params.logit_bias)
            ids += request.params.logit_bias.keys()
            values += request.params.logit_bias.values()
    if not ids:
        return None
    return SparseBias(int64_tensor(where), int64_tensor(ids), float32_tensor(values))


def build_sampling_batch(
    requests: Sequence[SampledRequest],
    vocab_size: int,
    *,
    eos_token_ids: Sequence[int] = (),
    never_token_ids: Sequence[int] = (),
) -> SamplingBatch:
    """Host tensors for the sampling of one step.

    Args:
        requests: those that sample, in their order.
        vocab_size: V of the logits.
        eos_token_ids: end tokens of the model, removed while a row is short of `min_tokens`
            (unless its request ignores them); the request's stop ids likewise.
        never_token_ids: ids that no row may output, such as placeholders of other inputs.
    """
    # Column by column and flat: a tuple for each row, or a nested list, costs several times more.
    controls = [request.controls for request in requests]
    integers = (
        [each.top_k for each in controls],
        [request.seed for request in requests],
        [request.sample_index for request in requests],
        [request.slot if request.controls.has_penalties else -1 for request in requests],
    )
    wanted = [r.params.logprobs for r in requests if r.params.logprobs is not None]
    is_free = all(each.is_free for each in controls)
    is_masked = any(request.masks for request in requests)
    return SamplingBatch(
        reals=float32_tensor(itertools.chain.from_iterable(each.reals for each in controls))
        .view(len(requests), _NUM_REALS)
        .T.contiguous(),
        integers=int64_tensor(itertools.chain.from_iterable(integers)).view(
            _NUM_INTEGERS, len(requests)
        ),
        work=max([each.work for each in controls], default=SampleWork.GREEDY),
        never=int64_tensor(never_token_ids) if never_token_ids else None,
        allowed=None if is_free and not is_masked else _allowed(requests, vocab_size),
        banned=_banned(requests, eos_token_ids),
        bias=None if is_free else _bias(requests),
        has_penalties=any(each.has_penalties for each in controls),
        num_top=max(wanted, default=None),
    )
