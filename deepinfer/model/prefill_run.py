"""One prompt through a backbone, in chunks, timed by events of the compute stream."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.runtime import StepKind
from deepinfer.model.caches import CacheGeometry
from deepinfer.model.loading import LoadedModel
from deepinfer.model.replay import PrefillRows, batch_replay
from deepinfer.model.step_batch import StepBatch

_BLOCK_SIZE = 64


class Prefill:
    """Caches for one request of a model."""

    def __init__(
        self, loaded: LoadedModel, backend: Backend, *, max_tokens: int, chunk_tokens: int
    ) -> None:
        """Allocate caches.

        Args:
            loaded: the model on `backend`.
            backend: where it runs.
            max_tokens: longest prompt.
            chunk_tokens: most rows of a step.
        """
        self._loaded, self._backend = loaded, backend
        self._chunk_tokens = chunk_tokens
        self._num_blocks = -(-max_tokens // _BLOCK_SIZE)
        geometry = CacheGeometry.for_engine(
            loaded.config,
            block_size=_BLOCK_SIZE,
            num_blocks=self._num_blocks,
            max_num_seqs=1,
            max_num_tokens=min(chunk_tokens, max_tokens),
        )
        self._caches = loaded.backbone.create_caches(geometry)

    def run(
        self, token_ids: list[int], rows: PrefillRows, *, num_logits: int = 1
    ) -> tuple[Tensor, float]:
        """Compute a prompt from its first token on.

        Args:
            token_ids: the prompt.
            rows: what each layer runs of it.
            num_logits: tokens at the end whose logits are wanted; all layers must run them.

        Returns:
            [num_logits, V] fp32 logits on the CPU, and microseconds on the device.
        """
        ends = [*range(0, len(token_ids), self._chunk_tokens), len(token_ids)]
        first_logits = len(token_ids) - num_logits
        batches = [
            self._batch(token_ids, rows, start, stop, first_logits)
            for start, stop in pairwise(ends)
        ]
        logits: list[Tensor] = []

        def forward(batch: StepBatch) -> None:
            logits.append(self._loaded.backbone.forward(batch, self._caches))

        stream = self._backend.runtime.compute_stream
        stream.synchronize()
        begin = stream.record_event(timed=True)
        for batch in batches:
            stream.enqueue(partial(forward, batch))
        end = stream.record_event(timed=True)
        end.synchronize()
        return torch.cat(logits).cpu(), end.time_us - begin.time_us

    def _batch(
        self, token_ids: list[int], rows: PrefillRows, start: int, stop: int, first_logits: int
    ) -> StepBatch:
        device, width = self._backend.runtime.device, self._loaded.config.history_len

        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        replay = batch_replay([rows], [start], [stop - start])
        if replay is not None:
            replay = replace(replay, limits=replay.limits.to(device))
        before = token_ids[max(0, start - width) : start]
        return StepBatch(
            kind=StepKind.PREFILL,
            input_ids=tensor(token_ids[start:stop]),
            query_lens=tensor([stop - start]),
            context_lens=tensor([start]),
            seq_slots=tensor([0]),
            block_table=torch.arange(self._num_blocks, device=device).unsqueeze(0),
            history=tensor([-1] * (width - len(before)) + before).unsqueeze(0),
            logits_rows=tensor(list(range(max(first_logits - start, 0), stop - start))),
            max_query_len=stop - start,
            max_key_len=stop,
            replay=replay,
        )
