"""The trainer's whole-sequence forward gives the golden values of the engine's own fixtures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.model.config import V41Config
from deepinfer_training import backbone, drafter, fake_quant
from deepinfer_training.architecture import Architecture
from deepinfer_training.indexer import Selection, SelectionMode
from deepinfer_training.parameters import Part, load_master
from deepinfer_training.sequence_plan import Planner

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
# The engine's bound for the same fixtures; about 5e-6 was measured.
BOUND = 1e-4
CPU = torch.device("cpu")


class Fixture(NamedTuple):
    arch: Architecture
    parameters: dict[str, Tensor]
    planner: Planner
    cases: dict[str, Any]
    arrays: dict[str, Tensor]


@pytest.fixture(scope="module", params=["tiny_a", "tiny_b"])
def golden(request: pytest.FixtureRequest) -> Fixture:
    folder = GOLDEN / request.param
    fields = V41Config.from_json(folder / "checkpoint").model_dump(mode="json")
    arch = Architecture.from_fields(
        {field.name: fields[field.name] for field in dataclasses.fields(Architecture)}
    )
    files = sorted((folder / "checkpoint").glob("*.safetensors"))
    parameters = {
        name: value for part in Part for name, value in load_master(arch, part, files, CPU).items()
    }
    arrays = load_file(folder / "cases.safetensors")
    cases = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    return Fixture(arch, parameters, Planner(arch, arrays["engram_token_map"], CPU), cases, arrays)


def padded(golden: Fixture, ids: list[int]) -> tuple[Tensor, Tensor]:
    """ids and document numbers [1, T], padded to whole tiles; what follows cannot be seen."""
    tile = 2 * golden.arch.sliding_window
    row = torch.full((1, -(-len(ids) // tile) * tile), golden.arch.pad_token_id)
    row[0, : len(ids)] = torch.tensor(ids)
    return row, torch.zeros_like(row)


def forward(
    golden: Fixture, ids: Tensor, documents: Tensor, sink: list[Tensor] | None = None
) -> backbone.BackboneOutput:
    plan = golden.planner.plan(ids, documents, torch.float32)
    selection = Selection.of(golden.arch, SelectionMode.SPARSE)
    with torch.no_grad():
        return backbone.forward(
            golden.parameters, golden.arch, plan, fake_quant.FULL_PRECISION, selection,
            streams_sink=sink,
        )  # fmt: skip


def test_backbone_gives_the_golden_logits_streams_and_taps(golden: Fixture) -> None:
    arch, arrays = golden.arch, golden.arrays
    for case in golden.cases["cases"]:
        name, prompt = case["name"], case["prompt_ids"]
        n = len(prompt)
        ids, documents = padded(golden, prompt)
        sink: list[Tensor] = []
        result = forward(golden, ids, documents, sink)
        expected = arrays[f"{name}.prefill_logits"]
        with torch.no_grad():
            logits = backbone.logits(golden.parameters, result.hidden, fake_quant.FULL_PRECISION)
        rows = logits[0, n - len(expected) : n]
        assert (rows - expected).abs().max() <= BOUND * golden.cases["logit_scale"], name
        streams = torch.stack([s.view(ids.shape[1], arch.hc_mult, -1)[n - 1] for s in sink])
        wanted = arrays[f"{name}.streams_last"]
        assert (streams - wanted).abs().max() <= BOUND * wanted.abs().max(), name
        taps = arrays[f"{name}.aux_last"]
        assert (result.taps[0, n - 1] - taps).abs().max() <= BOUND * taps.abs().max(), name


def test_drafter_gives_the_golden_tokens_logits_and_confidences(golden: Fixture) -> None:
    arch, limit = golden.arch, BOUND * golden.cases["logit_scale"]
    for case in golden.cases["cases"]:
        ids, documents = padded(golden, case["prompt_ids"] + case["greedy_ids"])
        taps = forward(golden, ids, documents).taps
        anchors = drafter.Anchors(
            torch.tensor([[drafts["anchor_position"] for drafts in case["drafts"]]]),
            documents,
            golden.planner.plain_rotation(ids.shape[1] + arch.dspark_block_size),
        )
        found = drafter.draft_greedily(
            golden.parameters, arch, ids, taps, anchors, fake_quant.FULL_PRECISION
        )
        assert found.tokens[0].tolist() == [drafts["tokens"] for drafts in case["drafts"]]
        for i, drafts in enumerate(case["drafts"]):
            logits = golden.arrays[f"{case['name']}.draft{drafts['after_generated']}.logits"]
            assert (found.logits[0, i] - logits).abs().max() <= limit
            confidence = torch.tensor(drafts["confidence_logit"])
            assert (found.confidence_logits[0, i] - confidence).abs().max() <= 1e-3


def test_a_batch_of_packed_documents_gives_what_each_gives_alone(golden: Fixture) -> None:
    arch = golden.arch
    second = golden.cases["cases"][-1]["prompt_ids"]
    # The first document ends inside a tile: otherwise tiles alone would keep the two apart.
    first = second[: 2 * arch.sliding_window + 5]
    filled = first + [arch.pad_token_id] * (-len(first) % 8)
    ids, _ = padded(golden, filled + second)
    documents = torch.ones_like(ids)
    documents[0, : len(filled)] = 0
    packed = forward(golden, ids, documents).hidden[0]
    for prompt, start in ((first, 0), (second, len(filled))):
        alone = forward(golden, *padded(golden, prompt)).hidden[0, : len(prompt)]
        part = packed[start : start + len(prompt)]
        assert (part - alone).abs().max() <= 1e-3 * alone.abs().max()
