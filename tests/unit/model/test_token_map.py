"""The Engram token map against golden values, and its refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from deepinfer.device.errors import CheckpointError
from deepinfer.model.config import V41Config
from deepinfer.model.token_map import build_token_map, check_token_map, load_token_map


def _tokenizer(*tokens: str) -> Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    return Tokenizer(models.WordLevel(vocab, unk_token=tokens[0]))


def test_golden_map(golden: Path) -> None:
    config = V41Config.from_json(golden / "checkpoint")
    expected = load_file(golden / "cases.safetensors")["engram_token_map"]
    assert torch.equal(load_token_map(golden / "checkpoint", config), expected)


@pytest.mark.parametrize(
    "pair",
    [("The", "the"), ("é", "e"), ("ﬁ", "fi"), (" a", "a"), ("a \t\n b", "a b"), ("\n", " ")],
)
def test_tokens_that_read_alike_share_a_class(pair: tuple[str, str]) -> None:
    assert build_token_map(_tokenizer(*pair), 2, num_classes=1).tolist() == [0, 0]


@pytest.mark.parametrize("pair", [(" ", "a"), ("a", "b"), ("a b", "ab"), ("1", "2")])
def test_tokens_that_differ_keep_their_classes(pair: tuple[str, str]) -> None:
    assert build_token_map(_tokenizer(*pair), 2, num_classes=2).tolist() == [0, 1]


def test_broken_character_keeps_its_raw_token() -> None:
    tokens = ("\ufffd", "\ufffdA", "\ufffda")
    assert build_token_map(_tokenizer(*tokens), 3, num_classes=3).tolist() == [0, 1, 2]


def test_classes_are_numbered_by_first_appearance() -> None:
    token_map = build_token_map(_tokenizer("b", "a", "B", "c"), 4, num_classes=3)
    assert token_map.dtype == torch.int32
    assert token_map.tolist() == [0, 1, 0, 2]


def test_other_number_of_classes_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"gives 2 .* engram_compressed_vocab_size is 3"):
        build_token_map(_tokenizer("a", "b"), 2, num_classes=3)


def test_id_without_token_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no token with id 2, vocab_size is 3"):
        build_token_map(_tokenizer("a", "b"), 3, num_classes=2)


def test_missing_tokenizer_is_named(tmp_path: Path, small: V41Config) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer.json is missing; Engram layers \[1, 4\]"):
        load_token_map(tmp_path, small)


def test_no_tokenizer_is_needed_without_engram(tmp_path: Path, small: V41Config) -> None:
    config = small.model_copy(update={"engram_layer_ids": ()})
    assert load_token_map(tmp_path, config).shape == (320,)


def test_injected_map_is_checked(small: V41Config) -> None:
    good = (torch.arange(320) // 4).int()
    assert check_token_map(good, small) is good
    with pytest.raises(CheckpointError, match=r"ids 0 .. 319, expected 0 .. 253"):
        check_token_map(torch.arange(320).int(), small)
    with pytest.raises(CheckpointError, match=r"torch.int64 \(320,\)"):
        check_token_map(torch.arange(320), small)
