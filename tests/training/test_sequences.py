"""Training data: reproducible, disjoint splits, right answers, whole documents."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from deepinfer.device.errors import ConfigError
from deepinfer_training.natural_text import NaturalText
from deepinfer_training.sequences import DOMAINS, SHARES, SequenceSource, Split, document_rng
from deepinfer_training.tasks import COPY_LENGTHS, RECALL_DISTANCES, Tasks

PAD, EOS = 2, 1


@pytest.fixture(scope="module")
def source(data: Path) -> SequenceSource:
    return SequenceSource(data, PAD)


@pytest.fixture(scope="module")
def tasks(source: SequenceSource) -> Tasks:
    import deepinfer.evaluation.heldout as heldout

    return Tasks(source.generators, heldout.HELDOUT_FOLDER, Split.CONFORMANCE, seed=1)


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_sequence_is_a_function_of_split_seed_and_index(
    source: SequenceSource, domain: str
) -> None:
    first, again, other_seed, other_split = (
        source.sequence(split, seed, 3, 256, domain)
        for split, seed in [(Split.TRAIN, 1), (Split.TRAIN, 1), (Split.TRAIN, 2), (Split.DEV, 1)]
    )
    assert np.array_equal(first.ids, again.ids)
    assert not np.array_equal(first.ids, other_seed.ids)
    assert not np.array_equal(first.ids, other_split.ids)


def test_seeds_outside_their_range_are_refused() -> None:
    for seed, index in ((1 << 20, 0), (0, 0), (1, 1 << 40)):
        with pytest.raises(ValueError, match="leaves its split's range"):
            document_rng(Split.TRAIN, seed, index)
    # The largest of one split lies below the smallest of the next.
    assert ((1 << 20) - 1 << 40) + (1 << 40) - 1 < 1 << 60


def test_documents_start_at_multiples_of_eight_and_padding_weighs_nothing(
    source: SequenceSource,
) -> None:
    for domain in ("tales", "copy", "arithmetic", "json", "dialogue"):
        batch = source.batch(Split.TRAIN, 1, 0, 4, 256, domain)
        for ids, documents, weights in zip(batch.ids, batch.documents, batch.weights, strict=True):
            starts = np.flatnonzero(np.diff(documents)) + 1
            assert len(starts)
            assert not (starts % 8).any()
            # What is left over at the end is one more run, of padding.
            assert set(ids[starts].tolist()) <= {source.generators.text.bos, PAD}
            assert not weights[ids == PAD].any()


def test_answers_of_sums_and_objects_are_right(source: SequenceSource) -> None:
    text = source.generators.text
    sums = 0
    for index in range(20):
        spoken = text.decode(source.generators.arithmetic(document_rng(Split.DEV, 1, index)).ids)
        for a, sign, b, result in re.findall(r"</think>(\d+) ([+-]) (\d+) = (\d+)\.", spoken):
            assert int(result) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
            sums += 1
        document = source.generators.json(document_rng(Split.DEV, 1, index))
        question, answer = text.decode(document.ids).split("</think>")
        content = json.loads(answer.removesuffix(text.decode([EOS])))
        for key, value in content.items():
            spoken_value = " ".join(value) if isinstance(value, list) else str(value)
            assert f"{key} {spoken_value}".lower() in question.lower()
    assert sums >= 40


def test_recall_questions_ask_for_a_fact_that_was_stated(source: SequenceSource) -> None:
    text = source.generators.text
    unknown = found = 0
    for index in range(12):
        document = source.generators.recall(document_rng(Split.TRAIN, 1, index), 512)
        assert 400 < len(document.ids) <= 512
        spoken = text.decode(document.ids)
        facts = dict(re.findall(r"The code of ([^.?\n]+?) is (\w+)\.", spoken))
        for name, answer in re.findall(r"the code of (.+?)\?\nAnswer: (\w+)\.", spoken):
            if answer == "unknown":
                assert name not in facts
                unknown += 1
            else:
                assert facts[name] == answer
                found += 1
    assert found > 10
    assert unknown < found


@pytest.mark.parametrize("distance", RECALL_DISTANCES)
def test_recall_tasks_keep_their_distance(tasks: Tasks, distance: int) -> None:
    text = tasks._make.text
    for item in tasks.recall(distance, 4):
        spoken = text.decode(item.ids[: item.start])
        answer = text.decode(item.ids[item.start : item.stop]).strip()
        name = spoken.rsplit("code of ", 1)[1].split("?")[0]
        fact = f"The code of {name} is {answer}."
        assert spoken.count(fact) == 1
        between = spoken.split(fact + "\n")[1].rsplit("\nQuestion:", 1)[0]
        # Tokens may merge over the cuts when the text is encoded again.
        assert abs(len(text.encode(between)) - distance) <= 2 + distance // 20
        assert len(item.ids) <= 1024


def test_copy_tasks_repeat_their_words(tasks: Tasks) -> None:
    text = tasks._make.text
    for length in COPY_LENGTHS:
        (item,) = tasks.copy(length, 1)
        question = text.decode(item.ids[: item.start])
        answer = text.decode(item.ids[item.start : item.stop - 1])
        assert len(answer.split()) == length
        assert f"Repeat exactly: {answer}" in question
        assert item.ids[item.stop - 1] == EOS


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokens\.u16\.xz is missing"):
        NaturalText(tmp_path)


def test_shares_are_percentages() -> None:
    assert sum(SHARES.values()) == pytest.approx(100.0)
