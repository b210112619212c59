"""Bounded replay against the golden values; rebuilt windows against those of a cold run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.errors import ContractError
from deepinfer.device.numerics import Numerics
from deepinfer.device.registry import load_backend
from deepinfer.device.runtime import StepKind
from deepinfer.model.loading import LoadedModel, load_model
from deepinfer.model.replay import (
    PrefillRows,
    batch_replay,
    bounded_rows,
    cold_rows,
    decoder_start,
    exact_rows,
    lossless_keep_tokens,
)
from deepinfer.model.step_batch import StepBatch
from tests.backend.replay_bench import Asked, ReplayBench

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
# The fixtures allow 1e-3 of the logit scale; other summation orders give about 1e-5.
BOUND = 1e-4


class Fixture(NamedTuple):
    loaded: LoadedModel
    backend: Backend
    cases: dict[str, Any]
    arrays: dict[str, Tensor]

    @property
    def window(self) -> int:
        return self.loaded.config.sliding_window

    @property
    def longest(self) -> list[int]:
        return list(self.cases["cases"][-1]["prompt_ids"])

    def bench(self, num_slots: int = 1, num_tables: int = 1) -> ReplayBench:
        return ReplayBench(
            self.loaded,
            self.backend,
            num_slots=num_slots,
            num_tables=num_tables,
            length=len(self.longest) + 24,
        )

    def cold(self, num_tokens: int, keep: int | None) -> PrefillRows:
        start = 0 if keep is None else decoder_start(num_tokens, keep)
        return cold_rows(self.loaded.config, start)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Golden values on every backend that computes exact fp32 anywhere, or on `--backend`."""
    if "golden" not in metafunc.fixturenames:
        return
    chosen: str | None = metafunc.config.getoption("--backend")
    configs = {
        "reference": BackendConfig("reference", Numerics.EXACT),
        "ascend950-emulated": BackendConfig("ascend950", Numerics.EXACT, {"emulated": True}),
    }
    if chosen is not None:
        configs = {chosen: BackendConfig(chosen, Numerics.EXACT)}
    elif metafunc.function.__name__ not in ("test_golden_values_in_company",):
        del configs["ascend950-emulated"]
    params = [(name, config) for name in ("tiny_a", "tiny_b") for config in configs.values()]
    ids = [f"{name}-{key}" for name in ("tiny_a", "tiny_b") for key in configs]
    metafunc.parametrize("golden", params, ids=ids, indirect=True, scope="module")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are faster without helpers, and helpers that wait for a core are slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def golden(request: pytest.FixtureRequest) -> Iterator[Fixture]:
    name, config = request.param
    folder = GOLDEN / name
    backend = load_backend(config)
    loaded = load_model(folder / "checkpoint", backend, max_positions=512)
    cases = json.loads((folder / "cases.json").read_text())
    yield Fixture(loaded, backend, cases, load_file(folder / "cases.safetensors"))
    backend.close()


def replay_cases(golden: Fixture) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    found = [(case, replay) for case in golden.cases["cases"] for replay in case["replay"]]
    assert found
    return found


@pytest.mark.parametrize("chunk", [None, 13])
def test_golden_values_in_company(golden: Fixture, chunk: int | None) -> None:
    """All replays of a fixture in one batch, beside requests that run every row."""
    replays = replay_cases(golden)
    plain = golden.cases["cases"][-2:]
    bench = golden.bench(len(replays) + 2, len(replays) + 2)
    asked = [
        Asked(list(case["prompt_ids"]), i, i, golden.cold(len(case["prompt_ids"]), replay["keep"]))
        for i, (case, replay) in enumerate(replays)
    ]
    asked += [
        Asked(list(case["prompt_ids"]), i, i) for i, case in enumerate(plain, start=len(replays))
    ]
    decoded = bench.decode(bench.prefill(*asked, chunk=chunk), *asked, count=8)
    limit = BOUND * golden.cases["logit_scale"]
    expected = [
        (golden.arrays[f"{case['name']}.replay{replay['keep']}.logits"], replay["greedy_ids"])
        for case, replay in replays
    ]
    expected += [
        (golden.arrays[f"{case['name']}.decode_logits"][:8], case["greedy_ids"][:8])
        for case in plain
    ]
    for rows, (logits, ids) in zip(decoded, expected, strict=True):
        assert (rows - logits).abs().max() <= limit
        assert rows.argmax(-1).tolist() == ids


