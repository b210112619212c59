"""Figures of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.engine.pipeline import StepPipeline
from deepinfer.engine.prefix_reuse import PrefixStats
from deepinfer.engine.scheduler import Scheduler
from deepinfer.speculation.metrics import Places, SpeculationMetrics


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Figures of now and since the engine began.

    Attributes:
        num_running: sequences that hold memory.
        num_waiting: sequences that wait for it.
        kv_used_blocks: blocks that somebody holds.
        kv_idle_blocks: blocks that nobody holds and a later prompt may find.
        kv_total_blocks: blocks of the pool.
        generated_tokens: tokens of answers.
        num_steps: steps computed.
        num_preemptions: times that a sequence lost its memory.
        num_non_finite: answers ended by logits that nothing can be sampled from.
        prefix_queried_tokens: tokens of sequences whose beginning was looked up.
        prefix_hit_tokens: of these, tokens that were not computed again.
        replayed_tokens: tokens of hits that were computed again to rebuild windows.
        approximate_hit_tokens: of the hit tokens, those in hits on marked blocks.
        num_evicted_blocks: known blocks that were forgotten for their memory.
        host_used_bytes: bytes of blocks and windows in host memory.
        num_loaded_blocks: blocks that came back from there.
        num_loaded_windows: sequences whose windows came from there.
        num_rounds: decode steps times their sequences, with a drafter.
        drafted_by_place: drafts that those had, by place in the block; empty without a drafter.
        verified_by_place: of these, drafts that were verified.
        accepted_by_place: of these, drafts that were accepted.
    """

    num_running: int
    num_waiting: int
    kv_used_blocks: int
    kv_idle_blocks: int
    kv_total_blocks: int
    generated_tokens: int
    num_steps: int
    num_preemptions: int
    num_non_finite: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    replayed_tokens: int
    approximate_hit_tokens: int
    num_evicted_blocks: int
    host_used_bytes: int
    num_loaded_blocks: int
    num_loaded_windows: int
    num_rounds: int
    drafted_by_place: tuple[int, ...]
    verified_by_place: tuple[int, ...]
    accepted_by_place: tuple[int, ...]

    @classmethod
    def of(
        cls,
        scheduler: Scheduler,
        pipeline: StepPipeline,
        metrics: SpeculationMetrics | None,
        *,
        num_non_finite: int,
    ) -> EngineStats:
        """Gather them where they are counted.

        Args:
            scheduler: of the engine.
            pipeline: of the engine.
            metrics: of its rounds with drafts, or None.
            num_non_finite: answers ended by their logits.
        """
        reuse = PrefixStats() if scheduler.reuse is None else scheduler.reuse.stats
        tier = None if scheduler.reuse is None else scheduler.reuse.tier
        places = Places(0) if metrics is None else metrics.places
        return cls(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_used_blocks=scheduler.blocks.num_used,
            kv_idle_blocks=scheduler.blocks.num_idle,
            kv_total_blocks=scheduler.blocks.num_blocks,
            generated_tokens=pipeline.num_generated_tokens,
            num_steps=pipeline.num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_non_finite=num_non_finite,
            prefix_queried_tokens=reuse.num_queried_tokens,
            prefix_hit_tokens=reuse.num_hit_tokens,
            replayed_tokens=reuse.num_replayed_tokens,
            approximate_hit_tokens=reuse.num_approximate_hit_tokens,
            num_evicted_blocks=scheduler.blocks.num_evicted,
            host_used_bytes=0 if tier is None else tier.tier.num_bytes,
            num_loaded_blocks=0 if tier is None else tier.num_loaded_blocks,
            num_loaded_windows=0 if tier is None else tier.num_loaded_windows,
            num_rounds=places.num_rounds,
            drafted_by_place=tuple(places.drafted.tolist()),
            verified_by_place=tuple(places.verified.tolist()),
            accepted_by_place=tuple(places.accepted.tolist()),
        )
