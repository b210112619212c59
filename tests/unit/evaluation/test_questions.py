"""Grading: what counts as exact, JSON by value, groups under controls."""

from __future__ import annotations

import pytest

from deepinfer.engine.outputs import CompletionOutput, FinishReason, RequestOutput
from deepinfer.evaluation.questions import Questions
from deepinfer.model.controls import Controls, Selections
from deepinfer.text.tokenizer import TextTokenizer


def _results(
    job: Questions, answers: list[str], reason: FinishReason = FinishReason.STOP
) -> list[RequestOutput]:
    return [
        RequestOutput("r", None, prompt, [CompletionOutput(0, [1], text, None, reason)], True)
        for prompt, text in zip(job.prompts, answers, strict=True)
    ]


@pytest.fixture(scope="module")
def sums(tokenizer: TextTokenizer) -> Questions:
    return Questions("add", tokenizer, controls=Controls(), limit=2)


def _right(job: Questions) -> list[str]:
    blank = _results(job, [""] * len(job.prompts))
    return [answer["expected"] for answer in job.answers(blank)]


def test_right_answers_are_exact(sums: Questions) -> None:
    scores = sums.scores(_results(sums, _right(sums)))
    assert [(score.group, score.metric, score.value) for score in scores] == [
        ("2digit", "exact", 1.0),
        ("3digit", "exact", 1.0),
    ]


def test_more_less_or_unended_text_is_not_exact(sums: Questions) -> None:
    right = _right(sums)
    for wrong in ([text + " " for text in right], [text[:-1] for text in right]):
        assert {score.value for score in sums.scores(_results(sums, wrong))} == {0.0}
    unended = _results(sums, right, FinishReason.LENGTH)
    assert {score.value for score in sums.scores(unended)} == {0.0}


def test_json_is_judged_by_text_value_and_form(tokenizer: TextTokenizer) -> None:
    job = Questions("json", tokenizer, controls=Controls(), limit=4)
    right = _right(job)
    answers = [right[0], right[1].replace(": ", ":"), '{"other": 1}', "{"]
    scores = {s.metric: s.value for s in job.scores(_results(job, answers))}
    assert scores == {"exact": 0.25, "values": 0.5, "parses": 0.75}


def test_selections_control_leaves_near_distances_out(tokenizer: TextTokenizer) -> None:
    control = Controls(selections=Selections.NONE)
    job = Questions("recall", tokenizer, controls=control, limit=1)
    scores = job.scores(_results(job, [""] * len(job.prompts)))
    assert [score.group for score in scores] == ["48", "128", "256", "512", "960"]
    assert {score.control for score in scores} == {"selections_none"}
