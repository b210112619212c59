"""What the configuration accepts, refuses and derives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from deepinfer.config import EngineConfig, load_config
from deepinfer.config.availability import LIMITS
from deepinfer.config.cache import parse_memory_size
from deepinfer.config.fields import leaf_paths
from deepinfer.config.replay import ReplayMode
from deepinfer.device.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("deploy=ep8", "single"),
        ("deploy=1p1d", "single"),
    ],
)
def test_known_feature_that_is_not_built_is_refused(setting: str, expected: str) -> None:
    path = setting.partition("=")[0]
    with pytest.raises(
        ConfigError, match=rf"^{path} = .*not available in this version.*expected '?{expected}"
    ):
        load_config((), [setting])


def test_deterministic_results_exclude_dynamic_speculation() -> None:
    settings = ["determinism=deterministic", "speculation.mode=dynamic"]
    with pytest.raises(ConfigError, match=r"dynamic exclude each other.*measured times"):
        load_config((), settings)
    load_config((), ["determinism=deterministic", "speculation.mode=fixed"])


def test_refusal_also_meets_configurations_made_in_python() -> None:
    with pytest.raises(ConfigError, match="not available in this version"):
        EngineConfig.model_validate({"deploy": "ep8"})


def test_limits_name_fields_that_exist_and_allow_the_default() -> None:
    assert {limit.path for limit in LIMITS} <= set(leaf_paths(EngineConfig))
    EngineConfig()


@pytest.mark.parametrize(
    "setting",
    [
        "cache.block_size=63",
        "cache.block_size=0",
        "cache.block_size=true",
        "cache.block_size='64'",
        "cache.block_size=64.0",
        "cache.memory=2 apples",
        "cache.memory=0",
        "cache.memory=0.1B",
        "cache.num_blocks=0",
        "cache.host_memory=-1",
        "cache.host_memory=much",
        "scheduler.async_depth=3",
        "scheduler.max_num_seqs=0",
        "deploy=ep0",
        "deploy=cluster",
        "backend.name=''",
        "backend.name=null",
        "checkpoint.path=''",
        "checkpoint.seed=-1",
        "checkpoint.random_weights=1",
        "replay.keep_tokens=0",
        "replay.rebuild=compact",
        "replay.publish_after_hit=maybe",
        "max_model_len=0",
        "numerics=EXACT",
        "sampling.temperature=-1",
        "sampling.temperatur=1",
    ],
)
def test_bad_value_is_refused_by_path(setting: str) -> None:
    path = setting.partition("=")[0]
    known = path if not path.startswith("sampling") else "sampling"
    with pytest.raises(ConfigError, match=f"^{known}"):
        load_config((), [setting])


def test_unknown_sampling_field_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'temperatur'.*'temperature'"):
        load_config((), ["sampling.temperatur=1"])


def test_step_holds_a_token_of_every_sequence() -> None:
    with pytest.raises(ConfigError, match="max_num_tokens 8 is below max_num_seqs 9"):
        load_config((), ["scheduler.max_num_seqs=9", "scheduler.max_num_tokens=8"])


@pytest.mark.parametrize(
    ("settings", "rebuild"),
    [
        ([], ReplayMode.EXACT),
        (["replay.mode=bounded"], ReplayMode.EXACT),
        (["replay.rebuild=bounded"], ReplayMode.BOUNDED),
    ],
)
def test_windows_are_rebuilt_exactly_unless_told_otherwise(
    settings: list[str], rebuild: ReplayMode
) -> None:
    """Also in mode bounded, where a cheap rebuild would let preemption change an answer."""
    assert load_config((), settings).replay.rebuild is rebuild


def test_chunk_fits_a_step() -> None:
    with pytest.raises(ConfigError, match="prefill_chunk_tokens 513 is above max_num_tokens 512"):
        load_config((), ["scheduler.prefill_chunk_tokens=513"])


def test_chunk_is_a_whole_step_by_default() -> None:
    assert load_config((), ["scheduler.max_num_tokens=100"]).scheduler.max_chunk_tokens == 100


def test_cache_has_one_size() -> None:
    with pytest.raises(ConfigError, match=r"memory '1GiB' and num_blocks 4"):
        load_config((), ["cache.memory=1GiB", "cache.num_blocks=4"])


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1B", 1),
        ("3KiB", 3072),
        ("1.5 MiB", 1572864),
        ("2gib", 2**31),
        ("1TiB", 2**40),
        ("2GB", 2 * 10**9),
    ],
)
def test_memory_size(text: str, size_bytes: int) -> None:
    assert parse_memory_size(text) == size_bytes


@pytest.mark.parametrize(
    ("setting", "size_bytes"), [("null", None), ("4096", 4096), ("1KiB", 1024)]
)
def test_memory_bytes(setting: str, size_bytes: int | None) -> None:
    assert load_config((), [f"cache.memory={setting}"]).cache.memory_bytes == size_bytes


def test_host_memory_is_for_the_prefix_cache() -> None:
    with pytest.raises(ConfigError, match=r"(?s)host_memory is '1GiB'.*set prefix to true"):
        load_config((), ["cache.host_memory=1GiB"])
    both = load_config((), ["cache.host_memory=1GiB", "cache.prefix=true"])
    assert both.cache.host_memory_bytes == 2**30
    assert EngineConfig().cache.host_memory_bytes == 0


def test_checkpoint_directory_is_the_path_given() -> None:
    config = load_config((), ["checkpoint.path=~/model"])
    assert config.checkpoint.directory == Path.home() / "model"


def test_configuration_cannot_be_changed() -> None:
    config: Any = EngineConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.cache.block_size = 2


def test_every_field_says_what_it_expects() -> None:
    for path in leaf_paths(EngineConfig):
        section: Any = EngineConfig
        *parents, name = path.split(".")
        for parent in parents:
            section = section.model_fields[parent].annotation
        assert section.model_fields[name].description, path
