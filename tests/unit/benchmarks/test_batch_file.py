"""The file of requests that a batch run is measured with."""

from __future__ import annotations

import json
from itertools import islice

from benchmarks.batch_file import prompts, requests


def test_answers_are_of_all_lengths_and_the_same_each_time() -> None:
    first, again, other = (list(requests(400, 127, seed)) for seed in (1, 1, 2))
    assert first == again != other
    lengths = [json.loads(json.dumps(each))["body"]["max_tokens"] for each in first]
    assert 1 <= min(lengths) < 10
    assert 117 < max(lengths) <= 127
    assert len({str(each["custom_id"]) for each in first}) == 400


def test_prompts_are_never_empty_and_hardly_repeat() -> None:
    found = list(islice(prompts(), 3000))
    assert all(each.strip() for each in found)
    assert len(set(found)) > 2700
