"""Decode steps replayed by tier give the tokens and logprobs of steps issued one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.config import EngineConfig, override
from deepinfer.device.backend import DECODE_GRAPHS
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.engine.outputs import RequestOutput
from deepinfer_reference.backend import ReferenceBackend

GOLDEN = Path(__file__).parents[2] / "data/golden/tiny_a"


class Replaying(ReferenceBackend):
    """The reference, with decode steps padded to tiers and replayed."""

    features = ReferenceBackend.features | {DECODE_GRAPHS}


def answers(
    backend: ReferenceBackend,
    numerics: Numerics,
    async_depth: int,
    *,
    max_drafts: int = 0,
) -> list[RequestOutput]:
    """Seven requests of different lengths, so that the batch shrinks through several tiers."""
    config = override(
        EngineConfig(),
        {
            "checkpoint.path": str(GOLDEN / "checkpoint"),
            "speculation.mode": "fixed" if max_drafts else "off",
            "speculation.max_drafts": max_drafts or None,
            "numerics": numerics.value,
            "max_model_len": 256,
            "scheduler.max_num_seqs": 8,
            "scheduler.async_depth": async_depth,
            "cache.block_size": 16,
        },
    )
    cases = json.loads((GOLDEN / "cases.json").read_text())["cases"]
    prompts = [case["prompt_ids"] for case in cases[:7]]
    params = [
        SamplingParams(
            max_tokens=4 + 3 * number, temperature=0.8 * (number % 2), seed=number, logprobs=2,
            ignore_eos=True, detokenize=False,
        )
        for number in range(len(prompts))
    ]  # fmt: skip
    with LLM(config, backend=backend) as llm:
        return llm.generate(prompts, params)


@pytest.mark.parametrize(
    ("numerics", "async_depth"),
    [(Numerics.EXACT, 0), (Numerics.EXACT, 1), (Numerics.EXACT, 2), (Numerics.NORMATIVE, 1)],
)
def test_replayed_steps_change_no_token(numerics: Numerics, async_depth: int) -> None:
    """With steps in flight, a graph is filled with inputs that were corrected on the device."""
    config = BackendConfig("reference", numerics, {"runtime": "inline"})
    plain = answers(ReferenceBackend(config), numerics, 0)
    replayed = answers(Replaying(config), numerics, async_depth)
    for own, expected in zip(replayed, plain, strict=True):
        assert own.outputs[0].token_ids == expected.outputs[0].token_ids
        assert own.outputs[0].logprobs == expected.outputs[0].logprobs


@pytest.mark.parametrize("numerics", Numerics)
def test_replayed_verifications_and_drafts_change_no_token(numerics: Numerics) -> None:
    """Seeded answers, too: their drafts are drawn and judged by the same random numbers."""
    config = BackendConfig("reference", numerics, {"runtime": "inline"})
    plain = answers(ReferenceBackend(config), numerics, 1, max_drafts=3)
    replayed = answers(Replaying(config), numerics, 1, max_drafts=3)
    for own, expected in zip(replayed, plain, strict=True):
        assert own.outputs[0].token_ids == expected.outputs[0].token_ids
        assert own.outputs[0].logprobs == expected.outputs[0].logprobs
