"""The golden fixtures: values of an independent implementation in exact fp32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.registry import load_backend
from deepinfer.device.runtime import StepKind
from deepinfer.model.caches import CacheGeometry
from deepinfer.model.loading import LoadedModel, load_model
from deepinfer.model.step_batch import StepBatch
from deepinfer.model.token_map import load_token_map
from deepinfer.model.trace_run import trace_tokens

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
# The fixtures allow 1e-3 of the logit scale; other summation orders give about 1e-5.
BOUND = 1e-4
BLOCK_SIZE = 8


class Fixture(NamedTuple):
    folder: Path
    cases: dict[str, Any]
    arrays: dict[str, Tensor]
    loaded: LoadedModel
    backend: Backend


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are faster without helpers, and helpers that wait for a core are slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run on the backend that `--backend` names, else on all that compute exact fp32 anywhere."""
    if "config" not in metafunc.fixturenames:
        return
    chosen: str | None = metafunc.config.getoption("--backend")
    configs = {
        "reference": BackendConfig("reference", Numerics.EXACT),
        "ascend950-emulated": BackendConfig("ascend950", Numerics.EXACT, {"emulated": True}),
    }
    if chosen is not None:
        configs = {chosen: BackendConfig(chosen, Numerics.EXACT)}
    metafunc.parametrize("config", configs.values(), ids=configs.keys(), scope="module")


@pytest.fixture(scope="module", params=["tiny_a", "tiny_b"])
def golden(request: pytest.FixtureRequest, config: BackendConfig) -> Iterator[Fixture]:
    folder = GOLDEN / request.param
    backend = load_backend(config)
    loaded = load_model(folder / "checkpoint", backend, max_positions=512)
    cases = json.loads((folder / "cases.json").read_text())
    yield Fixture(folder, cases, load_file(folder / "cases.safetensors"), loaded, backend)
    backend.close()


def check_case(golden: Fixture, case: dict[str, Any], trace: dict[str, Tensor]) -> None:
    """Everything the fixture says about the prompt, and the answer as far as the trace goes."""
    name, prompt = case["name"], case["prompt_ids"]
    scale, arrays = golden.cases["logit_scale"], golden.arrays
    config = golden.loaded.config
    n, tail = len(prompt), min(16, len(prompt))
    prefill = arrays[f"{name}.prefill_logits"]
    assert (trace["logits"][n - tail : n] - prefill).abs().max() <= BOUND * scale
    answer = trace["logits"][n - 1 :]
    decoded = arrays[f"{name}.decode_logits"][: len(answer)]
    assert (answer - decoded).abs().max() <= BOUND * scale
    assert answer.argmax(-1).tolist() == case["greedy_ids"][: len(answer)]
    for layer, expected in case["index_selected"].items():
        row = trace[f"layers.{layer}.selected_positions"][n - 1].tolist()
        assert [entry for entry in row if entry >= 0] == expected, layer
    source = config.candidate_source_layer_id
    blocks = trace[f"layers.{source}.candidate_blocks"][n - 1].tolist()
    assert [block for block in blocks if block >= 0] == case["candidate_blocks"]
    for layer, expected in case["expert_ids"].items():
        assert trace[f"layers.{layer}.expert_ids"][n - 1].tolist() == expected, layer
        weights = torch.tensor(case["expert_weights"][layer])
        assert (trace[f"layers.{layer}.expert_weights"][n - 1] - weights).abs().max() <= 1e-3
    rows = [trace[f"engram.{layer}.hash_ids"][n - tail : n] for layer in config.engram_layer_ids]
    assert torch.equal(torch.stack(rows, 1), arrays[f"{name}.engram_rows"])
    names = [f"layers.{layer}.streams" for layer in range(config.num_hidden_layers)]
    for entry, expected in zip(
        [*names, "final.streams"], arrays[f"{name}.streams_last"], strict=True
    ):
        limit = 1e-3 * arrays[f"{name}.streams_last"].abs().max()
        assert (trace[entry][n - 1] - expected).abs().max() <= limit, entry
    hidden = arrays[f"{name}.final_hidden_last"]
    assert (trace["final.hidden"][n - 1] - hidden).abs().max() <= 1e-3 * hidden.abs().max()


def test_token_map_is_the_fixtures(golden: Fixture) -> None:
    token_map = load_token_map(golden.folder / "checkpoint", golden.loaded.config)
    assert torch.equal(token_map, golden.arrays["engram_token_map"])


@pytest.mark.parametrize("chunk", [None, 64, 7, 1])
def test_prefill_gives_the_golden_values_in_any_chunks(golden: Fixture, chunk: int | None) -> None:
    for case in golden.cases["cases"]:
        # One token a step is slow, and the answer is fed that way by the decoding test already.
        answer = [] if chunk == 1 else case["greedy_ids"][:-1]
        trace = trace_tokens(
            golden.loaded, golden.backend, case["prompt_ids"] + answer, chunk=chunk
        )
        check_case(golden, case, trace)


def test_token_by_token_decoding_gives_the_golden_values(golden: Fixture) -> None:
    for case in golden.cases["cases"]:
        ids = case["prompt_ids"] + case["greedy_ids"][:-1]
        trace = trace_tokens(golden.loaded, golden.backend, ids, kind=StepKind.DECODE)
        check_case(golden, case, trace)


