"""Parameter groups of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BASE_RATE = 2e-3
_WEIGHT_DECAY = 0.1


def adamw(parameters: Mapping[str, Tensor], base_rate: float = BASE_RATE) -> torch.optim.AdamW:
    """AdamW; matrices decay, tables learn faster, mHC mixers slower.

    Every group keeps its own rate under `full_rate`; the schedule scales it.

    Args:
        parameters: trained ones by name; those that take no gradient are left out.
        base_rate: peak learning rate of matrices.
    """
    groups: dict[str, list[Tensor]] = {}
    for name, value in parameters.items():
        if value.requires_grad:
            groups.setdefault(_group(name, value), []).append(value)
    rates = {"matrix": 1.0, "embedding": 2.0, "engram": 5.0, "mixer": 0.25, "vector": 1.0}
    settings = [
        {
            "params": group,
            "lr": base_rate * rates[kind],
            "full_rate": base_rate * rates[kind],
            "weight_decay": _WEIGHT_DECAY if kind == "matrix" else 0.0,
        }
        for kind, group in groups.items()
    ]
    on_gpu = all(value.is_cuda for value in parameters.values())
    return torch.optim.AdamW(settings, betas=(0.9, 0.95), eps=1e-8, fused=on_gpu)


def set_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Scale every group's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["full_rate"] * factor


def _group(name: str, value: Tensor) -> str:
    if name.endswith("engram.embed.weight"):
        return "engram"
    if name in ("embed.weight", "head.weight") or ".markov_head." in name:
        return "embedding"
    if ".hc_" in name:
        return "mixer"
    if value.dim() == 1 or name.endswith(("q_weight", "k_weight")):
        return "vector"
    return "matrix"