def test_bounded_prefill_depends_on_no_chunk_and_no_company(golden: Fixture) -> None:
    """Logits, windows and block KV, bit by bit; also when the answer was computed before."""
    ids, window = golden.longest, golden.window
    rows = golden.cold(len(ids), window + 4)
    layers = range(golden.loaded.config.num_hidden_layers)
    found = []
    for chunk in (None, 64, 17, window - 1, 3):
        bench = golden.bench(2, 2)
        alone = Asked(list(ids), 1, 1, rows)
        company = [] if chunk == 64 else [Asked(ids[:41], 0, 0, golden.cold(41, window))]
        logits = bench.prefill(*company, alone, chunk=chunk)[-1]
        seen = [bench.window(alone, layer, len(ids) - window, len(ids)) for layer in layers]
        found.append([logits, *seen, *bench.blocks(1, len(ids)).values()])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    # Preempted in the middle of its answer and computed anew: the start stays where it was.
    bench = golden.bench()
    answering = Asked(list(ids), 0, 0, rows)
    answer = bench.decode(bench.prefill(answering), answering, count=6)[0]
    again = golden.bench()
    [resumed] = again.prefill(Asked(answering.ids, 0, 0, rows), chunk=23)
    assert torch.equal(resumed, answer[-1])


def test_bounded_prefill_leaves_everything_below_the_cut_exact(golden: Fixture) -> None:
    ids, config = golden.longest, golden.loaded.config
    source = config.last_kv_source
    assert source is not None
    exact, bounded = golden.bench(), golden.bench()
    request = Asked(list(ids), 0, 0), Asked(list(ids), 0, 0, golden.cold(len(ids), golden.window))
    exact.prefill(request[0])
    bounded.prefill(request[1], chunk=30)
    stop = len(ids)
    for layer in range(config.num_hidden_layers):
        pair = [
            bench.window(asked, layer, stop - golden.window, stop)
            for bench, asked in zip((exact, bounded), request, strict=True)
        ]
        # The layer after the source reads its streams, which its true window left exact too.
        assert torch.equal(*pair) == (layer <= source + 1), layer
    expected, found = exact.blocks(0, stop), bounded.blocks(0, stop)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_long_enough_tail_is_exact_and_one_token_fewer_is_not(golden: Fixture) -> None:
    ids, needed = golden.longest, lossless_keep_tokens(golden.loaded.config)
    assert golden.window < needed < len(ids)
    bench = golden.bench(3, 3)
    logits = bench.prefill(
        *(
            Asked(list(ids), slot, slot, golden.cold(len(ids), keep))
            for slot, keep in enumerate((None, needed, needed - 1))
        )
    )
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("keep", [None, 4])
@pytest.mark.parametrize("chunk", [None, 11])
def test_exact_rebuild_gives_the_windows_of_a_cold_run(
    golden: Fixture, keep: int | None, chunk: int | None
) -> None:
    """Hits around multiples of window and block, odd ones too, up to the whole prompt."""
    ids, config, window = golden.longest, golden.loaded.config, golden.window
    kept = None if keep is None else window + keep
    bench = golden.bench(12)
    cold = Asked(list(ids), 0, 0, golden.cold(len(ids), kept))
    [expected] = bench.prefill(cold)
    before = bench.blocks(0, len(ids))
    hits = (8, window, window + 1, 40, 47, 56, len(ids) - 16, len(ids) - 1, len(ids))
    start = 0 if kept is None else decoder_start(len(ids), kept)
    for slot, hit in enumerate(hits, start=1):
        rows = exact_rows(config, hit, start)
        bench.poison_entries(0, hit)
        asked = Asked(list(ids), slot, 0, rows)
        [logits] = bench.prefill(asked, chunk=chunk)
        assert torch.equal(logits, expected), hit
        for layer in range(config.num_hidden_layers):
            found, cold_rows_ = (
                bench.window(entry, layer, len(ids) - window, len(ids)) for entry in (asked, cold)
            )
            assert torch.equal(found, cold_rows_), (hit, layer)
        after = bench.blocks(0, len(ids))
        assert all(torch.equal(before[name], after[name]) for name in before), hit


