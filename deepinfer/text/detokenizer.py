"""Text from tokens that come one at a time, never splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class TokenSpelling(Protocol):
    """What is asked of a tokenizer here."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether a token steers the model and is not part of the text."""
        ...


class StreamDetokenizer:
    """Turns the tokens of one answer into pieces of text; the pieces joined are the text.

    A piece ends before a character whose bytes are not all there. Bytes that can no longer become
    a character are shown as U+FFFD. Nothing is added between tokens. Bytes still incomplete when
    the answer ends are dropped from the text; the token ids keep them.
    """

    def __init__(self, tokenizer: TokenSpelling, *, skip_special_tokens: bool = True) -> None:
        """Begin an answer.

        Args:
            tokenizer: gives the bytes of each token.
            skip_special_tokens: leave special tokens out instead of spelling them.
        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes, possibly empty."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def push_all(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete, as if pushed one after another, but cheaper."""
        spell, is_special = self._tokenizer.token_bytes, self._tokenizer.is_special
        if self._skip_special_tokens:
            token_ids = [token_id for token_id in token_ids if not is_special(token_id)]
        return self._decoder.decode(b"".join(map(spell, token_ids)))

    def flush(self) -> str:
        """End the answer: drops an incomplete character and returns "" (nothing else is held)."""
        self._decoder.reset()
        return ""


def decode_tokens(
    tokenizer: TokenSpelling, token_ids: Iterable[int], *, skip_special_tokens: bool
) -> str:
    """The text of tokens, by the rules of `StreamDetokenizer`."""
    detokenizer = StreamDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return detokenizer.push_all(token_ids) + detokenizer.flush()
