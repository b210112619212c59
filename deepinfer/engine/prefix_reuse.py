"""Prefix reuse for sequences: what they find at admission, and what they leave for others.

A hit brings the rows that grow with the text; which rows are computed again for the windows is the
replay rule's decision. Only full blocks of committed tokens are published.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.cache.block_pool import BlockPool
from deepinfer.cache.prefix_cache import NO_HIT, PrefixCache, PrefixHit
from deepinfer.config.replay import AfterHit, ReplayMode, ReplaySection
from deepinfer.engine.outputs import FinishReason
from deepinfer.engine.replay_rule import ReplayRule
from deepinfer.engine.sequence import Sequence


@dataclass(slots=True)
class PrefixStats:
    """Tokens at admissions, counted since the engine began.

    Attributes:
        num_queried_tokens: tokens of the sequences that were looked up.
        num_hit_tokens: of these, tokens that were not computed again.
        num_replayed_tokens: tokens of hits that were computed again to rebuild windows.
        num_approximate_hit_tokens: tokens not computed again in hits on blocks that were computed
            on windows rebuilt in mode bounded.
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_replayed_tokens: int = 0
    num_approximate_hit_tokens: int = 0


class PrefixReuse:
    """The prefix cache of a scheduler, in terms of its sequences."""

    def __init__(
        self, cache: PrefixCache, rule: ReplayRule, section: ReplaySection, *, drafts: bool
    ) -> None:
        """Nothing known.

        Args:
            cache: names, index and hit lengths.
            rule: which rows a sequence computes after a hit.
            section: what becomes of blocks after a hit.
            drafts: whether a drafter's windows are to be rebuilt, too.
        """
        self.cache, self.stats = cache, PrefixStats()
        self._rule, self._drafts = rule, drafts
        self._after_hit = section.publish_after_hit
        self._rebuilds_exactly = section.rebuild_mode is ReplayMode.EXACT

    def look_up(self, sequence: Sequence) -> PrefixHit:
        """What a waiting sequence may take over; nothing if the logits of its prompt are wanted."""
        self.cache.name_blocks(sequence.block_names, sequence.token_ids)
        if sequence.scores_prompt:
            return NO_HIT
        return self.cache.look_up(sequence.block_names, len(sequence.token_ids))

    def admit(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Let a sequence that holds the hit's blocks begin after it."""
        start = sequence.request.decoder_start
        if hit.num_tokens:
            rows = self._rule.after_hit(hit.num_tokens, start, drafts=self._drafts)
        else:
            rows = self._rule.cold(start)
        sequence.begin(hit, rows)
        stats = self.stats
        stats.num_queried_tokens += len(sequence.token_ids)
        stats.num_hit_tokens += rows.first
        stats.num_replayed_tokens += hit.num_tokens - rows.first
        stats.num_approximate_hit_tokens += 0 if hit.is_exact else rows.first

    def publish(
        self, sequence: Sequence, pool: BlockPool, let_go: Callable[[Sequence, int], None]
    ) -> None:
        """Make the blocks known that a running sequence has filled with committed tokens.

        Where a block of that content is known already, the sequence goes on with that one: so
        whoever holds a known block holds the known blocks before it.

        Args:
            sequence: a running sequence.
            pool: holds its blocks.
            let_go: called with the sequence and a block that it holds no more; steps in flight
                still read it through the block tables they were launched with.
        """
        if sequence.finish_reason is FinishReason.ERROR:
            self._withdraw(sequence)
            return
        hit, index, size = sequence.hit, self.cache.index, self.cache.rules.block_size
        is_exact = hit.is_exact and (self._rebuilds_exactly or hit.num_tokens == 0)
        if not is_exact and self._after_hit is AfterHit.WITHHOLD:
            return
        num_known = min(sequence.num_cached_tokens, len(sequence.token_ids))
        first, stop = sequence.num_published_blocks, num_known // size
        if stop <= first:
            return
        self.cache.name_blocks(sequence.block_names, sequence.token_ids)
        for number in range(first, stop):
            name, own = sequence.block_names[number], sequence.blocks[number]
            twin = index.block(name)
            if twin is None:
                index.add(name, own, is_exact=is_exact)
            else:
                pool.hold([twin])
                sequence.blocks[number] = twin
                let_go(sequence, own)
        sequence.num_published_blocks = stop

    def _withdraw(self, sequence: Sequence) -> None:
        """Forget the blocks of a failed sequence: what spoilt its logits may lie in them."""
        for block in sequence.blocks[: sequence.num_published_blocks]:
            if block in self.cache.index:
                self.cache.index.remove(block)
