"""Names of a sequence's blocks, and how much of a known beginning is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.cache.block_hash import block_hash
from deepinfer.cache.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class HitRules:
    """How much of a known beginning is used.

    Attributes:
        block_size: tokens in a block.
        window: tokens of the sliding window.
    """

    block_size: int
    window: int

    def hit_len(self, num_known: int, num_tokens: int) -> int:
        """Tokens to take over.

        Windows belong to no block: they are rebuilt by computing the last tokens of the hit again.
        So a hit that the window covers saves nothing, and is none; and a hit may be as long as
        the sequence, because its last token is computed anyway.

        Args:
            num_known: tokens whose blocks are known, a multiple of the block size.
            num_tokens: tokens of the sequence.
        """
        hit = min(num_known, num_tokens - num_tokens % self.block_size)
        return hit if hit > self.window else 0


class PrefixCache:
    """Names of blocks and the index that knows them; who holds a block is the pool's matter."""

    def __init__(self, rules: HitRules, seed: bytes) -> None:
        """An empty cache.

        Args:
            rules: how much of a known beginning is used.
            seed: what the first block of every sequence follows (`chain_seed`).
        """
        self.rules, self.index = rules, PrefixIndex()
        self._seed = seed

    def name_blocks(self, names: list[bytes], token_ids: Sequence[int]) -> None:
        """Append the names of the full blocks of `token_ids` that `names` does not hold yet."""
        size = self.rules.block_size
        for begin in range(len(names) * size, len(token_ids) - size + 1, size):
            parent = names[-1] if names else self._seed
            names.append(block_hash(parent, token_ids[begin : begin + size]))