def test_a_trapezoid_runs_fewer_rows_in_higher_layers(golden: Fixture) -> None:
    config, window = golden.loaded.config, golden.window
    last = config.num_hidden_layers - 1
    hit = 10_000
    rows = exact_rows(config, hit, 0)
    assert hit - rows.first == window + last * (window - 1)
    written = [hit - rows.limits(layer - 1)[0] for layer in range(1, last + 1)]
    assert written == [window + (last - layer) * (window - 1) for layer in range(1, last + 1)]


def test_one_row_fewer_would_not_be_exact(golden: Fixture) -> None:
    ids, config = golden.longest, golden.loaded.config
    bench = golden.bench(3)
    [expected] = bench.prefill(Asked(list(ids), 0, 0))
    rows = exact_rows(config, len(ids), 0)
    assert rows.first > 0
    fewer = replace(rows, first=rows.first + 1)
    for slot, (tried, exact) in enumerate(((rows, True), (fewer, False)), start=1):
        [logits] = bench.prefill(Asked(list(ids), slot, 0, tried))
        assert torch.equal(logits, expected) == exact


@pytest.mark.parametrize("keep", [None, 4])
def test_bounded_rebuild_reads_cached_blocks_and_writes_none(
    golden: Fixture, keep: int | None
) -> None:
    """What was computed before H stays, whatever chunk and company; results agree bit by bit."""
    ids, config, window = golden.longest, golden.loaded.config, golden.window
    kept = None if keep is None else window + keep
    start = 0 if kept is None else decoder_start(len(ids), kept)
    for hit in (window, 48, len(ids) // 8 * 8, len(ids)):
        bench = golden.bench(4, 2)
        cold = Asked(list(ids), 0, 0, golden.cold(len(ids), kept))
        [expected] = bench.prefill(cold)
        before = bench.blocks(0, hit)
        found = []
        for slot, chunk in enumerate((None, window + 3, 5), start=1):
            bench.poison_entries(0, hit)
            company = [] if slot == 1 else [Asked(ids[slot:60], 0, 1)]
            asked = Asked(list(ids), slot, 0, bounded_rows(config, hit, start))
            logits = bench.prefill(asked, *company, chunk=chunk)[0]
            windows = [
                bench.window(asked, layer, len(ids) - window, len(ids))
                for layer in range(config.num_hidden_layers)
            ]
            found.append([logits, *windows, *bench.blocks(0, len(ids)).values()])
            after = bench.blocks(0, hit)
            assert all(torch.equal(before[name], after[name]) for name in before), hit
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other)), hit
        assert torch.isfinite(found[0][0]).all()
        # Nothing is left out when the window reaches back to the first token.
        assert torch.equal(found[0][0], expected) == (hit == window), hit


def test_a_replayed_row_sees_no_row_before_the_floor(golden: Fixture) -> None:
    """What a row of layer 0 saw shows in layer 1's window: only the last one saw a whole one."""
    ids, config, window = golden.longest, golden.loaded.config, golden.window
    hit = 48
    bench = golden.bench(2, 2)
    bench.prefill(Asked(list(ids), 0, 0))
    rebuilt = Asked(ids[:hit], 1, 0, bounded_rows(config, hit, 0))
    bench.prefill(rebuilt)
    cold = Asked(list(ids[:hit]), 0, 1)
    bench.prefill(cold)
    first = bench.window(rebuilt, 0, hit - window, hit)
    assert torch.equal(first, bench.window(cold, 0, hit - window, hit))
    above = bench.window(rebuilt, 1, hit - window, hit)
    same = (above == bench.window(cold, 1, hit - window, hit)).all(-1)
    assert same.tolist() == [False] * (window - 1) + [True]


def test_logits_of_rows_that_end_early_are_refused(golden: Fixture) -> None:
    loaded, zeros = golden.loaded, torch.zeros(1, dtype=torch.int64)
    batch = StepBatch(
        kind=StepKind.PREFILL,
        input_ids=torch.zeros(9, dtype=torch.int64),
        query_lens=torch.tensor([9]),
        context_lens=zeros,
        seq_slots=zeros,
        block_table=torch.tensor([[0, 1]]),
        history=torch.full((1, loaded.config.history_len), -1),
        logits_rows=torch.tensor([8]),
        max_query_len=9,
        max_key_len=9,
        replay=batch_replay([golden.cold(40, golden.window)], [0], [9]),
    )
    geometry = golden.bench().caches.geometry
    with pytest.raises(ContractError, match="logits of 1 rows are wanted and no row goes on"):
        loaded.backbone.plan(batch, geometry)
