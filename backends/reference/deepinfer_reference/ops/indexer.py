"""Reference of the indexer family: dense scores, stable sorts."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from deepinfer.device.handles import RowCache
from deepinfer.device.op import OpTable
from deepinfer.device.ops import indexer
from deepinfer_reference.caches import dense_rows
from deepinfer_reference.gemm import ROW_TILE, round_to
from deepinfer_reference.ops.attention import KEY_TILE, rotate


def index_query(q: Tensor, positions: Tensor, rope_table: Tensor, cache: RowCache) -> Tensor:
    rotated = rotate(q, positions, rope_table, inverse=False)
    return dense_rows(cache).quantize(rotated).to(q.dtype)


def _query_tile(num_heads: int) -> int:
    """Queries per request are padded so that every product has whole row tiles."""
    return ROW_TILE // math.gcd(num_heads, ROW_TILE)


def index_scores(
    q: Tensor,
    head_weights: Tensor,
    cache: RowCache,
    block_table: Tensor,
    row_seq: Tensor,
    visible: Tensor,
    *,
    entries_per_block: int,
    max_visible: int,
    max_query_len: int,
) -> Tensor:
    num_rows, num_heads, width = q.shape
    if num_rows == 0 or max_visible == 0:
        return torch.zeros((num_rows, max_visible))
    num_seqs = block_table.shape[0]
    num_blocks = -(-max_visible // entries_per_block)
    blocks = block_table[:, :num_blocks]
    slots = blocks.unsqueeze(-1) * entries_per_block + torch.arange(entries_per_block)
    slots = torch.where(blocks.unsqueeze(-1) >= 0, slots, -1).flatten(1)
    # The number of keys grows while a request runs and must not show in the bits of a dot.
    slots = pad(slots, (0, -slots.shape[1] % KEY_TILE), value=-1)
    keys = dense_rows(cache).gather(slots)

    counts = torch.bincount(row_seq, minlength=num_seqs)
    offset = torch.arange(num_rows) - (torch.cumsum(counts, 0) - counts)[row_seq]
    # Padding rows stand behind the last request's rows and may exceed its query length.
    longest = max(max_query_len, int(counts.max()))
    longest += -longest % _query_tile(num_heads)
    padded = torch.zeros((num_seqs, longest, num_heads, width))
    padded[row_seq, offset] = q.float()
    dots = torch.bmm(padded.flatten(1, 2), keys.transpose(1, 2))
    dots = dots.view(num_seqs, longest, num_heads, -1)[row_seq, offset]

    weighted = round_to(dots, q.dtype).relu() * head_weights.float().unsqueeze(-1)
    weighted = round_to(weighted, q.dtype)
    total = weighted[:, 0]
    for head in range(1, num_heads):
        total = total + weighted[:, head]
    total = round_to(total, q.dtype)[:, :max_visible]
    hidden = torch.arange(max_visible) >= visible.unsqueeze(1)
    return total.masked_fill(hidden, -torch.inf)


def _ascending(chosen: Tensor, kept: Tensor, width: int) -> Tensor:
    """chosen [T, n] where kept, sorted ascending and padded with -1 to `width`."""
    last = torch.iinfo(torch.int64).max
    ordered = torch.where(kept, chosen, last).sort(dim=1).values
    ordered = torch.where(ordered == last, -1, ordered)
    return pad(ordered, (0, width - ordered.shape[1]), value=-1)


def _best(scores: Tensor, k: int) -> Tensor:
    """The k best columns of each row, lowest index first among equals, ascending, -1 padded."""
    count = min(k, scores.shape[1])
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :count]
    kept = scores.gather(1, order) > -torch.inf
    return _ascending(order, kept, k)


def select_topk(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    return _best(scores, k)


def select_candidates(scores: Tensor, visible: Tensor, num_blocks: int, block_size: int) -> Tensor:
    missing = -scores.shape[1] % block_size
    padded = pad(scores, (0, missing), value=-torch.inf)
    best = padded.unflatten(1, (-1, block_size)).amax(-1)
    newest = torch.div(visible - 1, block_size, rounding_mode="floor")
    is_newest = torch.arange(best.shape[1]) == newest.unsqueeze(1)
    best = torch.where(is_newest & (visible.unsqueeze(1) > 0), torch.inf, best)
    return _best(best, num_blocks)


def mask_candidates(scores: Tensor, candidates: Tensor, block_size: int) -> Tensor:
    num_blocks = -(-scores.shape[1] // block_size)
    # One column more takes the -1 entries.
    allowed = torch.zeros((scores.shape[0], num_blocks + 1), dtype=torch.bool)
    allowed.scatter_(1, torch.where(candidates >= 0, candidates, num_blocks), True)
    per_entry = allowed[:, :num_blocks].repeat_interleave(block_size, dim=1)
    return scores.masked_fill(~per_entry[:, : scores.shape[1]], -torch.inf)


def select_visible(visible: Tensor, k: int) -> Tensor:
    entries = torch.arange(k).expand(visible.shape[0], k)
    return torch.where(entries < visible.unsqueeze(1), entries, -1)


def register(table: OpTable) -> None:
    """Add this family's implementations to `table`."""
    table.implements(indexer.index_query)(index_query)
    table.implements(indexer.index_scores)(index_scores)
    table.implements(indexer.select_topk)(select_topk)
    table.implements(indexer.select_candidates)(select_candidates)
    table.implements(indexer.mask_candidates)(mask_candidates)
    table.implements(indexer.select_visible)(select_visible)
