"""Where prompts come from."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from deepinfer.cli.prompts import read_prompts
from deepinfer.device.errors import RequestError


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_arguments_come_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("two\n", encoding="utf-8")
    assert read_prompts(["one"], str(file)) == ["one", "two"]


def test_blank_lines_are_skipped_and_blanks_kept(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes(b"\xef\xbb\xbfone \r\n\n  two")
    assert read_prompts([], str(file)) == ["one ", "  two"]


def test_dash_is_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("three\n"))
    assert read_prompts(["one"], "-") == ["one", "three"]


def test_standard_input_is_read_when_nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert read_prompts([], None) == ["one", "two"]


def test_standard_input_is_left_alone_beside_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\n"))
    assert read_prompts(["one"], None) == ["one"]


def test_terminal_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", _Terminal("one\n"))
    with pytest.raises(RequestError, match="there is no prompt"):
        read_prompts([], None)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"--file .*absent"):
        read_prompts([], str(tmp_path / "absent"))


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(RequestError, match=r"'a\\udcff'"):
        read_prompts(["a\udcff"], None)
