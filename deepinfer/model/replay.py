"""Which rows of a prompt each layer runs: bounded replay, and rebuilding windows after a hit.

Everything that grows with the context is written up to the last KV source. Layers after it own
nothing but their windows, so a prompt may run them on its tail only (bounded replay). Windows are
not kept with cached blocks; after a prefix hit at H they are rebuilt by running some rows before H
again, which read the cached blocks and never write them:

    bounded   rows from H - W on, and nothing below H - W is seen: W rows, an approximation
    exact     so many rows that each layer's windows are those of a run from the start; a layer
              needs W - 1 rows more than the next, a trapezoid

Positions are absolute, so that the result does not depend on how the rows are cut into chunks.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from deepinfer.device.errors import ContractError
from deepinfer.model.config import V41Config
from deepinfer.model.step_batch import BatchReplay, Cut


class SequenceCut(NamedTuple):
    """From the remainder of `layer` (all but its cache writes) on, fewer rows of a sequence run.

    Attributes:
        layer: the layer; its remainder still sees the window that it wrote.
        start: first position that runs.
        floor: first position whose window row later layers may read.
    """

    layer: int
    start: int
    floor: int


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Rows of one sequence's prefill.

    Attributes:
        first: first position that is computed; those before it are cached or not needed.
        write_from: first position whose compressed rows and index keys may be written.
        floor: first position whose window row may be read before the first cut.
        cuts: by ascending layer, with starts that never fall.
    """

    first: int = 0
    write_from: int = 0
    floor: int = 0
    cuts: tuple[SequenceCut, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether every layer runs all rows from `first` on and sees all of its window."""
        return self.write_from <= self.first and self.floor == 0 and not self.cuts

    def limits(self, layer: int) -> tuple[int, int]:
        """Start and floor in force after the cut, if any, at `layer`."""
        start, floor = self.first, self.floor
        for cut in self.cuts:
            if cut.layer <= layer:
                start, floor = cut.start, cut.floor
        return start, floor


ALL_ROWS = PrefillRows()
"""Every row in every layer."""


def decoder_start(num_prompt_tokens: int, keep_tokens: int) -> int:
    """First prompt position that layers after the last KV source run, in bounded replay."""
    return max(0, num_prompt_tokens - keep_tokens)


def lossless_keep_tokens(config: V41Config) -> int:
    """Kept tokens from which on bounded replay of a cold prompt gives the bits of all rows.

    The last row sees through W - 1 rows in each layer after the last KV source; layers before it
    run every row anyway.
    """
    source = config.last_kv_source
    if source is None:
        return 1
    return 1 + (config.num_hidden_layers - 1 - source) * (config.sliding_window - 1)


def cold_rows(config: V41Config, start: int) -> PrefillRows:
    """Rows of a prompt of which nothing is cached.

    Args:
        config: the model.
        start: from `decoder_start`; 0 runs all rows in all layers.
    """
    return _with_decoder_cut(config, ALL_ROWS, start)


def bounded_rows(config: V41Config, num_hit_tokens: int, start: int) -> PrefillRows:
    """Rows after a prefix hit whose windows are rebuilt from the last W cached tokens.

    Args:
        config: the model.
        num_hit_tokens: cached positions H, at least W.
        start: from `decoder_start` of the whole prompt.
    Raises:
        ContractError: the hit is shorter than a window.
    """
    first = num_hit_tokens - config.sliding_window
    if first < 0:
        raise ContractError(
            f"a hit of {num_hit_tokens} tokens is shorter than the window of "
            f"{config.sliding_window}; do not adopt it, running all rows costs the same"
        )
    rows = PrefillRows(first, write_from=num_hit_tokens, floor=first)
    return _with_decoder_cut(config, rows, max(first, start))


def exact_rows(
    config: V41Config, num_hit_tokens: int, start: int, *, num_final_rows: int = 1
) -> PrefillRows:
    """Rows after a prefix hit that rebuild the windows of a run from the start, bit by bit.

    Args:
        config: the model.
        num_hit_tokens: cached positions H.
        start: from `decoder_start` of the whole prompt.
        num_final_rows: rows before H that the last layer runs to its end: 1 for logits after a
            hit of the whole prompt, W where a drafter's window is filled from them.

    Source: exact schedule of bounded SWA replay; layer L writes
        num_final_rows + (last - L + 1) * (W - 1) window rows.
    """
    back, last = config.sliding_window - 1, config.num_hidden_layers - 1
    source = config.last_kv_source
    needed = max(0, num_hit_tokens - num_final_rows)
    starts: list[int] = []
    for layer in range(last, -1, -1):
        decodes = source is not None and layer >= source
        starts.append(max(needed, start) if decodes else needed)
        needed = max(0, starts[-1] - back)
        if layer == source:
            # All new rows reach the last source, whose cache writes they need.
            needed = min(needed, num_hit_tokens)
    starts.reverse()
    cuts = tuple(
        SequenceCut(layer, begin, start if source is not None and layer >= source else 0)
        for layer, begin in enumerate(starts)
        if begin > (starts[layer - 1] if layer else needed)
    )
    return PrefillRows(needed, write_from=num_hit_tokens, cuts=cuts)


def resumed_rows(config: V41Config, first: int, num_hit_tokens: int, start: int) -> PrefillRows:
    """Rows of a sequence whose windows before `first` are at hand.

    Args:
        config: the model.
        first: first position to compute.
        num_hit_tokens: cached positions, at least `first`.
        start: from `decoder_start` of the whole prompt; 0, or at least `first`.
    """
    rows, source = PrefillRows(first, write_from=num_hit_tokens), config.last_kv_source
    if source is not None and start == first > 0:
        # No row is dropped, but the windows at hand are not those of the layers after the source.
        return replace(rows, cuts=(SequenceCut(source, start, start),))
    return _with_decoder_cut(config, rows, start)


def _with_decoder_cut(config: V41Config, rows: PrefillRows, start: int) -> PrefillRows:
    source = config.last_kv_source
    if source is None or start <= rows.first:
        return rows
    cut = SequenceCut(source, start, start)
    return PrefillRows(rows.first, rows.write_from, rows.floor, (cut,))


def batch_replay(
    rows: Sequence[PrefillRows], context_lens: Sequence[int], query_lens: Sequence[int]
) -> BatchReplay | None:
    """What a prefill step says about rows to its layers; None when it is nothing.

    Args:
        rows: of each request.
        context_lens: positions computed before the step, of each request.
        query_lens: positions computed by it.

    Returns:
        Limits on the host, int64.
    """
    if all(entry.is_plain for entry in rows):
        return None
    layers = sorted({cut.layer for entry in rows for cut in entry.cuts})
    stops = list(map(operator.add, context_lens, query_lens))
    limits = [[entry.floor for entry in rows], [entry.write_from for entry in rows]]
    cuts: list[Cut] = []
    for layer in layers:
        starts, floors = zip(*(entry.limits(layer) for entry in rows), strict=True)
        lens = [
            max(0, stop - max(context, start))
            for stop, context, start in zip(stops, context_lens, starts, strict=True)
        ]
        cuts.append(Cut(layer, num_rows=sum(lens), max_query_len=max(lens)))
        limits += [list(starts), list(floors)]
    return BatchReplay(torch.tensor(limits, dtype=torch.int64), tuple(cuts))
