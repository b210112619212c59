"""What every layer needs to know about a batch of packed sequences, computed once per forward."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_training.architecture import Architecture
from deepinfer_training.engram import EngramHash


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """Masks, rotations and table rows of B sequences of T tokens.

    Attributes:
        ids: [B, T] int64 tokens.
        valid: [B, T] bool, False for padding tokens.
        window_bias: [B, T, 2 W] in the activation dtype; 0 where a query may see a key of its own
            or the previous tile of W tokens, else -inf.
        cut_window_bias: the same for the layers after the last KV source, where a replay cut hides
            keys; `window_bias` itself when there is none.
        visible: for each ratio [B, T, T / ratio] bool, compressed rows a query may see.
        rotations: for the window-only and the compressed layers (cos, sin), each [T, R / 2] fp32.
        engram_rows: for each Engram layer [B, T, columns] int64.
    """

    ids: Tensor
    valid: Tensor
    window_bias: Tensor
    cut_window_bias: Tensor
    visible: dict[int, Tensor]
    rotations: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
    engram_rows: tuple[Tensor, ...]

    def rotation(self, ratio: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) of a layer with this compression ratio."""
        return self.rotations[1 if ratio else 0]

    def bias(self, visible: Tensor) -> Tensor:
        """Additive form of a mask, in the activation dtype."""
        bias = torch.zeros(visible.shape, dtype=self.window_bias.dtype, device=visible.device)
        return bias.masked_fill_(~visible, -math.inf)


def rope_frequencies(arch: Architecture, ratio: int) -> Tensor:
    """Angular frequency of every pair, [R / 2] fp32; YaRN where rows are compressed."""
    width = arch.qk_rope_head_dim
    index = torch.arange(width // 2, dtype=torch.float32)
    theta = arch.compress_rope_theta if ratio else arch.rope_theta
    frequencies = torch.pow(torch.tensor(theta, dtype=torch.float32), -2.0 * index / width)
    if not ratio:
        return frequencies
    scaling = arch.rope_scaling

    def dimension_of(num_rotations: float) -> float:
        turns = scaling["original_max_position_embeddings"] / (2 * math.pi * num_rotations)
        return width * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(dimension_of(scaling["beta_fast"])), 0)
    high = min(math.ceil(dimension_of(scaling["beta_slow"])), width - 1)
    ramp = ((index - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    result: Tensor = frequencies / scaling["factor"] * ramp + frequencies * (1.0 - ramp)
    return result


def rope_rotation(arch: Architecture, ratio: int, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin of positions 0 .. length - 1, each [length, R / 2] fp32 on the CPU."""
    positions = torch.arange(length, dtype=torch.float32)
    angles = torch.outer(positions, rope_frequencies(arch, ratio))
    return angles.cos(), angles.sin()


class Planner:
    """Makes plans; keeps what depends on the architecture and the sequence length only."""

    def __init__(self, arch: Architecture, token_map: Tensor, device: torch.device) -> None:
        self._arch, self._device = arch, device
        self._hash = EngramHash.of(arch, token_map.to(device))
        self._rotations: dict[int, tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]] = {}

    def plan(
        self, ids: Tensor, documents: Tensor, dtype: torch.dtype, cut: Tensor | None = None
    ) -> SequencePlan:
        """Plan of one batch; issues device work only.

        Args:
            ids: [B, T] int64; T is a multiple of the sliding window.
            documents: [B, T] int64; attention, compression and Engram end where it changes, and it
                changes at even positions only.
            dtype: activation dtype.
            cut: [B] int64 replay cut of each sequence; 0 cuts nothing.
        """
        arch = self._arch
        length, window = ids.shape[1], arch.sliding_window
        position = torch.arange(length, device=self._device)
        tile_start = position // window * window
        key = (tile_start - window).unsqueeze(1) + torch.arange(2 * window, device=self._device)
        distance = position.unsqueeze(1) - key
        near = (distance >= 0) & (distance < window) & (key >= 0)
        key_document = documents[:, key.clamp_min(0).flatten()].view(-1, length, 2 * window)
        seen = near & (key_document == documents.unsqueeze(-1))
        window_bias = self._bias(seen, dtype)
        cut_bias = window_bias
        if cut is not None:
            start = (cut - window).view(-1, 1, 1)
            hidden = (position.view(1, -1, 1) >= start) & (key < start)
            cut_bias = self._bias(seen & ~hidden, dtype)
        visible = {}
        for ratio in arch.ratios:
            last = torch.arange(length // ratio, device=self._device) * ratio + ratio - 1
            same = documents.unsqueeze(-1) == documents[:, last].unsqueeze(1)
            visible[ratio] = (last <= position.unsqueeze(1)) & same
        return SequencePlan(
            ids,
            ids != arch.pad_token_id,
            window_bias,
            cut_bias,
            visible,
            self._rotation(length),
            self._hash.rows(ids, documents, arch.engram_pad_token_id),
        )

    def plain_rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) of window-only layers for positions 0 .. length - 1."""
        return self._rotation(length)[0]

    def _bias(self, seen: Tensor, dtype: torch.dtype) -> Tensor:
        bias = torch.zeros(seen.shape, dtype=dtype, device=self._device)
        return bias.masked_fill_(~seen, -math.inf)

    def _rotation(self, length: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        if length not in self._rotations:
            plain, scaled = (
                tuple(t.to(self._device) for t in rope_rotation(self._arch, ratio, length))
                for ratio in (0, 1)
            )
            self._rotations[length] = ((plain[0], plain[1]), (scaled[0], scaled[1]))
        return self._rotations[length]
