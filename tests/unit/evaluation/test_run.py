"""Planning and running jobs, on the bundled checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from deepinfer.config import EngineConfig, override
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.errors import ConfigError, RequestError
from deepinfer.device.numerics import Numerics
from deepinfer.device.registry import load_backend
from deepinfer.evaluation import heldout, items
from deepinfer.evaluation.heldout import read_heldout
from deepinfer.evaluation.job import Job
from deepinfer.evaluation.run import EvaluationProgress, all_tasks, evaluate, plan_jobs
from deepinfer.model.controls import Controls
from deepinfer.model.loading import load_model
from deepinfer.model.trace_run import trace_tokens
from deepinfer.text.tokenizer import TextTokenizer


def test_jobs_are_the_tasks_then_their_controls() -> None:
    jobs = plan_jobs(EngineConfig(), all_tasks(), limit=1)
    names = [(job.task, *job.controls.marks) for job in jobs]
    assert names == [
        ("bpb",),
        ("add",),
        ("copy",),
        ("define",),
        ("json",),
        ("recall",),
        ("turns",),
        ("define", "engram_zero"),
        ("recall", "selections_none"),
        ("recall", "selections_random"),
    ]
    alone = plan_jobs(EngineConfig(), ["recall"], limit=1, with_controls=False)
    assert [job.controls for job in alone] == [Controls()]


def test_unknown_task_is_named() -> None:
    with pytest.raises(ConfigError, match="tasks are recall,sums; expected some of bpb,add"):
        plan_jobs(EngineConfig(), ["recall", "sums"])


def test_configured_control_is_refused() -> None:
    config = override(EngineConfig(), {"measurement.selections": "none"})
    with pytest.raises(ConfigError, match="measurement is selections_none"):
        plan_jobs(config, ["add"])


class _Counted(EvaluationProgress):
    num_jobs = num_requests = num_tokens = 0

    def begin(self, jobs: Sequence[Job]) -> None:
        self.num_jobs = len(jobs)

    def advance(self, job: Job, num_tokens: int) -> None:
        self.num_requests += 1
        self.num_tokens += num_tokens


def test_trained_checkpoint_recalls_with_selections_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (items.TASKS_FOLDER / "recall.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["group"] == "128"]
    (tmp_path / "recall.jsonl").write_text("".join(kept))
    monkeypatch.setattr(items, "TASKS_FOLDER", tmp_path)
    jobs = plan_jobs(EngineConfig(), ["recall"], limit=4)
    progress = _Counted()
    evaluation = evaluate(EngineConfig(), jobs, progress)
    shares = {score.control: score.value for score in evaluation.scores}
    assert shares[""] >= 0.75
    assert shares["selections_none"] == 0.0
    assert shares["selections_random"] <= 0.5
    assert progress.num_jobs == 3
    assert progress.num_requests == len(evaluation.answers)
    assert progress.num_tokens == evaluation.num_tokens
    assert evaluation.marks == ()


def test_bits_per_byte_are_those_of_the_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: TextTokenizer
) -> None:
    text = read_heldout("prose_austen")[:300]
    (tmp_path / "short_text.txt").write_text(text)
    monkeypatch.setattr(heldout, "HELDOUT_FOLDER", tmp_path)
    config = override(EngineConfig(), {"numerics": "exact"})
    (score,) = evaluate(config, plan_jobs(config, ["bpb"])).scores
    assert tokenizer.bos_token_id is not None
    ids = [tokenizer.bos_token_id, *tokenizer.encode(text)]
    backend = load_backend(BackendConfig("reference", Numerics.EXACT))
    loaded = load_model(config.checkpoint.directory, backend, max_positions=128)
    logits = trace_tokens(loaded, backend, ids)["logits"].double()
    backend.close()
    nats = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="sum")
    assert score.value == pytest.approx(float(nats) / math.log(2) / 300, rel=1e-5)


def test_failed_request_gives_no_score() -> None:
    config = override(EngineConfig(), {"max_model_len": 64})
    jobs = plan_jobs(config, ["recall"], limit=1, with_controls=False)
    with pytest.raises(RequestError, match="task recall: a request failed"):
        evaluate(config, jobs)
