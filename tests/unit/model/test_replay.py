"""Which rows each layer runs, as numbers; what they do is tested on a backend."""

from __future__ import annotations

import pytest

from deepinfer.device.errors import ContractError
from deepinfer.model.config import V41Config
from deepinfer.model.replay import (
    PrefillRows,
    SequenceCut,
    batch_replay,
    bounded_rows,
    cold_rows,
    decoder_start,
    exact_rows,
    lossless_keep_tokens,
)


def written(rows: PrefillRows, hit: int, layer: int) -> int:
    """Window rows before the hit that a layer writes."""
    return max(0, hit - rows.limits(layer - 1)[0])


def test_the_decoder_starts_at_the_kept_tail_and_never_before_the_prompt() -> None:
    assert [decoder_start(n, 140) for n in (1, 140, 141, 4096)] == [0, 0, 1, 3956]


def test_bounded_is_exact_from_as_many_rows_as_the_derivation_says(flash: V41Config) -> None:
    assert lossless_keep_tokens(flash) == 2414


def test_a_cold_prompt_is_cut_at_the_last_source_only(flash: V41Config) -> None:
    assert cold_rows(flash, 0) == PrefillRows()
    assert cold_rows(flash, 3956).cuts == (SequenceCut(20, 3956, 3956),)
    assert PrefillRows().is_plain
    assert not cold_rows(flash, 1).is_plain


def test_bounded_rebuild_runs_one_window_of_rows(flash: V41Config) -> None:
    assert bounded_rows(flash, 4096, 0) == PrefillRows(3968, 4096, 3968)
    # The kept tail begins among the new tokens, or among the replayed ones, or before them.
    for start, cuts in (
        (5000, (SequenceCut(20, 5000, 5000),)),
        (4000, (SequenceCut(20, 4000, 4000),)),
        (900, ()),
    ):
        assert bounded_rows(flash, 4096, start).cuts == cuts


def test_a_hit_shorter_than_the_window_is_refused(flash: V41Config) -> None:
    with pytest.raises(ContractError, match="hit of 127 tokens is shorter than the window of 128"):
        bounded_rows(flash, 127, 0)


def test_the_exact_schedule_has_the_row_counts_of_the_derivation(flash: V41Config) -> None:
    rows = exact_rows(flash, 65_536, 0)
    assert 65_536 - rows.first == 5081
    assert [written(rows, 65_536, layer) for layer in (20, 21, 39)] == [2541, 2414, 128]
    assert sum(written(rows, 65_536, layer) for layer in range(20, 40)) == 26_690


def test_exact_rebuild_below_a_kept_tail_needs_the_encoder_only(flash: V41Config) -> None:
    """The decoder starts far behind the hit: its layers replay nothing."""
    rows = exact_rows(flash, 8192, 20_000)
    assert rows.limits(20) == (20_000, 20_000)
    assert rows.limits(19) == (8192, 0)
    assert 8192 - rows.first == 20 * 127


def test_a_drafter_gets_a_window_of_final_rows(flash: V41Config) -> None:
    rows = exact_rows(flash, 65_536, 0, num_final_rows=128)
    assert rows.limits(39) == (65_536 - 128, 0)


def test_a_short_hit_is_run_from_the_start(flash: V41Config) -> None:
    rows = exact_rows(flash, 256, 0)
    assert rows.first == 0
    assert rows.write_from == 256
    assert rows.limits(38) == (128, 0)


def test_a_batch_cuts_where_any_request_does(flash: V41Config) -> None:
    rows = [PrefillRows(), cold_rows(flash, 300), bounded_rows(flash, 256, 0)]
    replay = batch_replay(rows, [0, 0, 128], [64, 320, 200])
    assert replay is not None
    assert [tuple(cut) for cut in replay.cuts] == [(20, 64 + 20 + 200, 200)]
    assert replay.floors.tolist() == [0, 0, 128]
    assert replay.write_from.tolist() == [0, 0, 256]
    assert replay.starts_after(0).tolist() == [0, 300, 128]
    assert replay.floors_after(0).tolist() == [0, 300, 128]


def test_a_chunk_before_the_kept_tail_has_no_decoder_rows(flash: V41Config) -> None:
    replay = batch_replay([cold_rows(flash, 300)], [0], [256])
    assert replay is not None
    assert replay.cuts[0].num_rows == 0


def test_plain_rows_need_no_replay(flash: V41Config) -> None:
    assert batch_replay([PrefillRows(), cold_rows(flash, 0)], [0, 5], [3, 4]) is None
