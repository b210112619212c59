"""Scores of a model: task exactness, bits per byte, expert loads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from deepinfer_training import backbone
from deepinfer_training.architecture import Architecture
from deepinfer_training.documents import Text
from deepinfer_training.fake_quant import Numerics
from deepinfer_training.indexer import Selection, SelectionMode
from deepinfer_training.sequence_plan import Planner
from deepinfer_training.sequences import DOMAINS, SequenceSource, Split
from deepinfer_training.tasks import COPY_LENGTHS, RECALL_DISTANCES, TaskItem, Tasks

WINDOW_TOKENS = 1024
STRIDE_TOKENS = 512


class Model:
    """A backbone with fixed weights in one numerics; weights are rounded once."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        arch: Architecture,
        planner: Planner,
        numerics: Numerics,
        device: torch.device,
    ) -> None:
        """Take the parameters as they are.

        Args:
            parameters: already rounded to their storage formats if that is wanted.
            arch: the model.
            planner: plans batches.
            numerics: what a forward rounds; its `quantize_weights` is switched off.
            device: where the parameters are.
        """
        self.parameters, self.arch, self.planner, self.device = parameters, arch, planner, device
        self.numerics = dataclasses.replace(numerics, quantize_weights=False)

    @torch.no_grad()
    def run(
        self, ids: Tensor, documents: Tensor, mode: SelectionMode = SelectionMode.SPARSE
    ) -> backbone.BackboneOutput:
        """Forward of ids [B, T] on the CPU or the device."""
        plan = self.planner.plan(
            ids.to(self.device), documents.to(self.device), self.numerics.dtype
        )
        selection = Selection.of(self.arch, mode)
        return backbone.forward(self.parameters, self.arch, plan, self.numerics, selection)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits of hidden rows."""
        return backbone.logits(self.parameters, hidden, self.numerics)

    def padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """ids and documents [B, T] of rows of unequal length; T is a whole number of tiles."""
        tile = 2 * self.arch.sliding_window
        length = -(-max(map(len, rows)) // tile) * tile
        ids = torch.full((len(rows), length), self.arch.pad_token_id)
        documents = torch.ones((len(rows), length), dtype=torch.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
            documents[i, : len(row)] = 0
        return ids, documents


def _batches(items: Sequence[TaskItem], size: int) -> Iterator[Sequence[TaskItem]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def exactness(
    model: Model, items: Sequence[TaskItem], mode: SelectionMode, *, batch: int = 16
) -> float:
    """Share of items whose whole answer is what greedy decoding would write."""
    right = 0
    for part in _batches(items, batch):
        ids, documents = model.padded([item.ids for item in part])
        hidden = model.run(ids, documents, mode).hidden
        for i, item in enumerate(part):
            best = model.logits(hidden[i, item.start - 1 : item.stop - 1]).argmax(-1)
            right += best.tolist() == item.ids[item.start : item.stop]
    return right / len(items)


def task_scores(
    model: Model, tasks: Tasks, *, count: int, controls: bool, batch: int = 16
) -> dict[str, dict[str, float]]:
    """Exactness of every task; recall also without selections and with random ones."""
    modes = [SelectionMode.SPARSE]
    if controls:
        modes += [SelectionMode.NONE, SelectionMode.RANDOM, SelectionMode.DENSE]
    scores: dict[str, dict[str, float]] = {}
    for mode in modes:
        name = "recall" if mode is SelectionMode.SPARSE else f"recall_{mode.value}"
        scores[name] = {
            str(d): exactness(model, tasks.recall(d, count), mode, batch=batch)
            for d in RECALL_DISTANCES
        }
    sparse = SelectionMode.SPARSE
    scores["copy"] = {
        str(n): exactness(model, tasks.copy(n, count), sparse, batch=batch) for n in COPY_LENGTHS
    }
    scores["addition"] = {
        str(n): exactness(model, tasks.addition(n, 2 * count), sparse, batch=batch) for n in (2, 3)
    }
    scores["json"] = {"exact": exactness(model, tasks.json(2 * count), sparse, batch=batch)}
    return scores


def bits_per_byte(
    model: Model, text: Text, content: bytes, *, batch: int = 16, max_tokens: int | None = None
) -> float:
    """Summed surprise of a text in bits over its bytes.

    From BOS in windows of 1024 tokens, 512 apart; only what no earlier window held is counted.
    """
    ids = [text.bos, *text.encode(content.decode("utf-8"))]
    num_bytes = len(content)
    if max_tokens is not None and len(ids) > max_tokens:
        ids = ids[:max_tokens]
        num_bytes = len(text.decode(ids[1:]).encode("utf-8"))
    starts = list(range(0, max(1, len(ids) - WINDOW_TOKENS + STRIDE_TOKENS), STRIDE_TOKENS))
    nats = 0.0
    for first in range(0, len(starts), batch):
        part = starts[first : first + batch]
        rows = [ids[s : s + WINDOW_TOKENS] for s in part]
        hidden = model.run(*model.padded(rows)).hidden
        for i, (start, row) in enumerate(zip(part, rows, strict=True)):
            new = 1 if start == 0 else WINDOW_TOKENS - STRIDE_TOKENS
            logits = model.logits(hidden[i, new - 1 : len(row) - 1])
            targets = torch.tensor(row[new:], device=model.device)
            nats += float(cross_entropy(logits, targets, reduction="sum"))
    return nats / math.log(2) / num_bytes


def expert_loads(
    model: Model, source: SequenceSource, *, count: int, length: int
) -> dict[str, list[list[float]]]:
    """For each domain the share of routed tokens [layer][expert]; each layer sums to 1."""
    loads = {}
    for domain in DOMAINS:
        batch = source.batch(Split.DEV, 7, 0, count, length, domain)
        ids = torch.from_numpy(batch.ids.astype("int64"))
        documents = torch.from_numpy(batch.documents.astype("int64"))
        counted = model.run(ids, documents).loads.double()
        share = counted / counted.sum(1, keepdim=True)
        loads[domain] = [[round(float(x), 5) for x in layer] for layer in share]
    return loads
