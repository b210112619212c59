"""Indexer family: dense scores over each request's blocks, then the best entries.

npu_lightning_indexer and npu_quant_lightning_indexer are not used: they score and select in one,
with neither the candidate blocks nor the rounding of dots and scores to bf16, and their keys are
bf16 or e4m3 with one scale, where V4.1 keeps E2M1 in groups of 32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from deepinfer.device.handles import RowCache
from deepinfer.device.op import OpTable
from deepinfer.device.ops import indexer
from deepinfer_ascend950.caches import byte_rows
from deepinfer_ascend950.ops.rotation import rotate


def index_query(q: Tensor, positions: Tensor, rope_table: Tensor, cache: RowCache) -> Tensor:
    rotated = rotate(q, positions, rope_table, inverse=False)
    if q.numel() == 0:
        return rotated
    return byte_rows(cache).round_trip(rotated).to(q.dtype)


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
    num_rows, num_heads, _ = q.shape
    if num_rows == 0 or max_visible == 0:
        return q.new_zeros((num_rows, max_visible), dtype=torch.float32)
    device = q.device
    num_seqs = block_table.shape[0]
    num_blocks = -(-max_visible // entries_per_block)
    blocks = block_table[:, :num_blocks].unsqueeze(-1)
    inside = torch.arange(entries_per_block, device=device)
    slots = torch.where(blocks >= 0, blocks * entries_per_block + inside, -1).flatten(1)
    keys = byte_rows(cache).gather(slots).to(q.dtype)

    # Each request's rows stand together; padding rows, behind the last request's, see nothing.
    counts = torch.zeros(num_seqs, dtype=torch.int64, device=device)
    counts = counts.scatter_add(0, row_seq, torch.ones_like(row_seq))
    starts = torch.cumsum(counts, 0) - counts
    longest = max(1, max_query_len)
    within = torch.arange(longest, device=device)
    grid = (starts.unsqueeze(1) + within).clamp_max(num_rows - 1)
    queries = q.index_select(0, grid.flatten()).view(num_seqs, longest * num_heads, -1)
    # In bf16 the product itself rounds each dot, as the contract wants.
    dots = torch.bmm(queries, keys.transpose(1, 2))
    offset = torch.arange(num_rows, device=device) - starts.index_select(0, row_seq)
    place = row_seq * longest + offset.clamp_max(longest - 1)
    dots = dots.view(num_seqs * longest, num_heads, -1).index_select(0, place)

    weighted = dots.relu() * head_weights.unsqueeze(-1)
    total = weighted.float().sum(1).to(q.dtype).float()[:, :max_visible]
    hidden = torch.arange(max_visible, device=device) >= visible.unsqueeze(1)
    return total.masked_fill(hidden, -torch.inf)


def _best(scores: Tensor, k: int) -> Tensor:
    """The k best columns of each row, ascending, -1 for what is -inf and to fill up.

    Scores in bf16 are often equal. topk promises nothing about them; a stable sort takes the
    lowest, as the reference does, and so whole models can be compared.
    """
    count = min(k, scores.shape[1])
    columns = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :count]
    values = scores.gather(1, columns)
    last = scores.shape[1]
    ordered = torch.where(values > -torch.inf, columns, last).sort(dim=1).values
    ordered = torch.where(ordered == last, -1, ordered)
    return pad(ordered, (0, k - ordered.shape[1]), value=-1)


def select_topk(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    return _best(scores, k)


def select_candidates(scores: Tensor, visible: Tensor, num_blocks: int, block_size: int) -> Tensor:
    total = -(-scores.shape[1] // block_size)
    padded = pad(scores, (0, total * block_size - scores.shape[1]), value=-torch.inf)
    best = padded.view(scores.shape[0], total, block_size).amax(-1)
    newest = torch.div(visible - 1, block_size, rounding_mode="floor").unsqueeze(1)
    is_newest = torch.arange(best.shape[1], device=scores.device) == newest
    best = torch.where(is_newest & (visible.unsqueeze(1) > 0), torch.inf, best)
    return _best(best, num_blocks)


def mask_candidates(scores: Tensor, candidates: Tensor, block_size: int) -> Tensor:
    num_blocks = -(-scores.shape[1] // block_size)
    # One column more takes the -1 entries.
    shape = (scores.shape[0], num_blocks + 1)
    allowed = torch.zeros(shape, dtype=torch.int32, device=scores.device)
    target = torch.where(candidates >= 0, candidates, num_blocks)
    allowed = allowed.scatter(1, target, 1)[:, :num_blocks]
    per_entry = allowed.repeat_interleave(block_size, dim=1)[:, : scores.shape[1]]
    return scores.masked_fill(per_entry == 0, -torch.inf)


def select_visible(visible: Tensor, k: int) -> Tensor:
    entries = torch.arange(k, device=visible.device).expand(visible.shape[0], k)
    return torch.where(entries < visible.unsqueeze(1), entries, -1)


def register(table: OpTable) -> None:
    """Add this family's implementations to `table`."""
    fused = "torch: the lightning indexers select at once and know no candidate blocks"
    table.implements(
        indexer.index_query,
        reason="torch: rotation and the index record's own rounding",
        layout="E2M1 round trip, activation dtype",
    )(index_query)
    table.implements(
        indexer.index_scores,
        reason="torch: the lightning indexers take no E2M1 keys and round otherwise",
        layout="68 B records decoded to bf16; dots and scores rounded to bf16",
    )(index_scores)
    sorted_scores = "fp32 scores, int64; stable sort, the lowest of equals"
    table.implements(indexer.select_topk, reason=fused, layout=sorted_scores)(select_topk)
    table.implements(indexer.select_candidates, reason=fused, layout=sorted_scores)(
        select_candidates
    )
    table.implements(indexer.mask_candidates, reason=fused, layout="fp32")(mask_candidates)
    table.implements(indexer.select_visible, reason="torch: integer arithmetic", layout="int64")(
        select_visible
    )
