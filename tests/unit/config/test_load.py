"""Sources of configuration: their order, and what they are told when they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.config import Assignment, EngineConfig, dump, load_config, override
from deepinfer.device.errors import ConfigError
from deepinfer.device.numerics import Determinism, Numerics


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_given_is_the_default() -> None:
    assert load_config() == EngineConfig()


def test_later_file_overrides_key_by_key(tmp_path: Path) -> None:
    first = _write(tmp_path / "a.yaml", "cache: {block_size: 32, num_blocks: 7}\n")
    second = _write(tmp_path / "b.yaml", "cache:\n  block_size: 16\n")
    config = load_config([first, second])
    assert (config.cache.block_size, config.cache.num_blocks) == (16, 7)


def test_environment_overrides_files(tmp_path: Path) -> None:
    file = _write(tmp_path / "a.yaml", "replay: {keep_tokens: 150}\n")
    config = load_config([file], env={"DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "160"})
    assert config.replay.keep_tokens == 160


def test_set_overrides_environment() -> None:
    env = {"DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "160"}
    assert load_config((), ["replay.keep_tokens=170"], env).replay.keep_tokens == 170


def test_later_set_overrides_earlier() -> None:
    assert load_config((), ["max_model_len=5", "max_model_len=null"]).max_model_len is None


def test_dedicated_option_overrides_set() -> None:
    option = Assignment("backend.name", "other", "--backend")
    assert load_config((), ["backend.name=mine"], options=[option]).backend.name == "other"


def test_option_value_is_text_and_not_yaml() -> None:
    option = Assignment("backend.name", "123", "--backend")
    assert load_config(options=[option]).backend.name == "123"


@pytest.mark.parametrize("word", ["off", "batch_invariant", "deterministic"])
def test_words_of_old_yaml_are_words(word: str) -> None:
    assert load_config((), [f"determinism={word}"]).determinism is Determinism(word)


def test_set_takes_lists_and_mappings() -> None:
    config = load_config((), ["backend.options.fallback=[a, b]", "backend.options.x={y: 1}"])
    assert config.backend.options == {"fallback": ["a", "b"], "x": {"y": 1}}


def test_mapping_replaces_a_plain_value_below_it() -> None:
    config = load_config((), ["backend.options.x=1", "backend.options.x.y=2"])
    assert config.backend.options == {"x": {"y": 2}}


def test_unknown_key_names_nearest_and_source() -> None:
    with pytest.raises(ConfigError, match=r"cache\.blok_size \(from --set .*cache\.block_size\?"):
        load_config((), ["cache.blok_size=32"])


def test_unknown_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = _write(tmp_path / "mine.yaml", "cache: {blok_size: 32}\n")
    with pytest.raises(ConfigError, match=r"cache\.blok_size \(from .*mine\.yaml\)"):
        load_config([file])


def test_key_of_another_section_is_found() -> None:
    with pytest.raises(ConfigError, match=r"did you mean scheduler\.max_num_seqs\?"):
        load_config((), ["cache.max_num_seqs=32"])


def test_bad_value_names_path_value_source_and_expectation() -> None:
    with pytest.raises(
        ConfigError, match=r"numerics = 'exat' \(from --set numerics=exat\).*exact or normative"
    ):
        load_config((), ["numerics=exat"])


def test_source_of_a_bad_value_is_the_one_that_won(tmp_path: Path) -> None:
    file = _write(tmp_path / "a.yaml", "cache: {block_size: 3}\n")
    with pytest.raises(ConfigError) as caught:
        load_config([file], ["cache.block_size=5"])
    assert "--set cache.block_size=5" in str(caught.value)
    assert "a.yaml" not in str(caught.value)


def test_environment_is_named_as_source() -> None:
    with pytest.raises(ConfigError, match=r"replay\.keep_tokens = 0 .*DEEPINFER_YOCO_PREFILL_KEEP"):
        load_config(env={"DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "0"})


def test_every_bad_field_is_listed_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config((), ["cache.memory=[1]", "max_model_len=0"])
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("text", ["cache.block_size", "=3", "a..b=3", "a b=3"])
def test_malformed_assignment_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no assignment"):
        load_config((), [text])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("cache: {block_size: 2}\ncache: {prefix: false}\n", "line 2.*appears twice"),
        ("cache: [\n", "expected YAML"),
        ("- 1\n", "holds a list"),
        ("7: {}\n", "key 7 .* is no name"),
        ("text_config: {}\n", "describes a model"),
        ("cache: 5\n", "is not a section"),
    ],
)
def test_bad_file_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config([_write(tmp_path / "a.yaml", text)])


def test_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config([path])


def test_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load_config([_write(tmp_path / "a.yaml", "# nothing\n")]) == EngineConfig()


def test_dump_reads_back(tmp_path: Path) -> None:
    config = load_config(
        (),
        [
            "numerics=exact",
            "cache.memory=2GiB",
            "checkpoint.path=some/where",
            "sampling.temperature=0.5",
            "sampling.logit_bias={3: -1.5}",
            "backend.options.word='off'",
        ],
    )
    assert load_config([_write(tmp_path / "a.yaml", dump(config))]) == config


def test_dump_shows_every_section() -> None:
    text = dump(EngineConfig())
    assert all(f"{name}:" in text for name in EngineConfig.model_fields)


def test_override_keeps_what_it_does_not_name() -> None:
    config = load_config((), ["cache.block_size=32", "numerics=exact"])
    changed = override(config, {"cache": {"num_blocks": 9}, "scheduler.max_num_seqs": 3})
    assert changed.cache.block_size == 32
    assert changed.cache.num_blocks == 9
    assert changed.scheduler.max_num_seqs == 3
    assert changed.numerics is Numerics.EXACT
    assert config.cache.num_blocks is None


def test_override_names_the_bad_argument() -> None:
    with pytest.raises(ConfigError, match=r"cache\.block_size = 3 \(from argument cache\)"):
        override(EngineConfig(), {"cache": {"block_size": 3}})
