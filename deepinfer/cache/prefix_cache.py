"""What a new sequence may take over from the blocks that others left, and what it costs.

A hit brings the rows that grow with the text. The sliding windows before its end belong to no
block: they are rebuilt by computing the last tokens of the hit again (replay). Replayed rows read
the blocks of the hit and never write them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.cache.block_hash import block_hash
from deepinfer.cache.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The beginning that a sequence takes over.

    Attributes:
        num_tokens: tokens H whose blocks are taken over, and are not written any more.
        start: first position that is computed; those up to H are the replay.
        blocks: the blocks, in order.
    """

    num_tokens: int = 0
    start: int = 0
    blocks: tuple[int, ...] = ()


NO_HIT = PrefixHit()


@dataclass(frozen=True, slots=True)
class HitRules:
    """How much of a known beginning is used.

    Attributes:
        block_size: tokens in a block, even.
        window: tokens of the sliding window.
        replay_len: tokens before the end of a hit that are computed again, at most all of them.
    """

    block_size: int
    window: int
    replay_len: int

    def hit_len(self, num_known: int, num_tokens: int) -> int:
        """Tokens to take over.

        A hit that the window covers would be computed again as a whole, so it is none. The replay
        computes the last token again, so a hit may be as long as the sequence.

        Args:
            num_known: tokens whose blocks are known, a multiple of the block size.
            num_tokens: tokens of the sequence.
        """
        hit = min(num_known, num_tokens - num_tokens % self.block_size)
        return hit if hit > self.window else 0

    def replay_start(self, hit_len: int) -> int:
        """First position to compute."""
        return max(0, hit_len - self.replay_len)


@dataclass(slots=True)
class PrefixStats:
    """Tokens at admissions, counted since the engine began.

    Attributes:
        num_queried_tokens: tokens of the sequences that were looked up.
        num_hit_tokens: of these, tokens that were not computed again.
        num_replayed_tokens: tokens of hits that were computed again to rebuild windows.
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_replayed_tokens: int = 0

    def count(self, hit: PrefixHit, num_tokens: int) -> None:
        """Count an admission."""
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += hit.start
        self.num_replayed_tokens += hit.num_tokens - hit.start


class PrefixCache:
    """Names of blocks and the index that knows them; who holds a block is the pool's matter."""

    def __init__(self, rules: HitRules, seed: bytes) -> None:
        """An empty cache.

        Args:
            rules: how much of a known beginning is used.
            seed: what the first block of every sequence follows (`chain_seed`).
        """
        self.rules, self.index, self.stats = rules, PrefixIndex(), PrefixStats()
        self._seed = seed

    def name_blocks(self, names: list[bytes], token_ids: Sequence[int]) -> None:
        """Append the names of the full blocks of `token_ids` that `names` does not hold yet."""
        size = self.rules.block_size
        for begin in range(len(names) * size, len(token_ids) - size + 1, size):
            parent = names[-1] if names else self._seed
            names.append(block_hash(parent, token_ids[begin : begin + size]))

    def look_up(self, names: Sequence[bytes], num_tokens: int) -> PrefixHit:
        """What a sequence of these blocks and that many tokens may take over now."""
        known = self.index.find(names)
        size = self.rules.block_size
        hit_len = self.rules.hit_len(len(known) * size, num_tokens)
        if hit_len == 0:
            return NO_HIT
        start = self.rules.replay_start(hit_len)
        return PrefixHit(hit_len, start, tuple(known[: hit_len // size]))
