"""Hash constants against published and golden values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepinfer.device.errors import CheckpointError
from deepinfer.model.config import V41Config
from deepinfer.model.engram_hash import (
    build_hash_constants,
    engram_multipliers,
    engram_primes,
    is_prime,
)


def test_primes_below_a_thousand_match_trial_division() -> None:
    slow = [n for n in range(1000) if n > 1 and all(n % d for d in range(2, n))]
    assert [n for n in range(1000) if is_prime(n)] == slow


@pytest.mark.parametrize("composite", [3215031751, 341550071728321, 2**62 - 1, 3037000493**2])
def test_strong_pseudoprimes_are_refused(composite: int) -> None:
    assert not is_prime(composite)


def test_largest_int64_prime_is_recognised() -> None:
    assert is_prime(2**63 - 25)


def test_flash_primes_are_the_published_ones(flash: V41Config) -> None:
    primes = engram_primes(2, 4, num_heads=8, start=flash.engram_vocab_size)
    assert primes[0][0][:3] == (16000057, 16000079, 16000081)
    assert (primes[0][2][7], primes[1][0][0]) == (16000463, 16000477)
    sums = tuple(sum(sum(order) for order in layer) for layer in primes)
    assert sums == flash.engram_num_embeddings


def test_flash_multipliers_are_the_published_ones(flash: V41Config) -> None:
    classes = flash.engram_compressed_vocab_size
    assert engram_multipliers(1, 4, num_classes=classes) == (
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    )
    assert engram_multipliers(14, 4, num_classes=classes) == (
        67716810739261,
        51510806800915,
        30921347202721,
        82619226485591,
    )


def test_products_stay_below_two_to_the_63() -> None:
    for classes in (2, 254, 99092):
        largest = max(engram_multipliers(1, 64, num_classes=classes))
        assert largest * (classes - 1) < 2**63


def test_golden_constants(golden: Path) -> None:
    config = V41Config.from_json(golden / "checkpoint")
    expected = json.loads((golden / "cases.json").read_text(encoding="utf-8"))["engram"]
    token_map = load_file(golden / "cases.safetensors")["engram_token_map"]
    constants = build_hash_constants(config, token_map)
    assert constants.primes.tolist() == expected["primes"]
    multipliers = [[int(text) for text in layer] for layer in expected["multipliers"]]
    assert constants.multipliers.tolist() == multipliers
    assert constants.pad_id == expected["pad_id"]


def test_offsets_place_columns_one_after_another(small: V41Config) -> None:
    token_map = torch.zeros(small.vocab_size, dtype=torch.int32)
    constants = build_hash_constants(small, token_map)
    flat, offsets = constants.primes.flatten(1), constants.offsets.flatten(1)
    assert offsets[:, 0].tolist() == [0, 0]
    assert torch.equal(offsets[:, 1:], offsets[:, :-1] + flat[:, :-1])
    assert constants.num_columns == small.num_hash_columns == 6


def test_without_engram_there_are_no_rows(small: V41Config) -> None:
    config = small.model_copy(update={"engram_layer_ids": ()})
    constants = build_hash_constants(config, torch.zeros(small.vocab_size, dtype=torch.int32))
    assert constants.multipliers.shape == (0, 4)


def test_map_of_another_vocabulary_is_refused(small: V41Config) -> None:
    with pytest.raises(CheckpointError, match=r"shape \(3,\), vocab_size is 320"):
        build_hash_constants(small, torch.zeros(3, dtype=torch.int32))
