"""Settings and small data of the training tests."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from deepinfer.evaluation.heldout import read_heldout
from deepinfer_training import fake_quant
from deepinfer_training.architecture import Architecture
from deepinfer_training.evaluation import Model
from deepinfer_training.natural_text import DOMAIN_SOURCES, INDEX_FILE, TOKENS_FILE
from deepinfer_training.parameters import Part, initial_parameters
from deepinfer_training.sequence_plan import Planner

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "checkpoints" / "tiny-v41"
CONFIGS = ROOT / "training" / "configs"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors here are too small to share between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of prepared data in miniature: the real tokenizer, every source the same text."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer = CHECKPOINT / "tokenizer.json"
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    words = sorted({word for word in read_heldout("prose_austen").split() if word.islower()})
    (folder / "words.json").write_text(json.dumps([w for w in words if w.isalpha()][:300]))
    definitions = {"island": ["noun", "land with water around it"], "run": ["verb", "move fast"]}
    (folder / "definitions.json").write_text(json.dumps(definitions))
    ids = Tokenizer.from_file(str(tokenizer)).encode(read_heldout("prose_melville")).ids[:4000]
    sources = [name for names in DOMAIN_SOURCES.values() for name in names]
    index = [[name, i * len(ids), len(ids), 0] for i, name in enumerate(sources)]
    (folder / INDEX_FILE).write_text(json.dumps(index))
    tokens = np.array(ids * len(sources), np.uint16)
    (folder / TOKENS_FILE).write_bytes(lzma.compress(tokens.tobytes(), preset=0))
    return folder


@pytest.fixture(scope="session")
def model() -> Model:
    """A random target in fp32."""
    arch = Architecture.from_json(CONFIGS / "smoke.json")
    parameters = {n: v.detach() for n, v in initial_parameters(arch, Part.BACKBONE, 1, CPU).items()}
    # Peaked enough that greedy drafts of an untrained drafter sometimes match.
    parameters["head.weight"] = parameters["embed.weight"] * 4
    planner = Planner(arch, torch.zeros(arch.vocab_size, dtype=torch.int64), CPU)
    return Model(parameters, arch, planner, fake_quant.FULL_PRECISION, CPU)
