"""Cache groups against the published table."""

from __future__ import annotations

from deepinfer.model.cache_groups import cache_groups
from deepinfer.model.config import V41Config


def test_flash_has_the_published_groups(flash: V41Config) -> None:
    found = {
        group.name: (group.layers, set(group.tokens_per_state), group.is_cacheable)
        for group in cache_groups(flash)
    }
    assert found == {
        "main compressed": ((2, 8, 14, 20), {1, 2}, True),
        "index keys": ((2, 8, 14, 20), {1, 2}, True),
        "window": (tuple(range(40)), {1}, False),
        "compressor ring": ((2, 8, 14), {0}, False),
        "draft window": ((40, 41, 42), {1}, False),
        "Engram look-back": ((), set(), False),
    }


def test_flash_costs_what_was_published(flash: V41Config) -> None:
    groups = {group.name: group for group in cache_groups(flash)}
    assert groups["main compressed"].bytes_per_token == 720
    assert groups["index keys"].bytes_per_token == 170
    # 2.70 MB of windows, 0.20 MB of draft windows, 4 KiB for each open pair.
    assert groups["window"].bytes_per_request == 2_703_360
    assert groups["draft window"].bytes_per_request == 202_752
    assert groups["compressor ring"].bytes_per_request == 3 * 4096


def test_what_a_model_lacks_is_left_out(small: V41Config) -> None:
    config = small.model_copy(
        update={
            "compress_ratios": (0,) * 12,
            "kv_source_layer_ids": (),
            "index_source_layer_ids": (),
            "engram_layer_ids": (),
            "num_nextn_predict_layers": 0,
        }
    )
    assert [group.name for group in cache_groups(config)] == ["window"]
