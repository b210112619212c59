"""Whole generations through the emulation give the reference's greedy tokens by the margin rule.

Where the reference's best two logits are further apart than the bound, the token has to be the
same. The bound is measured: the largest change of a logit when one bf16 rounding in a thousand of
the reference's own residual streams goes the other way. Sums in another order do that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from deepinfer.api import LLM
from deepinfer.config import EngineConfig, bundled_checkpoint, override
from deepinfer.device.backend import Backend
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.registry import load_backend
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.model.loading import load_model
from deepinfer.model.trace_run import trace_tokens

PROMPTS = ("The rain had stopped and", "Once upon a time there was a", "1, 2, 3, 5, 8,")
NUM_TOKENS = 24
FLIPPED_SHARE = 1e-3
REFERENCE = ("reference", {"runtime": "inline"})
EMULATED = ("ascend950", {"emulated": True})


class Answer(NamedTuple):
    prompt_ids: list[int]
    token_ids: list[int]


def _backend(name: str, options: Mapping[str, object]) -> Backend:
    return load_backend(BackendConfig(name, Numerics.NORMATIVE, options))


def _answers(name: str, options: Mapping[str, object]) -> list[Answer]:
    """Greedy answers of the engine, all prompts in one batch."""
    overrides = {"backend.name": name, "backend.options": options, "max_model_len": 128}
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(override(EngineConfig(), overrides)) as llm:
        results = llm.generate(list(PROMPTS), params)
    return [Answer(r.prompt_token_ids, r.outputs[0].token_ids) for r in results]


def _logits(backend: Backend, answers: list[Answer]) -> list[Tensor]:
    """[NUM_TOKENS, V] logits from which each answer's tokens follow."""
    loaded = load_model(bundled_checkpoint(), backend, max_positions=128)
    found = []
    for prompt_ids, token_ids in answers:
        logits = trace_tokens(loaded, backend, [*prompt_ids, *token_ids])["logits"]
        found.append(logits[len(prompt_ids) - 1 : -1])
    backend.close()
    return found


def _nudged_reference(seed: int) -> Backend:
    """The reference, with a few bf16 values of the residual streams moved to their neighbours."""
    backend = _backend(*REFERENCE)
    entry = backend.ops._implementations["mhc_expand"]
    generator = torch.Generator().manual_seed(seed)

    def expand(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        streams: Tensor = entry.function(*args, **kwargs).contiguous()
        up = torch.rand(streams.shape, generator=generator) < FLIPPED_SHARE / 2
        down = torch.rand(streams.shape, generator=generator) < FLIPPED_SHARE / 2
        codes = streams.view(torch.int16) + up.short() - down.short()
        return codes.view(torch.bfloat16)

    changed = type(entry)(expand, entry.label, entry.reason, entry.layout)
    backend.ops._implementations["mhc_expand"] = changed
    return backend


class Compared(NamedTuple):
    answers: list[Answer]
    reference: list[Tensor]
    emulated: list[Tensor]
    bound: float


@pytest.fixture(scope="module")
def compared() -> Compared:
    answers = _answers(*REFERENCE)
    reference = _logits(_backend(*REFERENCE), answers)
    nudged = [_logits(_nudged_reference(seed), answers) for seed in range(3)]
    changes = [
        (row - other).abs().max()
        for logits in nudged
        for row, other in zip(reference, logits, strict=True)
    ]
    emulated = _logits(_backend(*EMULATED), answers)
    return Compared(answers, reference, emulated, float(max(changes)))


def _margins(logits: Tensor) -> Tensor:
    best = logits.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def test_logits_differ_no_more_than_flipped_roundings_make_them(compared: Compared) -> None:
    for reference, emulated in zip(compared.reference, compared.emulated, strict=True):
        assert (reference - emulated).abs().max() <= compared.bound


def test_tokens_are_the_references_where_the_margin_decides(compared: Compared) -> None:
    decided = 0
    for reference, emulated in zip(compared.reference, compared.emulated, strict=True):
        sure = _margins(reference) > compared.bound
        decided += int(sure.sum())
        assert torch.equal(reference.argmax(-1)[sure], emulated.argmax(-1)[sure])
    assert decided >= NUM_TOKENS  # of three times as many


def test_whole_generations_agree_up_to_the_first_open_margin(compared: Compared) -> None:
    emulated = _answers(*EMULATED)
    for expected, found, logits in zip(compared.answers, emulated, compared.reference, strict=True):
        open_at = (_margins(logits) <= compared.bound).nonzero().flatten().tolist()
        differs = [
            place
            for place, (one, other) in enumerate(
                zip(expected.token_ids, found.token_ids, strict=True)
            )
            if one != other
        ]
        assert not differs or differs[0] in open_at


def test_the_rule_notices_a_wrong_op(compared: Compared) -> None:
    """A backend whose experts are mixed up is not within the bound."""
    backend = _backend(*EMULATED)
    entry = backend.ops._implementations["moe_gate"]

    def shifted(*args: Any, **kwargs: Any) -> object:  # noqa: ANN401
        routing = entry.function(*args, **kwargs)
        return routing._replace(ids=routing.ids.flip(1))

    wrong = type(entry)(shifted, entry.label, entry.reason, entry.layout)
    backend.ops._implementations["moe_gate"] = wrong
    logits = _logits(backend, compared.answers)
    changes = [
        float((row - other).abs().max())
        for row, other in zip(compared.reference, logits, strict=True)
    ]
    assert max(changes) > compared.bound


def test_emulated_answers_are_marked_as_emulated() -> None:
    backend = _backend(*EMULATED)
    assert "emulating" in backend.ops.device
    overrides = {"backend.name": backend.name, "backend.options": EMULATED[1], "max_model_len": 64}
    with LLM(override(EngineConfig(), overrides)) as llm:
        (answer,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=1))
    assert answer.marks == ("emulated",)
    backend.close()
