"""The host tier: bytes, order of eviction, chains."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import given

from deepinfer.cache.host_tier import HostTier, StateKind, StateName


@dataclass(frozen=True, slots=True)
class Saved:
    num_bytes: int


def block(number: int) -> StateName:
    return StateName(StateKind.BLOCK, bytes([number]))


def window(number: int) -> StateName:
    return StateName(StateKind.WINDOW, bytes([number]))


Action = tuple[str, int, int]
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["put", "use", "remove"]), st.integers(0, 7), st.integers(1, 12)),
    max_size=60,
)


@given(actions=ACTIONS)
def test_like_a_list_in_the_order_of_use(actions: list[Action]) -> None:
    tier, capacity = HostTier[Saved](20), 20
    kept: list[tuple[int, int]] = []  # number and bytes, oldest use first
    num_evicted = 0
    for action, number, size in actions:
        if action == "put":
            tier.put(block(number), Saved(size))
            kept = [entry for entry in kept if entry[0] != number]
            while sum(entry[1] for entry in kept) + size > capacity:
                kept.pop(0)
                num_evicted += 1
            kept.append((number, size))
        elif action == "use":
            chain = range(number, min(8, number + size))
            tier.use(bytes([link]) for link in chain)
            used = [entry for link in reversed(chain) for entry in kept if entry[0] == link]
            kept = [entry for entry in kept if entry not in used] + used
        else:
            tier.remove(block(number))
            kept = [entry for entry in kept if entry[0] != number]
        assert [(name.text[0], found.num_bytes) for name in tier if (found := tier.find(name))] == (
            kept
        )
        assert tier.num_bytes == sum(entry[1] for entry in kept) <= capacity
    assert tier.stats.num_evicted == num_evicted


def test_what_is_larger_than_the_tier_evicts_nothing() -> None:
    tier = HostTier[Saved](10)
    tier.put(block(0), Saved(10))
    tier.put(block(1), Saved(11))
    assert list(tier) == [block(0)]


def test_the_end_of_a_chain_goes_first() -> None:
    tier = HostTier[Saved](30)
    for number in range(3):
        tier.put(block(number), Saved(10))
        tier.use(bytes([earlier]) for earlier in range(number + 1))
    tier.put(block(9), Saved(10))
    assert list(tier) == [block(1), block(0), block(9)]


def test_blocks_and_windows_of_one_name_are_two_entries() -> None:
    tier = HostTier[Saved](30)
    tier.put(block(1), Saved(10))
    tier.put(window(1), Saved(20))
    tier.remove(block(1))
    assert block(1) not in tier
    assert tier.find(window(1)) == Saved(20)
