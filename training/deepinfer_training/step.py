"""One step of the backbone: forward and losses of a phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_training import backbone, fake_quant
from deepinfer_training.architecture import Architecture
from deepinfer_training.schedule import Phase
from deepinfer_training.sequence_plan import Planner
from deepinfer_training.sequences import DOMAINS

_INDEX_WEIGHT = 0.1
_Z_WEIGHT = 1e-4
_BALANCE_WEIGHT = 1e-4
_FULL_WEIGHT = 0.99


class Inputs(NamedTuple):
    """A batch on the device.

    Attributes:
        ids: [B, T] int64.
        documents: [B, T] int64.
        weights: [B, T] fp32 weight of every token as a target.
        domains: [B] int64.
        cut: [B] int64 replay cut, 0 for none.
    """

    ids: Tensor
    documents: Tensor
    weights: Tensor
    domains: Tensor
    cut: Tensor


class StepResult(NamedTuple):
    """What a step reports, all on the device.

    Attributes:
        loss: language loss.
        total: what was minimised.
        index_loss: divergence of the indexers.
        caught: [sources] attention caught by the index top-k.
        loads: [L, E] tokens routed.
    """

    loss: Tensor
    total: Tensor
    index_loss: Tensor
    caught: Tensor
    loads: Tensor


class DomainTotals:
    """Summed losses and weights by domain, of all targets and of answers only."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros((4, len(DOMAINS)), device=device)

    def add(self, losses: Tensor, weights: Tensor, domains: Tensor) -> None:
        """Count the losses [B, T - 1] of a batch."""
        answers = (weights > _FULL_WEIGHT).float()
        parts = (losses * weights, weights, losses * answers, answers)
        self.sums.index_add_(1, domains, torch.stack([part.sum(1) for part in parts]))

    def take(self) -> dict[str, tuple[float, float]]:
        """(mean loss, mean loss of answers) in nats per token by domain, and start again."""
        sums = self.sums.to("cpu", copy=True)
        self.sums.zero_()
        return {
            domain: (
                float(sums[0, i] / sums[1, i]),
                float(sums[2, i] / sums[3, i].clamp_min(1e-6)),
            )
            for i, domain in enumerate(DOMAINS)
            if float(sums[1, i]) > 0
        }


class LossFunction:
    """Forward and losses of one phase."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        arch: Architecture,
        planner: Planner,
        phase: Phase,
        totals: DomainTotals,
        device: torch.device,
    ) -> None:
        self._parameters, self._arch, self._planner = parameters, arch, planner
        self._phase, self._totals = phase, totals
        self._numerics = fake_quant.on_device(phase.numerics, device)

    def __call__(self, inputs: Inputs) -> StepResult:
        """Losses of a batch; `total` carries the gradient."""
        phase, arch, numerics = self._phase, self._arch, self._numerics
        plan = self._planner.plan(inputs.ids, inputs.documents, numerics.dtype, inputs.cut)
        result = backbone.forward(
            self._parameters, arch, plan, numerics, phase.selection(arch), wants_index_loss=True
        )
        logits = backbone.logits(self._parameters, result.hidden[:, :-1], numerics)
        weights = inputs.weights[:, 1:]
        log_total = torch.logsumexp(logits, dim=-1)
        chosen = logits.gather(-1, inputs.ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        losses = log_total - chosen
        loss = (losses * weights).sum() / weights.sum()
        with torch.no_grad():
            self._totals.add(losses.detach(), weights, inputs.domains)
        z_loss = (log_total.square() * (weights > 0)).mean()
        total = loss + _Z_WEIGHT * z_loss + _BALANCE_WEIGHT * result.balance
        total = total + _INDEX_WEIGHT * result.index_loss
        return StepResult(
            loss.detach(), total, result.index_loss.detach(), result.caught, result.loads
        )
