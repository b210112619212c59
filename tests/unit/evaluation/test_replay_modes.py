"""Answers of both replay modes, compared question by question."""

from __future__ import annotations

import math

from deepinfer.evaluation.replay_modes import differences


def test_changes_are_counted_by_question() -> None:
    def answers(*texts: str) -> list[dict[str, object]]:
        return [
            {
                "task": "recall", "group": "48", "num_prompt_tokens": 30 + 10 * i,
                "answer": text, "exact": text == "right",
            }
            for i, text in enumerate(texts)
        ]  # fmt: skip

    (found,) = differences(
        answers("right", "right", "wrong", "wrong", "wrong"),
        answers("right", "wrong", "right", "other", "wrong"),
        keep_tokens=40,
    )
    assert (found.task, found.group, found.num_items, found.num_cut) == ("recall", "48", 5, 3)
    assert (found.exact_share, found.bounded_share) == (0.4, 0.4)
    assert (found.num_changed, found.num_lost, found.num_gained) == (3, 1, 1)
    assert found.difference_error == math.sqrt(3) / 5
