"""Environment variables: each one's effect, and that none is ignored."""

from __future__ import annotations

import logging

import pytest

from deepinfer.config import EngineConfig, load_config
from deepinfer.config.env import VARIABLES, read_environment, read_log_level
from deepinfer.config.fields import leaf_paths
from deepinfer.config.speculation import SpeculationMode
from deepinfer.device.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "text", "path", "value"),
    [
        ("DEEPINFER_BACKEND", "other", "backend.name", "other"),
        ("DEEPINFER_CHECKPOINT", "some/where", "checkpoint.path", "some/where"),
        ("DEEPINFER_NUMERICS", "Exact", "numerics", "exact"),
        ("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "150", "replay.keep_tokens", 150),
        ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "compact", "replay.mode", "bounded"),
        ("DEEPINFER_ENABLE_MTP_VARLEN", "1", "speculation.mode", "dynamic"),
        ("DEEPINFER_USE_NEXTN_DECODE", "3", "speculation.max_drafts", 3),
    ],
)
def test_variable_sets_its_path(name: str, text: str, path: str, value: object) -> None:
    assert read_environment({name: text}) == {path: (value, name)}


def test_every_variable_sets_a_field_that_exists() -> None:
    paths = {variable.path for variable in VARIABLES} - {None}
    assert paths <= set(leaf_paths(EngineConfig))


def test_switch_that_is_off_sets_nothing() -> None:
    assert read_environment({"DEEPINFER_ENABLE_MTP_VARLEN": "0"}) == {}


def test_variables_of_speculation_reach_the_configuration() -> None:
    env = {"DEEPINFER_ENABLE_MTP_VARLEN": "1", "DEEPINFER_USE_NEXTN_DECODE": "3"}
    speculation = load_config(env=env).speculation
    assert speculation.mode is SpeculationMode.DYNAMIC
    assert speculation.max_drafts == 3


def test_more_drafts_than_there_can_be_are_refused_with_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"max_drafts.*DEEPINFER_USE_NEXTN_DECODE.*from 1 to 8"):
        load_config(env={"DEEPINFER_USE_NEXTN_DECODE": "9"})


def test_unknown_variable_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"DEEPINFER_BACKND.*did you mean DEEPINFER_BACKEND\?"):
        load_config(env={"DEEPINFER_BACKND": "reference"})


def test_unknown_variable_without_a_near_one_lists_all() -> None:
    with pytest.raises(ConfigError, match="known are DEEPINFER_BACKEND"):
        read_environment({"DEEPINFER_XYZ": "1"})


def test_other_programs_variables_are_left_alone() -> None:
    assert read_environment({"PATH": "/bin", "MY_DEEPINFER_X": "1"}) == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DEEPINFER_BACKEND", ""),
        ("DEEPINFER_CHECKPOINT", " "),
        ("DEEPINFER_NUMERICS", "sim"),
        ("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "14O"),
        ("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "-1"),
        ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "1"),
        ("DEEPINFER_ENABLE_MTP_VARLEN", "yes"),
        ("DEEPINFER_USE_NEXTN_DECODE", "3.5"),
        ("DEEPINFER_LOG_LEVEL", "loud"),
    ],
)
def test_unreadable_text_is_an_error_with_name_and_value(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} = '{text}'.*expected"):
        load_config(env={name: text})


@pytest.mark.parametrize(
    ("text", "level"),
    [("debug", logging.DEBUG), ("INFO", logging.INFO), ("error", logging.ERROR)],
)
def test_log_level(text: str, level: int) -> None:
    assert read_log_level({"DEEPINFER_LOG_LEVEL": text}) == level


def test_log_level_is_no_configuration() -> None:
    assert read_environment({"DEEPINFER_LOG_LEVEL": "debug"}) == {}
    assert read_log_level({}) is None
