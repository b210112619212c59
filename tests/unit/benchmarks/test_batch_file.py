"""The file of requests that a batch run is measured with."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.batch_file import main, prompts, requests


def test_answers_are_of_all_lengths_and_the_same_each_time() -> None:
    first, again, other = (list(requests(400, 127, seed)) for seed in (1, 1, 2))
    assert first == again != other
    written = [json.loads(json.dumps(each)) for each in first]
    lengths = sorted(each["body"]["max_tokens"] for each in written)
    assert 1 <= lengths[0] < 10
    assert 117 < lengths[-1] <= 127
    # No lengths are left out, as where all places of a batch come free at once.
    assert 55 < lengths[200] < 73
    assert len(set(lengths)) > 100
    assert len({str(each["custom_id"]) for each in first}) == 400


def test_prompts_are_never_empty_and_hardly_repeat() -> None:
    found = list(islice(prompts(), 3000))
    assert all(each.strip() for each in found)
    assert len(set(found)) > 2700


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing" / "requests.jsonl"
    monkeypatch.setattr("sys.argv", ["batch_file", "--out", str(missing)])
    with pytest.raises(SystemExit):
        main()
    assert f"--out {missing} cannot be written" in capsys.readouterr().err