@pytest.mark.parametrize("numerics", list(Numerics))
def test_chunking_and_decoding_change_no_bit(
    request: pytest.FixtureRequest, numerics: Numerics
) -> None:
    """On the reference, or the backend that `--backend` names."""
    name = request.config.getoption("--backend") or "reference"
    backend = load_backend(BackendConfig(name, numerics))
    folder = GOLDEN / "tiny_a"
    loaded = load_model(folder / "checkpoint", backend, max_positions=512)
    ids = json.loads((folder / "cases.json").read_text())["cases"][-2]["prompt_ids"]
    whole = trace_tokens(loaded, backend, ids)
    others = [trace_tokens(loaded, backend, ids, chunk=chunk) for chunk in (64, 16, 7, 1)]
    others.append(trace_tokens(loaded, backend, ids, kind=StepKind.DECODE))
    backend.close()
    for other in others:
        assert [name for name in whole if not torch.equal(whole[name], other[name])] == []


class Company:
    """All cases of a fixture as the requests of one batch; the last request is padding."""

    def __init__(self, golden: Fixture) -> None:
        self.golden = golden
        self.cases: list[dict[str, Any]] = golden.cases["cases"]
        self.num_requests = len(self.cases) + 1
        longest = max(len(case["prompt_ids"]) for case in self.cases) + 24
        width = -(-longest // BLOCK_SIZE)
        num_blocks = self.num_requests * width
        # Interleaved and descending, so that no request's blocks lie side by side.
        self.block_table = torch.arange(num_blocks).flip(0).reshape(width, -1).T.contiguous()
        self.slots = torch.arange(self.num_requests).flip(0)
        rows = sum(len(case["prompt_ids"]) for case in self.cases) + 1
        geometry = CacheGeometry.for_engine(
            golden.loaded.config,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_seqs=self.num_requests,
            max_num_tokens=rows,
        )
        self.caches = golden.loaded.backbone.create_caches(geometry)

    def run(self, kind: StepKind, parts: list[list[int]], before: list[list[int]]) -> list[Tensor]:
        """Logits of each request's rows `parts`, which follow its tokens `before`."""
        device = self.golden.backend.runtime.device
        width = self.golden.loaded.config.engram_max_ngram_size - 1
        lens = [len(part) for part in parts]
        history = [([-1] * width + ids)[-width:] for ids in [*before, []]]
        batch = StepBatch(
            kind=kind,
            input_ids=torch.tensor([i for part in parts for i in part] + [0], device=device),
            query_lens=torch.tensor([*lens, 0], device=device),
            context_lens=torch.tensor([len(ids) for ids in before] + [0], device=device),
            seq_slots=self.slots.to(device),
            block_table=self.block_table.to(device),
            history=torch.tensor(history, device=device),
            logits_rows=torch.arange(sum(lens), device=device),
            max_query_len=max(lens),
            max_key_len=max(n + len(ids) for n, ids in zip(lens, before, strict=True)),
        )
        found: list[Tensor] = []
        stream = self.golden.backend.runtime.compute_stream
        stream.enqueue(
            lambda: found.append(self.golden.loaded.backbone.forward(batch, self.caches))
        )
        stream.synchronize()
        return list(found[0].cpu().split(lens))


def assert_golden(golden: Fixture, case: dict[str, Any], rows: Tensor, step: int) -> None:
    """Rows of logits against the fixture: the prompt's for step 0, else answer row `step`."""
    name, limit = case["name"], BOUND * golden.cases["logit_scale"]
    expected = golden.arrays[f"{name}.prefill_logits"]
    if step:
        expected = golden.arrays[f"{name}.decode_logits"][step : step + 1]
    assert (rows[-len(expected) :] - expected).abs().max() <= limit, (name, step)
    assert int(rows[-1].argmax()) == case["greedy_ids"][step], (name, step)


def test_company_in_prefill_and_decode_gives_the_golden_values(golden: Fixture) -> None:
    company = Company(golden)
    sequences = [list(case["prompt_ids"]) for case in company.cases]
    logits = company.run(StepKind.PREFILL, sequences, [[] for _ in sequences])
    for step in range(24):
        for case, rows in zip(company.cases, logits, strict=True):
            assert_golden(golden, case, rows, step)
        tokens = [[int(rows[-1].argmax())] for rows in logits]
        logits = company.run(StepKind.DECODE, tokens, sequences)
        sequences = [ids + token for ids, token in zip(sequences, tokens, strict=True)]


def test_company_of_chunks_at_different_positions_gives_the_golden_values(golden: Fixture) -> None:
    company = Company(golden)
    prompts = [case["prompt_ids"] for case in company.cases]
    # Each prompt is cut at another place; a prompt of one token waits for the second step.
    cuts = [len(ids) * (2 + number % 3) // 5 for number, ids in enumerate(prompts)]
    heads = [ids[:cut] for ids, cut in zip(prompts, cuts, strict=True)]
    tails = [ids[cut:] for ids, cut in zip(prompts, cuts, strict=True)]
    first = company.run(StepKind.PREFILL, heads, [[] for _ in prompts])
    second = company.run(StepKind.PREFILL, tails, heads)
    for case, *pieces in zip(company.cases, first, second, strict=True):
        assert_golden(golden, case, torch.cat(pieces), 0)
