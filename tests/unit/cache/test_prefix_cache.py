"""Index and pool together: random lives against a model that is too simple to be wrong."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from deepinfer.cache.block_pool import BlockPool, SlotPool
from deepinfer.cache.prefix_cache import HitRules, PrefixCache
from deepinfer.cache.prefix_index import PrefixIndex
from deepinfer.device.errors import ContractError

SIZE = 2
Text = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Holder:
    """A sequence: its text, its blocks, and how many of them are published."""

    text: Text
    blocks: list[int]
    num_published: int
    is_late: bool = False  # ended, and its memory is still the device's


class PrefixLife(RuleBasedStateMachine):
    """Holders begin, publish and end; the model keeps every published text with its block."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: list[Holder] = []
        self.published: dict[Text, int] = {}
        self.last_use: dict[Text, int] = {}
        self.evicted: list[int] = []
        self.clock = 0

    @initialize(num_blocks=st.integers(1, 9))
    def begin(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.cache = PrefixCache(HitRules(SIZE, window=1), b"seed")
        self.pool = BlockPool(num_blocks, self.cache.index, on_evict=self.hear_evicted)

    def hear_evicted(self, blocks: object) -> None:
        assert isinstance(blocks, list)
        self.evicted += blocks
        held = {block for holder in self.holders for block in holder.blocks}
        assert not held & set(blocks), "a block that somebody holds was evicted"
        gone = {text for text, block in self.published.items() if block in blocks}
        for text in gone:
            del self.published[text]
        for text in self.published:
            assert text[:-SIZE] in self.published or len(text) == SIZE, (
                "a block was evicted before those that follow it"
            )
        used = [self.last_use[text] for text in gone]
        idle = [self.last_use[t] for t, block in self.published.items() if block not in held]
        assert not (used and idle) or max(used) <= min(idle), "a block was evicted too early"

    def beginnings(self, text: Text) -> list[Text]:
        return [text[:end] for end in range(SIZE, len(text) + 1, SIZE)]

    @rule(text=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def start(self, text: list[int]) -> None:
        tokens, names = tuple(text), list[bytes]()
        self.cache.name_blocks(names, tokens)
        hit = self.cache.index.find(names)
        expected: list[int] = []
        for beginning in self.beginnings(tokens):
            if beginning not in self.published:
                break
            expected.append(self.published[beginning])
        assert hit == expected, "the hit is not the longest known beginning"
        missing = -(-len(tokens) // SIZE) - len(hit)
        if missing > self.pool.num_free - self.pool.count_idle(hit):
            return
        self.pool.hold(hit)
        holder = Holder(tokens, list(hit), len(hit))
        self.holders.append(holder)
        fresh = self.pool.allocate(missing)
        taken = {block for other in self.holders for block in other.blocks}
        assert not taken & set(fresh), "a block was handed out twice"
        assert not set(fresh) & set(self.published.values()), "a known block was handed out"
        holder.blocks += fresh

    @precondition(lambda self: any(not h.is_late for h in self.holders))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from([h for h in self.holders if not h.is_late]))
        names = list[bytes]()
        self.cache.name_blocks(names, holder.text)
        number = holder.num_published
        if number == len(names):
            return
        text, twin = holder.text[: (number + 1) * SIZE], self.cache.index.block(names[number])
        assert twin == self.published.get(text)
        if twin is None:
            self.cache.index.add(names[number], holder.blocks[number])
            self.published[text] = holder.blocks[number]
        else:
            self.pool.hold([twin])
            own, holder.blocks[number] = holder.blocks[number], twin
            assert self.pool.release([own]) == [own]
        holder.num_published += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.holders)).is_late = True

    @precondition(lambda self: any(h.is_late for h in self.holders))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.let_go(data.draw(st.sampled_from([h for h in self.holders if h.is_late])))

    def let_go(self, holder: Holder) -> None:
        self.holders.remove(holder)
        held = {block for other in self.holders for block in other.blocks}
        known = set(self.published.values())
        freed = self.pool.release(holder.blocks)
        assert set(freed) == set(holder.blocks) - held - known
        self.clock += 1
        for text in self.beginnings(holder.text)[: len(holder.blocks)]:
            self.last_use[text] = self.clock

    @invariant()
    def every_block_is_somewhere(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = {block for holder in self.holders for block in holder.blocks}
        idle = set(self.published.values()) - held
        assert (self.pool.num_used, self.pool.num_idle) == (len(held), len(idle))
        assert self.pool.num_free == self.num_blocks - len(held)
        assert len(self.cache.index) == len(self.published)
        assert self.pool.num_evicted == len(self.evicted)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for holder in list(self.holders):
            self.let_go(holder)
        assert (self.pool.num_used, self.pool.num_free) == (0, self.num_blocks)
        assert len(set(self.pool.allocate(self.num_blocks))) == self.num_blocks, "a block is lost"
        assert len(self.cache.index) == 0


TestPrefixLife = PrefixLife.TestCase
TestPrefixLife.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize(
    ("num_known", "num_tokens", "hit_len"),
    [
        (0, 40, 0),
        (8, 40, 0),  # the window covers it
        (12, 40, 12),
        (12, 12, 12),  # the replay computes the last token again
        (16, 15, 12),
        (40, 9, 0),
    ],
)
def test_how_much_of_a_known_beginning_is_used(
    num_known: int, num_tokens: int, hit_len: int
) -> None:
    assert HitRules(4, window=8).hit_len(num_known, num_tokens) == hit_len


def test_names_are_made_once_and_for_full_blocks() -> None:
    cache, names = PrefixCache(HitRules(4, 1), b"seed"), list[bytes]()
    cache.name_blocks(names, range(7))
    assert len(names) == 1
    cache.name_blocks(names, range(12))
    whole = list[bytes]()
    cache.name_blocks(whole, range(12))
    assert names == whole


def test_a_forgotten_block_is_free_as_soon_as_nobody_holds_it() -> None:
    evicted: list[int] = []
    index = PrefixIndex()
    pool = BlockPool(2, index, on_evict=evicted.extend)
    held, idle = pool.allocate(2)
    for block in (held, idle):
        index.add(bytes([block]), block, is_exact=False)
    pool.release([idle])
    for block in (held, idle):
        pool.forget(block)
    assert (pool.num_used, pool.num_free, pool.num_idle, len(index)) == (1, 1, 0, 0)
    assert evicted == [idle], "its memory is poisoned before anybody gets it"
    assert pool.release([held]) == [held]
    assert sorted(pool.allocate(2)) == sorted((held, idle))
    with pytest.raises(ContractError, match="is not published"):
        pool.forget(held)


def test_pools_refuse_what_they_do_not_have() -> None:
    pool = BlockPool(2)
    held = pool.allocate(2)
    with pytest.raises(ContractError, match="1 blocks asked for"):
        pool.allocate(1)
    assert pool.release(held) == held[::-1]
    with pytest.raises(ContractError, match="not in use"):
        pool.release(held[:1])
    with pytest.raises(ContractError, match="is to be shared"):
        pool.hold(held[:1])
    slots = SlotPool(1)
    slots.allocate()
    with pytest.raises(ContractError, match="all 1 slots"):
        slots.allocate()
    slots.release(0)
    with pytest.raises(ContractError, match="not in use"):
        slots.release(0)


def test_the_index_refuses_a_second_block_of_a_name() -> None:
    index = PrefixIndex()
    index.add(b"n", 3)
    for name, block in ((b"n", 4), (b"m", 3)):
        with pytest.raises(ContractError, match="Look the name up"):
            index.add(name, block)
    with pytest.raises(ContractError, match="not published"):
        index.remove(4)
