"""The section `replay` applied to a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.config.replay import ReplayMode, ReplaySection
from deepinfer.device.errors import ConfigError
from deepinfer.engine.replay_rule import ReplayRule
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.model.config import V41Config
from deepinfer.model.replay import ALL_ROWS, bounded_rows, exact_rows

BOUNDED = ReplaySection(mode=ReplayMode.BOUNDED)


@pytest.fixture(scope="module")
def flash() -> V41Config:
    return V41Config.from_json(Path(__file__).parents[2] / "data" / "flash")


def test_only_bounded_mode_drops_rows_and_only_of_requests_that_do_not_need_them(
    flash: V41Config,
) -> None:
    plain, scored = SamplingParams(), SamplingParams(prompt_logprobs=0)
    exact, bounded = ReplayRule(ReplaySection(), flash), ReplayRule(BOUNDED, flash)
    assert exact.decoder_start(4096, plain) == 0
    assert bounded.decoder_start(4096, plain) == 4096 - 140
    assert bounded.decoder_start(4096, scored) == 0
    assert bounded.decoder_start(140, plain) == 0
    assert bounded.cold(0) == ALL_ROWS


def test_rebuilding_follows_its_own_setting(flash: V41Config) -> None:
    cheap = BOUNDED.model_copy(update={"rebuild": ReplayMode.BOUNDED})
    assert ReplayRule(cheap, flash).after_hit(1024, 500, drafts=True) == bounded_rows(
        flash, 1024, 500
    )
    for drafts, final in ((False, 1), (True, 128)):
        assert ReplayRule(BOUNDED, flash).after_hit(1024, 500, drafts=drafts) == exact_rows(
            flash, 1024, 500, num_final_rows=final
        )


@pytest.mark.parametrize("ratios", [[0] * 43, [2] * 40 + [0] * 3])
def test_a_model_with_nothing_behind_its_last_source_is_refused(
    flash: V41Config, ratios: list[int]
) -> None:
    last = flash.num_hidden_layers - 1
    sources = () if not any(ratios) else (0, last)
    model = flash.model_copy(
        update={"compress_ratios": tuple(ratios), "kv_source_layer_ids": sources}
    )
    with pytest.raises(ConfigError, match=r"replay\.mode = 'bounded' .* set replay\.mode=exact"):
        ReplayRule(BOUNDED, model)
