"""Names of blocks: stable, and different wherever the content may differ."""

from __future__ import annotations

import itertools

from deepinfer.cache.block_hash import block_hash, chain_seed

IDENTITY: dict[str, str | int] = {"model": "m", "record": "f32", "block_size": 4}
SEED = chain_seed(IDENTITY)


def test_a_name_is_the_same_on_every_machine() -> None:
    """The bytes are written down: a change of the scheme strands every stored block."""
    assert SEED.hex() == "ffbd9fd5f8baa7722010802ca291539a"
    assert block_hash(SEED, [0, 1, -1, 1 << 40]).hex() == "cfb8518d3afdce903a255d4b4fd16e81"


def test_every_part_of_the_identity_counts_and_their_order_does_not() -> None:
    others = [IDENTITY | {name: "other"} for name in IDENTITY]
    others += [{"model": "mrecord", "": "f32", "block_size": 4}, IDENTITY | {"more": ""}]
    seeds = {chain_seed(other) for other in [IDENTITY, *others]}
    assert len(seeds) == 1 + len(others)
    assert chain_seed(dict(reversed(IDENTITY.items()))) == SEED


def test_a_name_covers_all_tokens_before_it() -> None:
    chains = list(itertools.product([1, 2], repeat=4))
    names = {block_hash(block_hash(SEED, chain[:2]), chain[2:]) for chain in chains}
    assert len(names) == len(chains)


def test_neighbouring_tokens_do_not_run_into_each_other() -> None:
    assert block_hash(SEED, [1, 256]) != block_hash(SEED, [257, 0])
    assert block_hash(SEED, [1]) != block_hash(SEED, [1, 0])
