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
from deepinfer.model.loading import LoadedModel, load_model
from deepinfer.model.token_map import load_token_map
from deepinfer.model.trace_run import trace_tokens

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
# The fixtures allow 1e-3 of the logit scale; other summation orders give about 1e-5.
BOUND = 1e-4


class Fixture(NamedTuple):
    folder: Path
    cases: dict[str, Any]
    arrays: dict[str, Tensor]
    loaded: LoadedModel
    backend: Backend


@pytest.fixture(scope="module", params=["tiny_a", "tiny_b"])
def golden(request: pytest.FixtureRequest) -> Iterator[Fixture]:
    folder = GOLDEN / request.param
    backend = load_backend(BackendConfig("reference", Numerics.EXACT))
    loaded = load_model(folder / "checkpoint", backend, max_positions=512)
    cases = json.loads((folder / "cases.json").read_text())
    yield Fixture(folder, cases, load_file(folder / "cases.safetensors"), loaded, backend)
    backend.close()


def check_case(golden: Fixture, case: dict[str, Any], trace: dict[str, Tensor]) -> None:
    """Everything the fixture says about the prompt, against a trace of prompt and answer."""
    name, prompt = case["name"], case["prompt_ids"]
    scale, arrays = golden.cases["logit_scale"], golden.arrays
    config = golden.loaded.config
    n, tail = len(prompt), min(16, len(prompt))
    prefill = arrays[f"{name}.prefill_logits"]
    assert (trace["logits"][n - tail : n] - prefill).abs().max() <= BOUND * scale
    decoded = arrays[f"{name}.decode_logits"]
    assert (trace["logits"][n - 1 :] - decoded).abs().max() <= BOUND * scale
    assert trace["logits"][n - 1 :].argmax(-1).tolist() == case["greedy_ids"]
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
        ids = case["prompt_ids"] + case["greedy_ids"][:-1]
        trace = trace_tokens(golden.loaded, golden.backend, ids, chunk=chunk)
        check_case(golden, case, trace)


def test_token_by_token_decoding_gives_the_golden_values(golden: Fixture) -> None:
    for case in golden.cases["cases"]:
        ids = case["prompt_ids"] + case["greedy_ids"][:-1]
        trace = trace_tokens(golden.loaded, golden.backend, ids, kind=StepKind.DECODE)
        check_case(golden, case, trace)


@pytest.mark.parametrize("numerics", list(Numerics))
def test_chunking_and_decoding_change_no_bit(numerics: Numerics) -> None:
    backend = load_backend(BackendConfig("reference", numerics))
    folder = GOLDEN / "tiny_a"
    loaded = load_model(folder / "checkpoint", backend, max_positions=512)
    ids = json.loads((folder / "cases.json").read_text())["cases"][-1]["prompt_ids"]
    whole = trace_tokens(loaded, backend, ids)
    others = [trace_tokens(loaded, backend, ids, chunk=chunk) for chunk in (64, 16, 7, 1)]
    others.append(trace_tokens(loaded, backend, ids, kind=StepKind.DECODE))
    backend.close()
    for other in others:
        assert [name for name in whole if not torch.equal(whole[name], other[name])] == []
