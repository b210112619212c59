"""Running one sequence through the backbone with every intermediate tensor kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.errors import RequestError
from deepinfer.device.runtime import StepKind
from deepinfer.model.caches import CacheGeometry
from deepinfer.model.draft_batch import DraftBatch
from deepinfer.model.drafter import Drafter
from deepinfer.model.loading import LoadedModel
from deepinfer.model.step_batch import StepBatch
from deepinfer.model.tracing import TraceSink

_BLOCK_SIZE = 64


class _Recorder:
    """Keeps copies of what the backbone reports, in execution order."""

    def __init__(self, observer: TraceSink | None) -> None:
        self.pieces: dict[str, list[Tensor]] = {}
        self._observer = observer

    def record(self, name: str, value: Tensor) -> None:
        if self._observer is not None:
            self._observer.record(name, value)
        self.pieces.setdefault(name, []).append(value.detach().clone())

    def joined(self, first: int, stop: int | None) -> dict[str, Tensor]:
        """Rows `first` to `stop` of every tensor, on the CPU."""
        return {
            name: torch.cat(pieces)[first:stop].cpu().contiguous()
            for name, pieces in self.pieces.items()
        }


def _check(token_ids: Sequence[int], loaded: LoadedModel, max_len: int | None) -> None:
    config = loaded.config
    if not token_ids:
        raise RequestError("no token to trace; give at least one")
    for token_id in token_ids:
        if not 0 <= token_id < config.vocab_size:
            raise RequestError(
                f"token id {token_id} is not in the vocabulary (vocab_size {config.vocab_size}); "
                f"expected 0 to {config.vocab_size - 1}"
            )
    limit = min(max_len or config.max_position_embeddings, config.max_position_embeddings)
    if len(token_ids) > limit:
        raise RequestError(
            f"{len(token_ids)} tokens to trace, the limit is {limit} (max_position_embeddings "
            f"{config.max_position_embeddings}, max_model_len {max_len}); trace fewer"
        )


def trace_tokens(
    loaded: LoadedModel,
    backend: Backend,
    token_ids: Sequence[int],
    *,
    kind: StepKind = StepKind.PREFILL,
    chunk: int | None = None,
    last: int | None = None,
    max_len: int | None = None,
    observer: TraceSink | None = None,
) -> dict[str, Tensor]:
    """Trace one sequence from an empty cache; a drafter then drafts after its last token.

    Args:
        loaded: the model on `backend`, with its drafter if that is to be traced.
        backend: where it runs.
        token_ids: the sequence.
        kind: PREFILL in chunks, or DECODE token by token.
        chunk: tokens per step; None: all at once (1 when decoding).
        last: keep the rows of the last positions only; None keeps all.
        max_len: positions the model was loaded for, in tokens; None: the model's own limit.
        observer: is told every recorded tensor at once, inside the stream's work.

    Returns:
        Tensors on the CPU by trace name; dimension 0 is the position. `logits` [n, vocab] fp32
        comes last of the backbone. Dimension 0 of what follows, the `draft.*` tensors of one
        pass anchored at the last token, is the row of the block, and `last` does not apply;
        `draft.context` belongs to the positions before the anchor.
    Raises:
        RequestError: no token, an id outside the vocabulary, or too many tokens.
    """
    _check(token_ids, loaded, max_len)
    ids, config = list(token_ids), loaded.config
    size = 1 if kind is StepKind.DECODE else (chunk or len(ids))
    num_blocks = -(-len(ids) // _BLOCK_SIZE)
    geometry = CacheGeometry.for_engine(
        config,
        block_size=_BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=1,
        max_num_tokens=size,
        has_drafter=loaded.drafter is not None,
    )
    caches = loaded.backbone.create_caches(geometry)
    device = backend.runtime.device
    recorder, logits = _Recorder(observer), []
    context, block = _Recorder(observer), _Recorder(observer)
    history_len = config.history_len

    def one(value: int) -> Tensor:
        return torch.tensor([value], device=device)

    def run(start: int) -> None:
        part = ids[start : start + size]
        before = ids[max(0, start - history_len) : start]
        padded = [-1] * (history_len - len(before)) + before
        batch = StepBatch(
            kind=kind,
            input_ids=torch.tensor(part, device=device),
            query_lens=one(len(part)),
            context_lens=one(start),
            seq_slots=one(0),
            block_table=torch.arange(num_blocks, device=device).unsqueeze(0),
            history=torch.tensor([padded], device=device),
            logits_rows=torch.arange(len(part), device=device),
            max_query_len=len(part),
            max_key_len=start + len(part),
        )
        plan = loaded.backbone.plan(batch, geometry)
        state = loaded.backbone.run(plan, caches, recorder)
        logits.append(loaded.backbone.head(state, batch.logits_rows, recorder))
        if loaded.drafter is not None:
            # The anchor is the last token: its row is no context yet.
            accepted = one(min(len(part), len(ids) - 1 - start))
            loaded.drafter.inject(state, plan, accepted, caches, context)

    def draft(drafter: Drafter) -> None:
        batch = DraftBatch(
            anchor_ids=one(ids[-1]),
            anchor_positions=one(len(ids) - 1),
            seq_slots=one(0),
            floors=one(0),
            valid=torch.ones(1, dtype=torch.bool, device=device),
        )
        drafter.draft(batch, caches, trace=block)

    stream = backend.runtime.compute_stream
    for start in range(0, len(ids), size):
        stream.enqueue(partial(run, start))
    if loaded.drafter is not None:
        stream.enqueue(partial(draft, loaded.drafter))
    stream.synchronize()
    recorder.pieces["logits"] = logits
    first = 0 if last is None else max(0, len(ids) - last)
    parts = (
        recorder.joined(first, len(ids)),
        context.joined(first, len(ids) - 1),
        block.joined(0, None),
    )
    return {name: value for part in parts for name, value in part.items()}
