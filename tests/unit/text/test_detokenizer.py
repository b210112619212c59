"""Text from tokens that come one at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.text.detokenizer import StreamDetokenizer
from deepinfer.text.tokenizer import TextTokenizer

EOS, USER, ASSISTANT = 1, 316, 317


def _byte_ids(data: bytes) -> list[int]:
    return [3 + byte for byte in data]


def _pieces(tokenizer: TextTokenizer, token_ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = StreamDetokenizer(tokenizer, skip_special_tokens=skip)
    return [detokenizer.push(token_id) for token_id in token_ids] + [detokenizer.flush()]


@pytest.mark.parametrize("character", ["é", "世", "🎉"])
def test_character_comes_whole_with_its_last_byte(
    byte_tokenizer: TextTokenizer, character: str
) -> None:
    data = character.encode()
    assert _pieces(byte_tokenizer, _byte_ids(data)) == [*[""] * (len(data) - 1), character, ""]


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_incomplete_end_is_left_out(byte_tokenizer: TextTokenizer, num_bytes: int) -> None:
    token_ids = _byte_ids(b"ok" + "🎉".encode()[:num_bytes])
    assert "".join(_pieces(byte_tokenizer, token_ids)) == "ok"


def test_invalid_byte_is_shown_at_once_and_text_goes_on(byte_tokenizer: TextTokenizer) -> None:
    assert _pieces(byte_tokenizer, _byte_ids(b"a\xffb")) == ["a", "\ufffd", "b", ""]


def test_byte_that_breaks_a_character_off_shows_one_mark(byte_tokenizer: TextTokenizer) -> None:
    assert _pieces(byte_tokenizer, _byte_ids(b"\xe4x")) == ["", "\ufffdx", ""]


def test_special_token_is_left_out_of_the_text(byte_tokenizer: TextTokenizer) -> None:
    assert "".join(_pieces(byte_tokenizer, [*_byte_ids(b"hi"), EOS])) == "hi"


def test_special_token_is_spelled_when_wanted(byte_tokenizer: TextTokenizer) -> None:
    pieces = _pieces(byte_tokenizer, [*_byte_ids(b"hi"), EOS], skip=False)
    assert "".join(pieces) == "hi<\uff5cend▁of▁sentence\uff5c>"


def test_no_blanks_are_invented_around_added_tokens(byte_tokenizer: TextTokenizer) -> None:
    token_ids = [USER, *_byte_ids(b"ok"), ASSISTANT, *_byte_ids(b"1")]
    pieces = _pieces(byte_tokenizer, token_ids, skip=False)
    assert "".join(pieces) == "<\uff5cUser\uff5c>ok<\uff5cAssistant\uff5c>1"


@given(token_ids=st.lists(st.integers(0, 325)), skip=st.booleans())
def test_pieces_joined_are_the_text(
    byte_tokenizer: TextTokenizer, token_ids: list[int], skip: bool
) -> None:
    pieces = _pieces(byte_tokenizer, token_ids, skip=skip)
    assert "".join(pieces) == byte_tokenizer.decode(token_ids, skip_special_tokens=skip)


@given(text=st.text())
def test_valid_text_never_shows_a_replacement_mark(
    byte_tokenizer: TextTokenizer, text: str
) -> None:
    pieces = _pieces(byte_tokenizer, _byte_ids(text.encode()))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
