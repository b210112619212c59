"""Text to token ids and back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from deepinfer.device.errors import CheckpointError, RequestError
from deepinfer.text.tokenizer import TextTokenizer

CHECKPOINT = Path(__file__).parents[2] / "data/golden/tiny_a/checkpoint"
BOS, EOS, USER = 0, 1, 316


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with the tokenizer files of a checkpoint, free to change."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(CHECKPOINT / name, tmp_path / name)
    return tmp_path


def _change(path: Path, **values: object) -> None:
    settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**settings, **values}), encoding="utf-8")


def test_special_ids_come_from_the_config(byte_tokenizer: TextTokenizer) -> None:
    assert byte_tokenizer.bos_token_id == BOS
    assert byte_tokenizer.eos_token_ids == (EOS,)
    assert byte_tokenizer.eos_token_id == EOS
    assert byte_tokenizer.pad_token_id == 2


def test_generation_config_wins_and_may_name_several_end_tokens(checkpoint: Path) -> None:
    _change(checkpoint / "generation_config.json", eos_token_id=[EOS, USER])
    assert TextTokenizer.from_directory(checkpoint).eos_token_ids == (EOS, USER)


def test_spellings_give_the_special_ids_when_no_config_does(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    tokenizer = TextTokenizer.from_directory(checkpoint)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (BOS, (EOS,))


def test_begin_token_is_added_once_when_the_checkpoint_says_so(checkpoint: Path) -> None:
    _change(checkpoint / "tokenizer_config.json", add_bos_token=True)
    tokenizer = TextTokenizer.from_directory(checkpoint)
    assert tokenizer.encode("a").count(BOS) == 1
    assert tokenizer.encode("<\uff5cbegin▁of▁sentence\uff5c>a") == tokenizer.encode("a")


def test_no_begin_token_without_being_asked(byte_tokenizer: TextTokenizer) -> None:
    assert BOS not in byte_tokenizer.encode("a")
    assert byte_tokenizer.encode("a", add_bos=True) == [BOS, *byte_tokenizer.encode("a")]


def test_missing_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        TextTokenizer.from_directory(tmp_path)


def test_damaged_tokenizer_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer file"):
        TextTokenizer.from_directory(checkpoint)


def test_tokenizer_that_is_not_byte_level_is_refused(checkpoint: Path) -> None:
    _change(checkpoint / "tokenizer.json", decoder={"type": "Fuse"})
    with pytest.raises(CheckpointError, match="'Fuse'; expected 'ByteLevel'"):
        TextTokenizer.from_directory(checkpoint)


def test_spelling_of_a_special_token_becomes_the_token(byte_tokenizer: TextTokenizer) -> None:
    assert byte_tokenizer.encode("<\uff5cUser\uff5c>") == [USER]


def test_half_a_surrogate_pair_is_refused_with_its_place(byte_tokenizer: TextTokenizer) -> None:
    with pytest.raises(RequestError, match=r"U\+D83D at character 1"):
        byte_tokenizer.encode("a\ud83d")


@given(text=st.text())
def test_text_survives_the_round_trip(byte_tokenizer: TextTokenizer, text: str) -> None:
    token_ids = byte_tokenizer.encode(text)
    assert byte_tokenizer.decode(token_ids, skip_special_tokens=False) == text


@given(token_ids=st.lists(st.integers(0, 319)), skip=st.booleans())
def test_decode_agrees_with_the_library_up_to_an_incomplete_tail(
    byte_tokenizer: TextTokenizer, token_ids: list[int], skip: bool
) -> None:
    library = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    text = byte_tokenizer.decode(token_ids, skip_special_tokens=skip)
    theirs = library.decode(token_ids, skip_special_tokens=skip)
    assert theirs.startswith(text)
    assert set(theirs[len(text) :]) <= {"\ufffd"}


def test_every_byte_is_some_token(byte_tokenizer: TextTokenizer) -> None:
    assert [byte_tokenizer.token_bytes(3 + byte) for byte in range(256)] == [
        bytes([byte]) for byte in range(256)
    ]


def test_bytes_of_an_added_token_are_its_spelling(byte_tokenizer: TextTokenizer) -> None:
    assert byte_tokenizer.token_bytes(USER) == "<\uff5cUser\uff5c>".encode()


def test_ids_that_pad_the_vocabulary_have_no_text(byte_tokenizer: TextTokenizer) -> None:
    assert byte_tokenizer.token_bytes(len(byte_tokenizer)) == b""


def test_negative_id_is_refused(byte_tokenizer: TextTokenizer) -> None:
    with pytest.raises(RequestError, match="token id -1"):
        byte_tokenizer.token_bytes(-1)


def test_name_of_part_of_a_character_shows_its_bytes(byte_tokenizer: TextTokenizer) -> None:
    assert byte_tokenizer.token_text(3 + 0xE4) == "bytes:\\xe4"
    assert byte_tokenizer.token_text(3 + ord("a")) == "a"
