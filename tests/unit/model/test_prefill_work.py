"""The formula against the published derivation for Flash."""

from __future__ import annotations

import pytest

from deepinfer.model.config import V41Config
from deepinfer.model.prefill_work import prefill_macs, row_work
from deepinfer.model.replay import ALL_ROWS, cold_rows, decoder_start


@pytest.fixture(scope="module")
def flash_without_engram(flash: V41Config) -> V41Config:
    return flash.model_copy(update={"engram_layer_ids": ()})


def test_work_of_a_row_is_that_of_the_derivation(flash: V41Config) -> None:
    """Figures in millions of multiply-accumulates."""
    plain = row_work(flash, 5)
    assert (plain.write + plain.rest) / 1e6 == pytest.approx(377.29, abs=0.01)
    assert row_work(flash, 2).write / 1e6 == pytest.approx(2.62 + 6.55 + 5.24 + 0.03, abs=0.02)
    assert row_work(flash, 20).write / 1e6 == pytest.approx(2.62 + 2.62 + 0.07, abs=0.01)
    assert (row_work(flash, 24).rest - plain.rest) / 1e6 == pytest.approx(5.24 + 0.16, abs=0.01)
    encoder = [row_work(flash, layer) for layer in range(20)]
    assert sum(work.write + work.rest for work in encoder) / 1e9 == pytest.approx(7.578, abs=2e-3)
    decoder = [row_work(flash, layer) for layer in range(20, 40)]
    assert sum(work.write + work.rest for work in decoder) / 1e9 == pytest.approx(7.576, abs=2e-3)


@pytest.mark.parametrize(
    ("num_tokens", "full_tflop", "bounded", "keep_140"),
    [
        (128, 3.95, 1.000, 1.000),
        (256, 8.01, 0.750, 0.774),
        (512, 16.3, 0.624, 0.636),
        (1024, 33.4, 0.558, 0.564),
        (2048, 67.8, 0.528, 0.531),
        (4096, 137, 0.512, 0.514),
        (8192, 275, 0.504, 0.505),
        (32_768, 1122, 0.495, 0.496),
    ],
)
def test_prompts_cost_what_the_derivation_says(
    flash_without_engram: V41Config,
    num_tokens: int,
    full_tflop: float,
    bounded: float,
    keep_140: float,
) -> None:
    """Beyond 16,384 entries the derivation scores candidates only: allowed for by the bound."""
    config = flash_without_engram
    full = prefill_macs(config, num_tokens, ALL_ROWS)
    assert 2e-12 * full == pytest.approx(full_tflop, rel=0.006 if num_tokens <= 8192 else 0.02)
    for keep, share in ((128, bounded), (140, keep_140)):
        rows = cold_rows(config, decoder_start(num_tokens, keep))
        found = prefill_macs(config, num_tokens, rows) / full
        assert found == pytest.approx(share, abs=0.002 if num_tokens <= 8192 else 0.01)


def test_engram_raises_the_share_that_is_left(flash: V41Config) -> None:
    rows = cold_rows(flash, decoder_start(32_768, 140))
    share = prefill_macs(flash, 32_768, rows) / prefill_macs(flash, 32_768, ALL_ROWS)
    assert share == pytest.approx(0.505, abs=0.01)
