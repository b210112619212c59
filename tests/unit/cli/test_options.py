"""Shared options and the configuration that they add up to."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import pytest

from deepinfer.cli.log import configure_logging
from deepinfer.cli.options import add_common_options, resolve_config
from deepinfer.config import load_config
from deepinfer.device.errors import ConfigError
from deepinfer.device.numerics import Numerics


def _parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_common_options(parser)
    return parser.parse_args(arguments)


def test_options_are_short_for_set() -> None:
    config = resolve_config(
        _parse("--backend", "other", "--checkpoint", "some/where", "--numerics", "exact")
    )
    assert config.backend.name == "other"
    assert config.checkpoint.path == Path("some/where")
    assert config.numerics is Numerics.EXACT


def test_files_and_sets_may_be_repeated() -> None:
    config = resolve_config(
        _parse(
            *("--config", "tiny/exact", "--config", "tiny/reference"),
            *("--set", "cache.num_blocks=5", "--set", "cache.num_blocks=6"),
        )
    )
    assert config.numerics is Numerics.NORMATIVE
    assert config.cache.num_blocks == 6


def test_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_BACKEND", "from_env")
    assert resolve_config(_parse()).backend.name == "from_env"


def test_bad_option_is_named_as_it_was_written() -> None:
    with pytest.raises(ConfigError, match=r"numerics = 'sim' \(from --numerics\)"):
        resolve_config(_parse("--numerics", "sim"))


def test_show_config_prints_what_reads_back_and_ends(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as end:
        resolve_config(_parse("--config", "tiny/exact", "--show-config"))
    assert end.value.code == 0
    file = tmp_path / "shown.yaml"
    file.write_text(capsys.readouterr().out)
    assert load_config([file]) == load_config(["tiny/exact"])


@pytest.mark.parametrize(
    ("verbosity", "env", "level"),
    [
        (0, {}, logging.INFO),
        (1, {}, logging.DEBUG),
        (5, {}, logging.DEBUG),
        (-1, {}, logging.WARNING),
        (-9, {}, logging.ERROR),
        (0, {"DEEPINFER_LOG_LEVEL": "error"}, logging.ERROR),
        (1, {"DEEPINFER_LOG_LEVEL": "error"}, logging.DEBUG),
    ],
)
def test_level_follows_options_then_environment(
    verbosity: int, env: dict[str, str], level: int
) -> None:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    try:
        configure_logging(verbosity=verbosity, env=env)
        assert root.level == level
    finally:
        root.setLevel(before[0])
        root.handlers[:] = before[1]


def test_other_packages_are_heard_from_warnings_on(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    try:
        configure_logging(verbosity=1, env={})
        configure_logging(verbosity=1, env={})  # twice does not say everything twice
        logging.getLogger("deepinfer_mine").debug("own detail")
        logging.getLogger("other").info("their detail")
        logging.getLogger("other").warning("their warning")
    finally:
        root.setLevel(before[0])
        root.handlers[:] = before[1]
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["DEBUG deepinfer_mine: own detail", "WARNING other: their warning"]
