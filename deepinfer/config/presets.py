"""Finds what ships with the project: configuration presets and the bundled checkpoint."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from deepinfer.config.yaml_text import parse_yaml
from deepinfer.device.errors import CheckpointError, ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent
_CHECKOUT = _PACKAGE.parent
_BUNDLED_CHECKPOINT = "tiny-v41"
_MODEL_FOLDER = "model"


def preset_folders() -> tuple[Path, ...]:
    """Return the folders that hold presets: the installed one, else the checkout's."""
    folders = (_PACKAGE / "_presets", _CHECKOUT / "configs")
    return tuple(folder for folder in folders if folder.is_dir())


def list_presets() -> list[str]:
    """Return the names of all presets, such as "tiny/reference", sorted."""
    return sorted(
        {
            path.relative_to(folder).with_suffix("").as_posix()
            for folder in preset_folders()
            for path in folder.rglob("*.yaml")
        }
    )


def find_preset(name: str | Path) -> Path:
    """Return the file for a `--config` value: a path, or else the name of a preset.

    A file of that name always wins over a preset. Presets are looked up in the installed package
    first, then in the `configs` folder of a checkout; ".yaml" may be left out.

    Raises:
        ConfigError: neither a file nor a preset has this name.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; expected a YAML file or a preset; name the file")
    wanted = PurePosixPath(name)
    if not wanted.is_absolute() and ".." not in wanted.parts:
        for folder in preset_folders():
            for candidate in (folder / wanted, folder / f"{wanted}.yaml"):
                if candidate.is_file():
                    return candidate
    presets = list_presets()
    near = difflib.get_close_matches(str(name), presets, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"presets are {', '.join(presets) or 'none'}"
    raise ConfigError(f"{name}: no file and no preset has this name; {remedy}")


def load_model_preset(name: str) -> dict[str, object]:
    """Return the model configuration (the content of a config.json) of a preset under `model/`.

    Args:
        name: for example "v41_flash".
    Raises:
        ConfigError: there is no such preset, or it holds no mapping.
    """
    path = find_preset(f"{_MODEL_FOLDER}/{name}")
    values = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: holds no mapping; expected the fields of a config.json")
    return dict(values)


def bundled_checkpoint() -> Path:
    """Return the directory of the small checkpoint that comes with the project.

    Raises:
        CheckpointError: it is neither installed nor in a checkout.
    """
    places = (
        _PACKAGE / "_checkpoints" / _BUNDLED_CHECKPOINT,
        _CHECKOUT / "checkpoints" / _BUNDLED_CHECKPOINT,
    )
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise CheckpointError(
        f"the bundled checkpoint {_BUNDLED_CHECKPOINT} has no config.json in "
        f"{' or '.join(str(place) for place in places)}; reinstall deepinfer-hal, or set "
        "checkpoint.path to a checkpoint directory"
    )
