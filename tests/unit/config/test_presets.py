"""Presets and the bundled checkpoint: where they are looked up, and that each one loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.config import bundled_checkpoint, find_preset, load_config, load_model_preset
from deepinfer.config import presets as module
from deepinfer.device.errors import CheckpointError, ConfigError


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """An installed package and a checkout, both empty; the current folder is a third one."""
    checkout = tmp_path / "checkout"
    package = checkout / "deepinfer"
    (tmp_path / "here").mkdir()
    package.mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(module, "_PACKAGE", package)
    monkeypatch.setattr(module, "_CHECKOUT", checkout)
    return package, checkout


def _write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_installed_preset_wins_over_the_checkout(places: tuple[Path, Path]) -> None:
    package, checkout = places
    _write(checkout / "configs/tiny/a.yaml")
    installed = _write(package / "_presets/tiny/a.yaml")
    assert find_preset("tiny/a") == installed


def test_checkout_preset_is_found(places: tuple[Path, Path]) -> None:
    file = _write(places[1] / "configs/tiny/a.yaml")
    assert find_preset("tiny/a") == file
    assert find_preset("tiny/a.yaml") == file


def test_file_of_the_user_wins(places: tuple[Path, Path]) -> None:
    _write(places[0] / "_presets/tiny/a.yaml")
    _write(Path("tiny/a"))
    assert find_preset("tiny/a") == Path("tiny/a")


def test_unknown_preset_names_the_nearest(places: tuple[Path, Path]) -> None:
    _write(places[1] / "configs/tiny/reference.yaml")
    with pytest.raises(ConfigError, match="did you mean tiny/reference"):
        find_preset("tiny/referense")


def test_preset_name_does_not_leave_the_folder(places: tuple[Path, Path]) -> None:
    _write(places[1] / "secret.yaml")
    (places[1] / "configs").mkdir()
    with pytest.raises(ConfigError, match="no file and no preset"):
        find_preset("../secret")


def test_folder_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        find_preset(tmp_path)


@pytest.mark.parametrize(
    "name", [name for name in module.list_presets() if not name.startswith("model/")]
)
def test_every_preset_loads(name: str) -> None:
    load_config([name])


def test_model_preset_is_no_engine_configuration() -> None:
    with pytest.raises(ConfigError, match="describes a model"):
        load_config(["model/v41_flash"])


def test_flash_preset_has_a_ratio_for_every_layer_and_draft_block() -> None:
    text_config = load_model_preset("v41_flash")["text_config"]
    assert isinstance(text_config, dict)
    assert len(text_config["compress_ratios"]) == 43
    assert text_config["rms_norm_eps"] == 1e-20


def test_installed_checkpoint_wins_over_the_checkout(places: tuple[Path, Path]) -> None:
    package, checkout = places
    _write(checkout / "checkpoints/tiny-v41/config.json")
    assert bundled_checkpoint() == checkout / "checkpoints/tiny-v41"
    _write(package / "_checkpoints/tiny-v41/config.json")
    assert bundled_checkpoint() == package / "_checkpoints/tiny-v41"


def test_missing_checkpoint_is_refused_with_the_places(places: tuple[Path, Path]) -> None:
    (places[0] / "_checkpoints/tiny-v41").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"has no config\.json in .*_checkpoints"):
        bundled_checkpoint()
