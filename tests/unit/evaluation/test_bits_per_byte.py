"""Bits per byte: windows, counted bytes, and the figure from log probabilities."""

from __future__ import annotations

import math

import pytest

from deepinfer.engine.outputs import RequestOutput, TokenLogprob
from deepinfer.evaluation.bits_per_byte import BitsPerByte, windows
from deepinfer.evaluation.heldout import heldout_names, read_heldout
from deepinfer.model.controls import Controls
from deepinfer.text.tokenizer import TextTokenizer


@pytest.mark.parametrize("num_tokens", [2, 1024, 1025, 1536, 1537, 5000])
def test_windows_count_every_token_once_after_at_least_512(num_tokens: int) -> None:
    counted: list[int] = []
    for start, first, stop in windows(num_tokens):
        assert stop - start <= 1024
        assert start == 0 or first - start >= 512
        counted += range(first, stop)
    assert counted == list(range(1, num_tokens))


def test_later_windows_count_their_last_512_tokens() -> None:
    assert windows(2048) == [(0, 1, 1024), (512, 1024, 1536), (1024, 1536, 2048)]


@pytest.fixture(scope="module")
def job(tokenizer: TextTokenizer) -> BitsPerByte:
    return BitsPerByte(tokenizer, controls=Controls())


def _results(job: BitsPerByte, nats: float) -> list[RequestOutput]:
    """Every token but the first costs `nats`, the first of all would cost a fortune."""
    return [
        RequestOutput(
            "r",
            None,
            prompt,
            [],
            True,
            prompt_logprobs=[None] + [TokenLogprob(t, -nats, 1) for t in prompt[1:]],
        )
        for prompt in job.prompts
    ]


def test_texts_are_counted_in_whole(job: BitsPerByte) -> None:
    assert len(heldout_names()) == 9
    answers = job.answers(_results(job, 1.0))
    for name in heldout_names():
        size = sum(answer["bytes"] for answer in answers if answer["group"] == name)
        assert size == len(read_heldout(name).encode("utf-8"))


def test_score_is_bits_over_bytes(job: BitsPerByte, tokenizer: TextTokenizer) -> None:
    scores = {score.group: score for score in job.scores(_results(job, 2.0))}
    assert scores.keys() == set(heldout_names())
    for name, score in scores.items():
        text = read_heldout(name)
        num_tokens = len(tokenizer.encode(text))
        expected = num_tokens * 2.0 / math.log(2) / len(text.encode("utf-8"))
        assert score.value == pytest.approx(expected, rel=1e-12)
        assert score.standard_error is not None
        # The price is the same for all tokens; what varies is their length.
        assert 0 < score.standard_error < 0.1 * score.value


def test_limit_takes_the_first_windows_of_each_text(tokenizer: TextTokenizer) -> None:
    job = BitsPerByte(tokenizer, controls=Controls(), limit=2)
    assert len(job.prompts) == 18
    scores = job.scores(_results(job, 1.0))
    assert {score.num_items for score in scores} == {2}


def test_limit_changes_no_window(job: BitsPerByte, tokenizer: TextTokenizer) -> None:
    limited = BitsPerByte(tokenizer, controls=Controls(), limit=2)
    assert all(prompt in job.prompts for prompt in limited.prompts)
