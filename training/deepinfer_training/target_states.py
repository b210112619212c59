"""What the frozen target computes along its own answers, kept so that every epoch can use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_training.architecture import Architecture
from deepinfer_training.calibration import accepted_drafts
from deepinfer_training.draft_step import DraftInputs
from deepinfer_training.drafter import Anchors, draft_greedily
from deepinfer_training.evaluation import Model
from deepinfer_training.own_text import OwnText

_TOKENS_AT_ONCE = 32768


@dataclass(frozen=True, slots=True)
class TargetStates:
    """Answers of one length, each with the window before it: all that drafts inside it read.

    The first anchor, the last token of the prompt, stands at index `window` of every row; where a
    prompt is shorter than the window, padding of another document stands before it. bf16 rows of
    the bundled model's size take 0.2 MB each.

    Attributes:
        ids: [B, L] int32.
        documents: [B, L] int8: 0 for the row, 1 for padding.
        taps: [B, L, taps * D] in the activation dtype.
        hidden: [B, L, D] final rows, the same.
        num_anchors: [B] int64 places with a token of the answer behind them.
        window: index of the first anchor.
    """

    ids: Tensor
    documents: Tensor
    taps: Tensor
    hidden: Tensor
    num_anchors: Tensor
    window: int

    @classmethod
    def of(
        cls, target: Model, own: OwnText, tell: Callable[[int], None] = lambda rows: None
    ) -> TargetStates:
        """Run the target over all rows.

        Args:
            target: frozen.
            own: its text, on any device.
            tell: called with the number of rows done.
        """
        arch, device = target.arch, target.device
        count = len(own.ids)
        anchors = own.stops - own.starts
        length = arch.sliding_window + int(anchors.max()) + arch.dspark_block_size
        kept = _empty(arch, count, length, target.numerics.dtype, device)
        place = torch.arange(length, device=device)
        first = 0
        while first < count:
            part = own.fitting(first, _TOKENS_AT_ONCE, arch).to(device)
            ids, starts, stops = part
            result = target.run(ids, part.documents())
            source = (starts - 1 - arch.sliding_window).unsqueeze(1) + place  # [b, L]
            outside = (source < 0) | (source >= stops.unsqueeze(1))
            source = source.clamp(0, ids.shape[1] - 1)
            done = slice(first, first + len(ids))
            kept.ids[done] = ids.gather(1, source).masked_fill(outside, arch.pad_token_id).int()
            kept.documents[done] = outside.to(torch.int8)
            for into, states in ((kept.taps, result.taps), (kept.hidden, result.hidden)):
                wide = source.unsqueeze(-1).expand(-1, -1, states.shape[-1])
                into[done] = states.gather(1, wide)
            kept.num_anchors[done] = stops - starts
            first += len(ids)
            tell(first)
        return kept

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, chosen: Tensor) -> TargetStates:
        """Rows [b] int64."""
        return TargetStates(
            self.ids[chosen], self.documents[chosen], self.taps[chosen], self.hidden[chosen],
            self.num_anchors[chosen], self.window,
        )  # fmt: skip

    def at(self, positions: Tensor) -> DraftInputs:
        """What drafting at positions [B, A] takes."""
        return DraftInputs(
            self.ids.long(), self.documents.long(), positions, self.taps, self.hidden
        )

    def at_random(self, num_anchors: int, generator: torch.Generator) -> DraftInputs:
        """Anchors anywhere in the answers, as many in each row."""
        device = self.ids.device
        share = torch.rand((len(self), num_anchors), generator=generator, device=device)
        return self.at(self.window + (share * self.num_anchors.unsqueeze(1)).long())


def _empty(
    arch: Architecture, count: int, length: int, dtype: torch.dtype, device: torch.device
) -> TargetStates:
    width = len(arch.dspark_target_layer_ids) * arch.hidden_size
    return TargetStates(
        torch.empty((count, length), dtype=torch.int32, device=device),
        torch.empty((count, length), dtype=torch.int8, device=device),
        torch.empty((count, length, width), dtype=dtype, device=device),
        torch.empty((count, length, arch.hidden_size), dtype=dtype, device=device),
        torch.empty(count, dtype=torch.int64, device=device),
        arch.sliding_window,
    )


@torch.no_grad()
def drafts_along(
    parameters: Mapping[str, Tensor], target: Model, states: TargetStates
) -> tuple[Tensor, Tensor]:
    """Greedy drafts after every token of the answers: accepted ones and tokens left, [B, P] each.

    Args:
        parameters: of the drafter, rounded, and the target's embedding and head.
        target: whose states these are.
        states: the answers.
    """
    arch, device = target.arch, target.device
    # As many columns whatever the rows: those of a part may all be short.
    longest = states.ids.shape[1] - states.window - arch.dspark_block_size
    steps = torch.arange(longest - 1, device=device)
    # The first anchor is the answer's first token, which comes without a draft.
    left = (states.num_anchors.unsqueeze(1) - 1 - steps).clamp_min(0)
    last = (states.num_anchors - 1).unsqueeze(1)
    inputs = states.at(states.window + torch.minimum(1 + steps, last))
    rotation = target.planner.plain_rotation(inputs.ids.shape[1] + arch.dspark_block_size)
    anchors = Anchors(inputs.positions, inputs.documents, rotation)
    drafts = draft_greedily(parameters, arch, inputs.ids, inputs.taps, anchors, target.numerics)
    left = left.clamp_max(arch.dspark_block_size)
    return accepted_drafts(drafts.tokens, inputs.ids, inputs.positions, left), left
