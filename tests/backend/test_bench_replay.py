"""Work counted in the op calls of real runs, beside the formula that knows the shapes only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.bench.flash_layers import load_flash_layers
from deepinfer.bench.replay import measure_replay
from deepinfer.bench.work_counter import WorkCounter
from deepinfer.config.presets import bundled_checkpoint
from deepinfer.device.backend import Backend
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.overlay import with_ops
from deepinfer.device.registry import load_backend
from deepinfer.model.config import V41Config
from deepinfer.model.loading import RANDOM_WEIGHTS_MARK, LoadedModel, load_model
from deepinfer.model.prefill_run import Prefill
from deepinfer.model.prefill_work import prefill_macs
from deepinfer.model.replay import ALL_ROWS, PrefillRows, cold_rows, decoder_start, exact_rows

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
LENGTH = 400
Counted = tuple[LoadedModel, Backend, WorkCounter]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are faster without helpers, and helpers that wait for a core are slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["bundled", "tiny_b"])
def counted(request: pytest.FixtureRequest) -> Iterator[Counted]:
    folder = bundled_checkpoint() if request.param == "bundled" else GOLDEN / "tiny_b/checkpoint"
    backend = load_backend(BackendConfig("reference", Numerics.EXACT, {"runtime": "inline"}))
    counter = WorkCounter(backend.ops, V41Config.from_json(folder))
    loaded = load_model(folder, with_ops(backend, counter.ops), max_positions=LENGTH)
    yield loaded, backend, counter
    backend.close()


def macs(counted: Counted, num_tokens: int, rows: PrefillRows, chunk: int = LENGTH) -> int:
    loaded, backend, counter = counted
    prefill = Prefill(loaded, backend, max_tokens=LENGTH, chunk_tokens=chunk)
    counter.macs.clear()
    counter.running = True
    prefill.run([5 + i % 300 for i in range(num_tokens)], rows)
    counter.running = False
    return counter.total


@pytest.mark.parametrize("num_tokens", [150, LENGTH])
def test_counted_work_is_the_formulas(counted: Counted, num_tokens: int) -> None:
    """But for one index key of padding where an odd number of rows goes on."""
    config = counted[0].config
    window = config.sliding_window
    for rows in (
        ALL_ROWS,
        cold_rows(config, decoder_start(num_tokens, window)),
        cold_rows(config, decoder_start(num_tokens, 140)),
        exact_rows(config, num_tokens, 0),
    ):
        found = macs(counted, num_tokens, PrefillRows(cuts=rows.cuts))
        expected = prefill_macs(config, num_tokens, PrefillRows(cuts=rows.cuts))
        assert found == pytest.approx(expected, rel=1e-3), rows


def test_chunks_change_the_work_by_scores_that_short_contexts_do_not_need(
    counted: Counted,
) -> None:
    config = counted[0].config
    rows = cold_rows(config, decoder_start(LENGTH, 140))
    assert macs(counted, LENGTH, rows, chunk=128) == pytest.approx(
        prefill_macs(config, LENGTH, rows), rel=0.01
    )


@pytest.mark.parametrize("numerics", list(Numerics))
def test_layers_with_weights_drawn_on_the_device_are_measured(numerics: Numerics) -> None:
    """What a GPU runs at Flash's widths, at a width for a CPU."""
    raw: dict[str, Any] = V41Config.from_json(GOLDEN / "tiny_a/checkpoint").to_json()
    del raw["vision_config"]
    raw["text_config"] |= {
        "num_hidden_layers": 4, "compress_ratios": [2, 2, 1, 1], "kv_source_layer_ids": [0, 2],
        "index_source_layer_ids": [0, 2], "candidate_source_layer_id": 2, "engram_layer_ids": [],
        "engram_num_embeddings": [], "num_nextn_predict_layers": 0, "dspark_target_layer_ids": [],
    }  # fmt: skip
    config = V41Config.from_json(raw)
    backend = load_backend(BackendConfig("reference", numerics, {"runtime": "inline"}))
    counter = WorkCounter(backend.ops, config)
    counted = with_ops(backend, counter.ops)
    loaded = load_flash_layers(config, counted, max_positions=96)
    assert loaded.marks == (RANDOM_WEIGHTS_MARK,)
    short, long = measure_replay(
        loaded, backend, counter, lengths=[12, 96], keep_tokens=8, chunk_tokens=48, repeats=1
    )
    backend.close()
    assert long.counted_ratio < short.counted_ratio < 1.0
    assert long.counted_ratio == pytest.approx(long.formula_ratio, rel=0.01)
    assert long.launch_us == short.launch_us > 0


def test_dropped_rows_change_no_logit_where_no_layer_needs_them(counted: Counted) -> None:
    """The decoder's part of the exact schedule on a cold prompt: less work, the same bits."""
    loaded, backend, _ = counted
    config, ids = loaded.config, [5 + (i * i) % 300 for i in range(LENGTH)]
    source = config.last_kv_source
    assert source is not None
    cuts = [cut for cut in exact_rows(config, LENGTH, 0).cuts if cut.layer >= source]
    rows = PrefillRows(cuts=tuple(cuts))
    assert prefill_macs(config, LENGTH, rows) < 0.8 * prefill_macs(config, LENGTH, ALL_ROWS)
    logits = [
        Prefill(loaded, backend, max_tokens=LENGTH, chunk_tokens=250).run(ids, kind)[0]
        for kind in (ALL_ROWS, rows)
    ]
    assert torch.equal(*logits)
