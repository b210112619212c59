"""The memory budget: what each part takes, and the refusal of a plan that does not fit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from deepinfer.device.backend import Backend, CacheKind
from deepinfer.device.errors import ConfigError
from deepinfer.device.runtime import MemoryFacts
from deepinfer.engine.memory_plan import MemoryPlan
from deepinfer.model.caches import CacheGeometry
from deepinfer.model.config import V41Config

FLASH = Path(__file__).parents[2] / "data/flash"
GIB = 2**30
ROW_BYTES = {CacheKind.WINDOW: 528, CacheKind.COMPRESSED: 288, CacheKind.INDEX: 68}


@pytest.fixture
def config() -> V41Config:
    return V41Config.from_json(FLASH)


def backend(free_gib: float) -> Backend:
    facts = MemoryFacts(total_bytes=141 * GIB, free_bytes=int(free_gib * GIB))
    fake = SimpleNamespace(
        runtime=SimpleNamespace(memory=lambda: facts),
        cache_row_bytes=lambda kind, width: ROW_BYTES[kind],
    )
    return cast("Backend", fake)


def geometry(config: V41Config, num_blocks: int, max_num_seqs: int) -> CacheGeometry:
    return CacheGeometry.for_engine(
        config, block_size=64, num_blocks=num_blocks, max_num_seqs=max_num_seqs,
        max_num_tokens=4096,
    )  # fmt: skip


def test_parts_are_counted_in_rows_of_the_backend(config: V41Config) -> None:
    made = geometry(config, num_blocks=100, max_num_seqs=8)
    plan = MemoryPlan.of(config, made, backend(20.0))
    rings = config.num_hidden_layers * 8 * made.ring
    assert plan.windows == (rings + made.workspace_rows(config.sliding_window)) * 528
    per_block = sum(64 // config.ratio(source) for source in config.kv_source_layer_ids)
    assert plan.pool == 100 * per_block * (288 + 68)
    assert plan.used == 121 * GIB
    assert plan.graphs == 0
    assert plan.left == plan.free - plan.pool - plan.windows - plan.pending


def test_graphs_may_take_half_of_what_the_caches_leave(config: V41Config) -> None:
    made = geometry(config, num_blocks=100, max_num_seqs=8)
    plain = MemoryPlan.of(config, made, backend(20.0))
    plan = MemoryPlan.of(config, made, backend(20.0), replays=True)
    assert plan.graphs == plain.left // 2
    assert plan.left == plain.left - plan.graphs
    assert f"graphs of decode steps, about {plan.graphs / GIB:16.3f} GiB" in str(plan)


def test_a_plan_without_room_reserves_nothing_for_graphs(config: V41Config) -> None:
    made = geometry(config, num_blocks=10**6, max_num_seqs=8)
    plain = MemoryPlan.of(config, made, backend(2.0))
    assert MemoryPlan.of(config, made, backend(2.0), replays=True) == plain


def test_plan_is_printed_part_by_part(config: V41Config) -> None:
    text = str(MemoryPlan.of(config, geometry(config, 100, 8), backend(20.0)))
    assert "KV pool, 100 blocks" in text
    assert "window rings, 8 sequences" in text
    assert "121.000 GiB" in text


def test_plan_with_room_is_accepted(config: V41Config) -> None:
    MemoryPlan.of(config, geometry(config, 100, 8), backend(20.0)).require_room()


@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "remedy"),
    [(10**6, 8, "lower cache.memory or cache.num_blocks"), (10, 4096, "max_num_seqs .now 4096")],
)
def test_plan_without_room_names_what_to_lower(
    config: V41Config, num_blocks: int, max_num_seqs: int, remedy: str
) -> None:
    plan = MemoryPlan.of(config, geometry(config, num_blocks, max_num_seqs), backend(2.0))
    with pytest.raises(ConfigError, match=remedy):
        plan.require_room()
