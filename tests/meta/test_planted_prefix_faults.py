"""The prefix cache's property tests can fail: each planted fault of sharing is caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from deepinfer.cache.block_pool import BlockPool
from deepinfer.cache.host_tier import HostState, StateKind
from deepinfer.cache.prefix_cache import PrefixCache
from deepinfer.device.errors import ContractError
from deepinfer.engine.null_state_copies import NullStateCopies
from deepinfer.engine.prefix_hit import PrefixHit
from deepinfer.engine.prefix_reuse import PrefixReuse
from deepinfer.engine.replay_rule import ReplayRule
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.sequence import Sequence as RunningSequence
from deepinfer.engine.state_tier import StateTier
from deepinfer.model.replay import PrefillRows
from tests.unit.engine.host_loads import disturb_a_load
from tests.unit.engine.prefix_life import PrefixLife, TierLife

Plant = Callable[[pytest.MonkeyPatch], None]
SEARCH = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def _publish_before_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    publish = PrefixReuse.publish

    def early(self: PrefixReuse, sequence: RunningSequence, *rest: object) -> None:
        committed = sequence.num_cached_tokens
        sequence.num_cached_tokens += self.cache.rules.block_size
        publish(self, sequence, *rest)  # type: ignore[arg-type]
        sequence.num_cached_tokens = committed

    patch.setattr(PrefixReuse, "publish", early)


def _changed_rows(
    patch: pytest.MonkeyPatch, change: Callable[[PrefillRows, int], PrefillRows]
) -> None:
    after_hit = ReplayRule.after_hit

    def changed(self: ReplayRule, num_hit_tokens: int, start: int, *, drafts: bool) -> PrefillRows:
        rows = after_hit(self, num_hit_tokens, start, drafts=drafts)
        return change(rows, num_hit_tokens)

    patch.setattr(ReplayRule, "after_hit", changed)


def _write_shared_blocks(patch: pytest.MonkeyPatch) -> None:
    _changed_rows(patch, lambda rows, hit: replace(rows, write_from=rows.first))


def _skip_the_replay(patch: pytest.MonkeyPatch) -> None:
    _changed_rows(patch, lambda rows, hit: replace(rows, first=hit - 1))


def _replay_one_row_less(patch: pytest.MonkeyPatch) -> None:
    # Where a drafter's windows are not rebuilt, the exact schedule has no row to spare.
    _changed_rows(patch, lambda rows, hit: replace(rows, first=rows.first + (rows.first > 0)))


def _evict_what_is_held(patch: pytest.MonkeyPatch) -> None:
    hold = BlockPool.hold

    def without_pin(self: BlockPool, blocks: Sequence[int]) -> None:
        idle = [block for block in blocks if block in self._idle]
        hold(self, blocks)
        self._idle.update(dict.fromkeys(idle))

    patch.setattr(BlockPool, "hold", without_pin)


def _forget_to_forget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        BlockPool,
        "_evict",
        lambda self, count: self._free.extend(self._idle.popitem()[0] for _ in range(count)),
    )


def _ignore_the_text_before(patch: pytest.MonkeyPatch) -> None:
    def name_blocks(self: PrefixCache, names: list[bytes], token_ids: Sequence[int]) -> None:
        size = self.rules.block_size
        names[:] = [
            bytes(token % 256 for token in token_ids[begin : begin + size])
            for begin in range(0, len(token_ids) - size + 1, size)
        ]

    patch.setattr(PrefixCache, "name_blocks", name_blocks)


def _count_replayed_tokens_as_hits(patch: pytest.MonkeyPatch) -> None:
    admit = PrefixReuse.admit

    def generous(self: PrefixReuse, sequence: RunningSequence, hit: PrefixHit) -> None:
        admit(self, sequence, hit)
        self.stats.num_hit_tokens += hit.num_tokens - sequence.rows.first

    patch.setattr(PrefixReuse, "admit", generous)


def _lose_the_twin(patch: pytest.MonkeyPatch) -> None:
    publish = PrefixReuse.publish

    def deaf(self: PrefixReuse, sequence: RunningSequence, pool: BlockPool, let_go: object) -> None:
        publish(self, sequence, pool, lambda owner, block: None)

    patch.setattr(PrefixReuse, "publish", deaf)


def _run_without_waiting_for_a_load(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunningSequence, "is_loading", property(lambda self: False))
    patch.setattr(NullStateCopies, "wait_before_next_step", lambda self, done: None)


def _save_without_holding(patch: pytest.MonkeyPatch) -> None:
    save_blocks = StateTier.save_blocks

    def unheld(self: StateTier, names: Sequence[bytes], blocks: Sequence[int], first: int) -> None:
        save_blocks(self, names, blocks, first)
        self._saving.clear()

    publish = PrefixReuse.publish

    def publish_and_release(
        self: PrefixReuse, sequence: RunningSequence, pool: BlockPool, let_go: object
    ) -> None:
        before = sequence.num_published_blocks
        publish(self, sequence, pool, let_go)  # type: ignore[arg-type]
        if sequence.num_published_blocks > before and self.tier is not None:
            pool.release(sequence.blocks[: sequence.num_published_blocks])

    patch.setattr(StateTier, "save_blocks", unheld)
    patch.setattr(PrefixReuse, "publish", publish_and_release)


def _load_the_window_of_another_text(patch: pytest.MonkeyPatch) -> None:
    find_window = StateTier.find_window
    seen: list[HostState] = []

    def first_one(
        self: StateTier, names: Sequence[bytes], kinds: Sequence[StateKind]
    ) -> tuple[int, HostState] | None:
        found = find_window(self, names, kinds)
        if found is None:
            return None
        seen.append(found[1])
        return found[0], seen[0]

    patch.setattr(StateTier, "find_window", first_one)


@dataclass(frozen=True, slots=True)
class Fault:
    """A planted fault and how it must show."""

    plant: Plant
    exception: type[BaseException]
    message: str
    life: type[PrefixLife] = PrefixLife


FAULTS = (
    Fault(_publish_before_it_is_computed, ContractError, "poison or nothing|over a row of"),
    Fault(_write_shared_blocks, ContractError, "over a row of"),
    Fault(_skip_the_replay, ContractError, "its windows are good from"),
    Fault(_replay_one_row_less, ContractError, "its windows are good from"),
    Fault(_evict_what_is_held, Exception, "poison|over a row of|released but not in use"),
    Fault(_forget_to_forget, Exception, "poison|should hold token|over a row of|is published"),
    Fault(_ignore_the_text_before, ContractError, "should hold token"),
    Fault(_count_replayed_tokens_as_hits, AssertionError, "hits"),
    Fault(_lose_the_twin, AssertionError, "memory is left behind|num_used|late"),
    Fault(_run_without_waiting_for_a_load, ContractError, "poison|was never written", TierLife),
    Fault(_save_without_holding, ContractError, "poison|should hold", TierLife),
    Fault(_load_the_window_of_another_text, ContractError, "window", TierLife),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.plant.__name__.strip("_"))
def test_planted_fault_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.plant(monkeypatch)
    with pytest.raises(fault.exception, match=fault.message):
        run_state_machine_as_test(fault.life, settings=SEARCH)


@pytest.mark.parametrize("life", [PrefixLife, TierLife])
def test_without_a_fault_nothing_is_caught(life: type[PrefixLife]) -> None:
    run_state_machine_as_test(life, settings=settings(SEARCH, max_examples=60))


def test_release_while_a_load_writes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Scheduler._release

    def at_once(self: Scheduler, sequence: RunningSequence) -> None:
        sequence.loads = []
        release(self, sequence)

    monkeypatch.setattr(Scheduler, "_release", at_once)
    with pytest.raises(ContractError, match=r"over a row of|window ring"):
        disturb_a_load(1, "abort")
