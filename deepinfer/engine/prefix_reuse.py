"""Prefix reuse for sequences: what they find at admission, and what they leave for others.

A hit brings the rows that grow with the text. The windows before its end are rebuilt by computing
rows again, as the replay rule says, or come from the host tier, where one is kept. Only full blocks
of committed tokens are published.

Windows in the host tier are those after the last full block of a prompt, after a hit whose windows
had to be rebuilt, and after the block that a running answer has filled last. So a second
prompt with the same beginning pays for the rebuilding, and all later ones begin right there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.cache.block_pool import BlockPool
from deepinfer.cache.host_tier import HostState, StateKind, StateName
from deepinfer.cache.prefix_cache import PrefixCache
from deepinfer.config.replay import AfterHit, ReplayMode, ReplaySection
from deepinfer.engine.outputs import FinishReason
from deepinfer.engine.prefix_hit import PrefixHit
from deepinfer.engine.replay_rule import ReplayRule
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.state_copies import SavedWindow
from deepinfer.engine.state_tier import StateTier


@dataclass(slots=True)
class PrefixStats:
    """Tokens at admissions, counted since the engine began.

    Attributes:
        num_queried_tokens: tokens of the sequences that were looked up.
        num_hit_tokens: of these, tokens that were not computed again.
        num_replayed_tokens: tokens of hits that were computed again to rebuild windows.
        num_approximate_hit_tokens: of the hit tokens, those in hits on marked blocks, which were
            computed on windows rebuilt in mode bounded.
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_replayed_tokens: int = 0
    num_approximate_hit_tokens: int = 0


