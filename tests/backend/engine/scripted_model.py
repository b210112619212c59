"""Models and drafters that follow a script: each token is a function of the tokens before it.

A script says what the target makes of the tokens so far, a proposal what the drafter makes of
them. So any pattern of accepted drafts can be made to happen: a drafter that proposes by the
target's script is always right, one that errs at chosen places is refused there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.ops.sampling import Purpose, SampleWork, sample_tokens
from deepinfer.device.ops.spec import draft_context, draft_plan
from deepinfer.device.ops.state import row_layout
from deepinfer.device.runtime import StepKind
from deepinfer.model.caches import CacheGeometry, ModelCaches
from deepinfer.model.config import V41Config
from deepinfer.model.draft_batch import DraftBatch, Drafts
from deepinfer.model.forwarded import Forwarded
from deepinfer.model.layer_state import LayerState
from deepinfer.model.step_batch import StepBatch, StepPlan

PREFERRED = 20.0
Script = Callable[[list[int]], int | Tensor]


class ScriptedModel:
    """Chooses each next token by a script of the tokens before it; keeps real caches unused."""

    def __init__(self, config: V41Config, backend: Backend, script: Script) -> None:
        self.config, self.backend, self._script = config, backend, script
        self.tokens: dict[int, list[int]] = {}
        self.blocks: dict[tuple[int, ...], list[int]] = {}

    def create_caches(self, geometry: CacheGeometry) -> ModelCaches:
        return ModelCaches(self.config, geometry, self.backend)

    def step(self, batch: StepBatch, caches: ModelCaches) -> Forwarded:
        before: list[list[int]] = []
        first = 0
        for slot, context, length in zip(
            batch.seq_slots.tolist(),
            batch.context_lens.tolist(),
            batch.query_lens.tolist(),
            strict=True,
        ):
            if length == 0:
                continue  # padding, or past its end
            known = self.tokens.setdefault(slot, [])
            if batch.kind is StepKind.DECODE:
                fed = batch.input_ids[first : first + length].tolist()
                self.check_drafts(slot, known[:context], fed)
            known[context:] = batch.input_ids[first : first + length].tolist()
            assert len(known) == context + length, "the engine skipped a position"
            before += [known[: context + row + 1] for row in range(length)]
            first += length
        return self._forwarded(batch, before)

    def check_drafts(self, slot: int, known: list[int], fed: list[int]) -> None:
        """Drafts between rows are what the drafter made of the tokens before them, or a part."""
        if self.blocks and len(fed) > 1:
            block = self.blocks.get((slot, *known, fed[0]))
            assert block is not None, "drafts that nobody made of these tokens"
            assert fed[1:] == block[: len(fed) - 1], "drafts of another request or step"

    def row(self, known: list[int]) -> Tensor:
        """Logits [V] after the tokens so far."""
        return logits_of(self._script(known), self.config.vocab_size)

    def _forwarded(self, batch: StepBatch, before: list[list[int]]) -> Forwarded:
        """Logits of the wanted rows; of padding they mean nothing."""
        padding = torch.zeros(self.config.vocab_size)
        rows = [
            self.row(before[row]) if row < len(before) else padding
            for row in batch.logits_rows.tolist()
        ]
        logits = torch.stack(rows) if rows else padding.new_zeros((0, len(padding)))
        layout = self.backend.ops[row_layout](
            batch.query_lens, batch.context_lens, batch.input_ids.shape[0]
        )
        # A script has no layers: nothing but rows and batch of the plan is there to be read.
        plan = StepPlan(batch, layout, cast("object", None), {})  # type: ignore[arg-type]
        return Forwarded(logits, cast("LayerState", None), plan)


def logits_of(wanted: int | Tensor, vocab_size: int) -> Tensor:
    """Logits [V] as given, or those that prefer one token."""
    if isinstance(wanted, Tensor):
        return wanted
    row = torch.zeros(vocab_size)
    row[wanted] = PREFERRED
    return row


class CheckingModel(ScriptedModel):
    """Keeps the tokens in the real caches and nowhere else.

    Position and token of every row are written to a compressed cache through the block table and
    to a window ring through the slot, and all earlier ones are read back and checked. Poison,
    another request's rows and positions that were never computed fail the step.
    """

    def step(self, batch: StepBatch, caches: ModelCaches) -> Forwarded:
        rows = self.backend.ops[row_layout](
            batch.query_lens, batch.context_lens, batch.input_ids.shape[0]
        )
        source = max(caches.compressed)  # the last KV source has one entry per token
        size, ring = caches.geometry.block_size, caches.geometry.ring
        known: list[list[int]] = [[] for _ in range(batch.query_lens.shape[0])]
        before: list[list[int]] = []
        for row, token in enumerate(batch.input_ids.tolist()):
            if not rows.valid[row]:
                continue
            seq, position = int(rows.row_seq[row]), int(rows.positions[row])
            positions = torch.arange(position + 1)
            blocks = batch.block_table[seq, positions // size]
            assert blocks.min() >= 0, "a position has no block"
            slots = blocks * size + positions % size
            window = positions[-self.config.sliding_window :]
            in_ring = batch.seq_slots[seq] * ring + window % ring
            content = torch.zeros(1, caches.compressed[source].width)
            content[0, 0], content[0, 1] = position, token
            caches.compressed[source].pack(slots[-1:], content)
            caches.windows[0].pack(in_ring[-1:], content)
            read = caches.compressed[source].unpack(slots)
            assert torch.equal(read[:, 0], positions.float()), "wrong or poisoned block rows"
            assert torch.equal(caches.windows[0].unpack(in_ring), read[window]), "wrong ring rows"
            known[seq] = read[:, 1].int().tolist()
            before.append(known[seq])
        for seq, slot in enumerate(batch.seq_slots.tolist()):
            if known[seq]:
                context = int(batch.context_lens[seq])
                if batch.kind is StepKind.DECODE:
                    self.check_drafts(slot, known[seq][:context], known[seq][context:])
                self.tokens[slot] = known[seq]
        return self._forwarded(batch, before)


class ScriptedDrafter:
    """Drafts by a proposal, and checks on the way that its context is what it should be.

    Position and token of every injected row go to the draft window. A draft pass reads the rows
    before its anchor: those of refused drafts, of another request, or none at all fail it.
    """

    def __init__(
        self, model: ScriptedModel, propose: Script, *, confidence: Callable[[int], float]
    ) -> None:
        """A drafter beside a scripted model.

        Args:
            model: the target.
            propose: next draft, or its logits, from the tokens so far and the drafts before it.
            confidence: of the draft at a position.
        """
        self._model, self._propose, self._confidence = model, propose, confidence
        self.num_passes = 0
        self._reached: dict[int, int] = {}

    def inject(
        self, state: LayerState, plan: StepPlan, num_accepted: Tensor, caches: ModelCaches
    ) -> None:
        slots = self._model.backend.ops[draft_context](
            plan.rows, num_accepted, plan.batch.seq_slots, ring=caches.geometry.draft_ring
        )
        window = caches.draft_windows[0]
        content = torch.zeros(len(slots), window.width)
        content[:, 0], content[:, 1] = plan.rows.positions, plan.batch.input_ids
        written = slots >= 0
        window.pack(slots[written], content[written])
        reached = (plan.batch.context_lens + num_accepted).tolist()
        for seq, slot in enumerate(plan.batch.seq_slots.tolist()):
            if plan.batch.query_lens[seq]:  # others are padding, or past their end
                self._reached[slot] = reached[seq]

    def draft(
        self, batch: DraftBatch, caches: ModelCaches, *, num_drafts: int | None = None
    ) -> Drafts:
        self.num_passes += 1
        assert num_drafts is not None
        config, ring = self._model.config, caches.geometry.draft_ring
        plan = self._model.backend.ops[draft_plan](
            batch.anchor_positions,
            batch.seq_slots,
            batch.floors,
            batch.valid,
            block_size=config.dspark_block_size,
            window=config.sliding_window,
            ring=ring,
        )
        window = caches.draft_windows[0]
        tokens: list[list[int]] = []
        logits: list[Tensor] = []
        for seq, anchor in enumerate(batch.anchor_ids.tolist()):
            position, slot = int(batch.anchor_positions[seq]), int(batch.seq_slots[seq])
            known = self._model.tokens.get(slot, [])[:position]
            if batch.valid[seq]:
                seen = plan.read[seq * config.dspark_block_size, : config.sliding_window]
                rows = window.unpack(seen[seen >= 0])
                start = max(0, position - config.sliding_window)
                wanted = torch.arange(start, position).float()
                assert torch.equal(rows[:, 0], wanted), "context of other positions"
                assert rows[:, 1].int().tolist() == known[start:], "context of other tokens"
                assert self._reached[slot] == position, "context of refused drafts, or too little"
            own, rows_of = self._block([*known, anchor], batch, seq, num_drafts)
            if batch.valid[seq]:
                self._model.blocks[slot, *known, anchor] = own
            tokens.append(own)
            logits.append(rows_of)
        confidences = torch.tensor(
            [
                [self._confidence(position + 1 + place) for place in range(num_drafts)]
                for position in batch.anchor_positions.tolist()
            ]
        )
        return Drafts(
            torch.tensor(tokens), torch.stack(logits), torch.logit(confidences), confidences
        )

    def _block(
        self, known: list[int], batch: DraftBatch, seq: int, num_drafts: int
    ) -> tuple[list[int], Tensor]:
        """Drafts of one request, greedy or drawn as its parameters say, and their logits."""
        drafts: list[int] = []
        rows: list[Tensor] = []
        for place in range(num_drafts):
            row = logits_of(self._propose([*known, *drafts]), self._model.config.vocab_size)
            rows.append(row)
            drafts.append(self._draw(row, batch, seq, place))
        return drafts, torch.stack(rows)

    def _draw(self, row: Tensor, batch: DraftBatch, seq: int, place: int) -> int:
        if batch.params is None or float(batch.params.temperature[seq]) == 0.0:
            return int(row.argmax())
        own = batch.params._replace(
            top_k=torch.zeros_like(batch.params.top_k),
            top_p=torch.ones_like(batch.params.top_p),
            min_p=torch.zeros_like(batch.params.min_p),
            positions=batch.anchor_positions * self._model.config.dspark_block_size + place,
        )
        one = type(own)(*(column[seq : seq + 1] for column in own))
        draw = self._model.backend.ops[sample_tokens]
        return int(draw(row.unsqueeze(0), one, SampleWork.RANDOM, purpose=Purpose.DRAFT))
