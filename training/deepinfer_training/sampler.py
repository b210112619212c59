"""Continuing prompts with the model itself, by whole forwards; for drafter data and rollouts."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_training.evaluation import Model


@torch.no_grad()
def continue_prompts(
    model: Model, prompts: Tensor, count: int, temperatures: Tensor, generator: torch.Generator
) -> Tensor:
    """Append `count` tokens to every prompt.

    Args:
        model: the target.
        prompts: [B, P] int64, P even; any device.
        count: tokens to add.
        temperatures: [B] fp32; 0 takes the argmax.
        generator: on the model's device.

    Returns:
        [B, P + count] int64 on the model's device.
    """
    tile = 2 * model.arch.sliding_window
    start = prompts.shape[1]
    length = -(-(start + count) // tile) * tile
    ids = torch.full((prompts.shape[0], length), model.arch.pad_token_id, device=model.device)
    ids[:, :start] = prompts.to(model.device)
    temperatures = temperatures.to(model.device).unsqueeze(1)
    for position in range(start, start + count):
        seen = -(-position // tile) * tile
        part = ids[:, :seen]
        hidden = model.run(part, torch.zeros_like(part)).hidden[:, position - 1]
        logits = model.logits(hidden)
        share = torch.softmax(logits / temperatures.clamp_min(1e-3), dim=-1)
        drawn = torch.multinomial(share, 1, generator=generator)
        ids[:, position : position + 1] = torch.where(
            temperatures > 0, drawn, logits.argmax(-1, keepdim=True)
        )
    return ids[:, : start + count]
