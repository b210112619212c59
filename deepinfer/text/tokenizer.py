"""Text to token ids and back, from the tokenizer files of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from deepinfer.device.errors import CheckpointError, RequestError
from deepinfer.text.byte_alphabet import character_to_byte
from deepinfer.text.detokenizer import decode_tokens


class TextTokenizer:
    """A byte-level BPE tokenizer: every token stands for a fixed string of bytes.

    The literal spelling of a special token in a text is read as that token, which is what raw
    completions need: their prompts spell the chat format out. Text that comes from users of a
    chat must not be passed here unescaped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
        pad_token_id: int | None = None,
        add_bos: bool = False,
    ) -> None:
        """Wrap a loaded tokenizer.

        Args:
            tokenizer: byte-level BPE.
            bos_token_id: id that begins a sequence, None when the model has none.
            eos_token_ids: ids that end an answer, the main one first; may be empty.
            pad_token_id: id of padding, None when there is none.
            add_bos: whether `encode` puts the begin token first unless told otherwise.
        Raises:
            CheckpointError: the tokenizer is not byte-level.
        """
        self._tokenizer = tokenizer
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.pad_token_id = pad_token_id
        self.add_bos = add_bos
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._num_tokens = tokenizer.get_vocab_size(with_added_tokens=True)
        _require_byte_level(tokenizer)

    @classmethod
    def from_directory(cls, directory: Path) -> TextTokenizer:
        """The tokenizer of a checkpoint directory.

        Special ids come from generation_config.json, else config.json, else the spellings in
        tokenizer_config.json; `add_bos` from the latter's `add_bos_token`.

        Raises:
            CheckpointError: tokenizer.json is missing, or one of the files cannot be read.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"no tokenizer.json in {directory}; expected it beside the weights "
                "(a checkpoint without it can only be used with token ids)"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"{path} is not a tokenizer file: {error}") from error
        settings = _read_json(directory / "tokenizer_config.json")
        sources = (
            _read_json(directory / "generation_config.json"),
            _read_json(directory / "config.json"),
        )

        def special_ids(kind: str) -> list[int]:
            for source in sources:
                value = source.get(f"{kind}_token_id")
                if value is not None:
                    return list(value) if isinstance(value, list) else [value]
            spelling = settings.get(f"{kind}_token")
            if isinstance(spelling, dict):  # the older form holds the flags of the token too
                spelling = spelling.get("content")
            token_id = None if spelling is None else tokenizer.token_to_id(spelling)
            return [] if token_id is None else [token_id]

        return cls(
            tokenizer,
            bos_token_id=next(iter(special_ids("bos")), None),
            eos_token_ids=special_ids("eos"),
            pad_token_id=next(iter(special_ids("pad")), None),
            add_bos=bool(settings.get("add_bos_token", False)),
        )

    def __len__(self) -> int:
        """Number of tokens, added ones included; a model's vocabulary may be padded beyond it."""
        return self._num_tokens

    @property
    def eos_token_id(self) -> int | None:
        """The main end token, None when the model has none."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Token ids of a text; spellings of special tokens become those tokens.

        Args:
            text: any text that UTF-8 can hold.
            add_bos: put the begin token first unless the text already spells it; None = as the
                checkpoint's tokenizer_config.json says.
        Raises:
            RequestError: the text holds half of a surrogate pair, or a begin token is wanted and
                the model has none.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt has the code point U+{ord(text[error.start]):04X} at character "
                f"{error.start}; expected text without lone surrogates"
            ) from error
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not (self.add_bos if add_bos is None else add_bos):
            return token_ids
        if self.bos_token_id is None:
            raise RequestError("a begin token was asked for; this checkpoint names none")
        if token_ids[:1] == [self.bos_token_id]:
            return token_ids
        return [self.bos_token_id, *token_ids]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens, the same as streaming them would give.

        Invalid bytes become U+FFFD; a character that is incomplete at the end is left out.

        Args:
            token_ids: ids from 0.
            skip_special_tokens: leave special tokens out instead of spelling them.
        """
        return decode_tokens(self, token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for ids that only pad the vocabulary.

        Raises:
            RequestError: the id is negative.
        """
        known = self._bytes.get(token_id)
        if known is not None:
            return known
        if token_id < 0:
            raise RequestError(f"token id {token_id}; expected an id from 0")
        if token_id in self._added:
            spelled = self._added[token_id].encode("utf-8")
        else:
            name = self._tokenizer.id_to_token(token_id)
            alphabet = character_to_byte()
            spelled = b"" if name is None else bytes(alphabet[character] for character in name)
        self._bytes[token_id] = spelled
        return spelled

    def token_text(self, token_id: int) -> str:
        """Printable name of a token: its text, or "bytes:\\xe4\\xb8" for part of a character."""
        spelled = self.token_bytes(token_id)
        try:
            return spelled.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def is_special(self, token_id: int) -> bool:
        """Whether a token steers the model and is not part of the text."""
        return token_id in self.special_token_ids


def _require_byte_level(tokenizer: Tokenizer) -> None:
    description = json.loads(tokenizer.to_str())
    decoder = (description.get("decoder") or {}).get("type")
    if decoder != "ByteLevel":
        raise CheckpointError(
            f"tokenizer decoder is {decoder!r}; expected 'ByteLevel', the kind that every model of "
            "this family has"
        )


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file, empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}; expected a JSON object")
    return value