class PrefixReuse:
    """The prefix cache of a scheduler, in terms of its sequences."""

    def __init__(
        self,
        cache: PrefixCache,
        rule: ReplayRule,
        section: ReplaySection,
        *,
        drafts: bool,
        tier: StateTier | None = None,
    ) -> None:
        """Nothing known.

        Args:
            cache: names, index and hit lengths.
            rule: which rows a sequence computes after a hit.
            section: what becomes of blocks after a hit.
            drafts: whether a drafter's windows are to be rebuilt, too.
            tier: the host tier, or None.
        """
        self.cache, self.stats, self.tier = cache, PrefixStats(), tier
        self._rule, self._drafts = rule, drafts
        self._after_hit = section.publish_after_hit
        self._rebuilds_exactly = section.rebuild is ReplayMode.EXACT

    def look_up(self, sequence: Sequence) -> PrefixHit:
        """What a waiting sequence may take over, and the rows that are left to it."""
        start, num_tokens = sequence.request.decoder_start, sequence.prefill_target
        cold = PrefixHit(rows=self._rule.cold(start))
        names, size = sequence.block_names, self.cache.rules.block_size
        self.cache.name_blocks(names, sequence.token_ids)
        if sequence.scores_prompt:
            return cold  # the logits of every row are wanted
        known = self.cache.index.find(names)
        saved: tuple[HostState, ...] = ()
        if self.tier is not None:
            saved = self.tier.find_blocks(names[len(known) :], self.cache.index)
        hit_len = self.cache.rules.hit_len((len(known) + len(saved)) * size, num_tokens)
        if hit_len == 0:
            return cold
        rows = self._rule.after_hit(hit_len, start, drafts=self._drafts)
        window: HostState | None = None
        found = self._find_window(sequence, hit_len)
        if found is not None and found[0] >= rows.first:
            begin, window = found
            # Of blocks after that, those that need no load spare the writing.
            hit_len = max(begin, min(len(known) * size, hit_len))
            rows = self._rule.resumed(begin, hit_len, start)
        blocks = tuple(known[: hit_len // size])
        return PrefixHit(
            num_tokens=hit_len,
            rows=rows,
            blocks=blocks,
            saved=saved[: hit_len // size - len(blocks)],
            window=window,
            has_window=window is not None,
            is_exact=all(map(self.cache.index.is_exact, blocks)),
        )

    def _find_window(self, sequence: Sequence, hit_len: int) -> tuple[int, HostState] | None:
        """The last position within a hit whose windows are saved, with at least a row after it."""
        if self.tier is None:
            return None
        size = self.cache.rules.block_size
        stop = min(hit_len, self._last_window_stop(sequence))
        kinds = _window_kinds(sequence)
        found = self.tier.find_window(sequence.block_names[: stop // size], kinds)
        if found is None or found[0] * size <= self.cache.rules.window:
            return None
        return found[0] * size, found[1]

    def _last_window_stop(self, sequence: Sequence) -> int:
        """The last end of a block after which a prompt may begin with loaded windows.

        In mode bounded the layers after the last KV source begin at the decoder start and see
        nothing before it: their windows are never saved, and there it must begin at the latest.
        """
        stop = sequence.prefill_target - 1
        if sequence.request.decoder_start:
            stop = min(stop, sequence.request.decoder_start)
        return stop - stop % self.cache.rules.block_size

    def admit(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Let a sequence begin that holds the blocks of the hit and new ones after them."""
        sequence.begin(hit)
        if self.tier is not None:
            self._load(sequence, hit, self.tier)
            sequence.hit = hit.loaded
            sequence.window_stops = self._window_stops(sequence, hit, self.tier)
        stats, num_skipped = self.stats, hit.rows.first
        stats.num_queried_tokens += len(sequence.token_ids)
        stats.num_hit_tokens += num_skipped
        stats.num_replayed_tokens += hit.num_tokens - num_skipped
        if self._after_hit is AfterHit.MARK and not hit.is_exact:
            stats.num_approximate_hit_tokens += num_skipped
            sequence.request.took_approximate_blocks = True

    def _load(self, sequence: Sequence, hit: PrefixHit, tier: StateTier) -> None:
        sequence.loads = tier.loads_of(hit.blocks)
        if not hit.saved and hit.window is None:
            return
        names = sequence.block_names[: len(hit.blocks) + len(hit.saved)]
        fresh = sequence.blocks[len(hit.blocks) : len(names)]
        window = None
        if hit.window is not None:
            assert sequence.slot is not None  # set before it is admitted
            window = SavedWindow(hit.window, sequence.slot, hit.rows.first)
        done = tier.load(names, list(zip(hit.saved, fresh, strict=True)), window)
        for name, block in zip(names[len(hit.blocks) :], fresh, strict=True):
            self.cache.index.add(name, block)
        sequence.loads.append(done)

    def _window_stops(self, sequence: Sequence, hit: PrefixHit, tier: StateTier) -> list[int]:
        """Ends of blocks at which the prefill is to pause, so that the windows can be saved."""
        if not self._is_exact(hit):
            return []
        size, last = self.cache.rules.block_size, self._last_window_stop(sequence)
        wanted = {last} if hit.window is not None else {last, hit.num_tokens}
        # Within a replay windows are not complete before its end.
        kinds = _window_kinds(sequence)
        good_from = hit.num_tokens if hit.window is None else hit.rows.first + 1
        least = max(good_from, self.cache.rules.window + 1)
        return [
            stop
            for stop in sorted(wanted)
            if least <= stop <= last
            and tier.find_window(sequence.block_names[stop // size - 1 : stop // size], kinds)
            is None
        ]

    def saves_window(self, sequence: Sequence, stop: int) -> bool:
        """Whether the windows after a decode step's last position are to be saved."""
        return (
            self.tier is not None
            and not self._drafts  # with them only the device knows where a step ends
            and stop % self.cache.rules.block_size == 0
            and stop > self.cache.rules.window
            and sequence.request.decoder_start == 0
            and self._is_exact(sequence.hit)
        )

    def keep_window(self, sequence: Sequence, stop: int, state: HostState) -> None:
        """Keep saved windows of a sequence; of its answer's only the last."""
        assert self.tier is not None  # nobody else saves windows
        text = sequence.block_names[stop // self.cache.rules.block_size - 1]
        name = StateName(_window_kinds(sequence)[0], text)
        if stop > sequence.prefill_target:
            self.tier.keep_window(name, state, replaced=sequence.window_name)
            sequence.window_name = name
        else:
            self.tier.keep_window(name, state)

    def publish(
        self, sequence: Sequence, pool: BlockPool, let_go: Callable[[Sequence, int], None]
    ) -> None:
        """Make the blocks known that a running sequence has filled with committed tokens.

        Where an exact block of that text is known already, an exact sequence goes on with that
        one: so whoever holds a known exact block holds the known blocks before it. It takes the
        place of an approximate one. An approximate sequence keeps its own block and leaves the
        known one: what its answer is computed from does not depend on who else runs.

        Args:
            sequence: a running sequence.
            pool: holds its blocks.
            let_go: called with the sequence and a block that it holds no more; steps in flight
                still read it through the block tables they were launched with.
        """
        if sequence.finish_reason is FinishReason.ERROR:
            self._withdraw(sequence)
            return
        index, size = self.cache.index, self.cache.rules.block_size
        is_exact = self._is_exact(sequence.hit)
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
            if twin is not None and is_exact and not index.is_exact(twin):
                pool.forget(twin)
                twin = None
            if twin is None:
                index.add(name, own, is_exact=is_exact)
            elif is_exact:
                self._finish_load(twin)
                pool.hold([twin])
                sequence.replace_block(number, twin)
                let_go(sequence, own)
        sequence.num_published_blocks = stop
        if self.tier is not None and is_exact:
            pool.hold(sequence.blocks[:stop])
            self.tier.save_blocks(sequence.block_names[:stop], sequence.blocks[:stop], first)

    def _is_exact(self, hit: PrefixHit) -> bool:
        """Whether what follows a hit is what a run from the start would have written."""
        rebuilt = hit.num_tokens > 0 and not hit.has_window
        return hit.is_exact and (self._rebuilds_exactly or not rebuilt)

    def _finish_load(self, block: int) -> None:
        """Wait for a block that somebody else is loading at this moment, which is rare."""
        if self.tier is not None:
            for done in self.tier.loads_of([block]):
                done.synchronize()

    def _withdraw(self, sequence: Sequence) -> None:
        """Forget the blocks of a failed sequence: what spoilt its logits may lie in them."""
        for number in range(sequence.num_published_blocks):
            if sequence.blocks[number] in self.cache.index:
                self.cache.index.remove(sequence.blocks[number])
            if self.tier is not None:
                self.tier.forget(sequence.block_names[number])


def _window_kinds(sequence: Sequence) -> tuple[StateKind, ...]:
    """Kinds of saved windows that are of use to a sequence; what it leaves is the first one."""
    if sequence.request.decoder_start:
        return StateKind.ENCODER_WINDOW, StateKind.WINDOW
    return (StateKind.WINDOW,)
