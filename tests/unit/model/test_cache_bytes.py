"""Cache sizes against the published figures."""

from __future__ import annotations

from fractions import Fraction

from deepinfer.device.numerics import Numerics
from deepinfer.model.cache_bytes import cache_bytes
from deepinfer.model.config import V41Config


def test_flash_grows_by_890_bytes_a_token(flash: V41Config) -> None:
    sizes = cache_bytes(flash)
    assert (sizes.compressed_row, sizes.index_row, sizes.window_row) == (288, 68, 528)
    assert sizes.compressed_per_token == 720
    assert sizes.index_per_token == 170
    assert sizes.per_token == 890


def test_flash_request_state(flash: V41Config) -> None:
    sizes = cache_bytes(flash)
    assert sizes.window_per_request == 2_703_360
    assert sizes.pending_per_request == 3 * 4096
    assert sizes.history_per_request == 12
    assert sizes.per_request == 2_703_360 + 3 * 4096 + 12
    assert sizes.draft_window_per_request == 3 * 128 * 528


def test_exact_rows_are_fp32(flash: V41Config) -> None:
    sizes = cache_bytes(flash, Numerics.EXACT)
    assert sizes.window_row == 2048
    assert sizes.per_token == Fraction(5, 2) * (2048 + 512)


def test_windows_alone_do_not_grow(small: V41Config) -> None:
    config = small.model_copy(
        update={
            "compress_ratios": (0,) * 12,
            "kv_source_layer_ids": (),
            "index_source_layer_ids": (),
            "engram_layer_ids": (),
        }
    )
    sizes = cache_bytes(config)
    assert sizes.per_token == 0
    assert sizes.per_request == sizes.window_per_request == 9 * 8 * (64 + 2)
