"""From the text of config.json, nested or flat, to one mapping in text_config's spelling."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from deepinfer.device.errors import CheckpointError, ConfigError
from deepinfer.model.config_fields import (
    FIXED_VALUES,
    FLAT_ALIASES,
    FLAT_QUANTIZATION,
    FLAT_ROPE,
    FLAT_VISION,
    IDENTITY_KEYS,
    MODEL_TYPES,
    UNUSED_KEYS,
)

CONFIG_FILE = "config.json"
_NESTED = ("text_config", "vision_config", "quantization_config")


def read_config_file(path: Path) -> dict[str, object]:
    """Return the object in a config.json.

    Args:
        path: the file, or the checkpoint folder that holds it.
    Raises:
        CheckpointError: the path does not exist, or holds no valid JSON object.
    """
    file = path / CONFIG_FILE if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(
            f"no model configuration at {file}; give a checkpoint folder that holds {CONFIG_FILE} "
            "(nothing is loaded in its place)"
        )
    try:
        loaded = json.loads(
            file.read_text(encoding="utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse_constant,
        )
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{file} holds a {type(loaded).__name__}, expected a JSON object")
    return loaded


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise ConfigError(f"config.json names {key!r} twice in one object; keep one of them")
        result[key] = value
    return result


def _refuse_constant(constant: str) -> object:
    raise ConfigError(f"config.json holds {constant}; only finite numbers are meaningful here")


def normalise(raw: Mapping[str, object], known: Iterable[str]) -> dict[str, object]:
    """Return one flat mapping in text_config's spelling, without fixed and unused keys.

    `quantization_config`, `vision_config` and `rope_scaling` stay objects (or None);
    `unused_keys` lists the keys that were understood and change nothing.

    Args:
        raw: the parsed config.json, nested or flat.
        known: field names of the model configuration.
    Raises:
        ConfigError: an unknown key, two spellings that disagree, or a variant that is not built.
    """
    nested = isinstance(raw.get("text_config"), Mapping)
    flat = _merge_text_config(raw) if nested else _rename_flat(raw)
    known = set(known)
    result: dict[str, object] = {}
    unused: list[str] = []
    for key, value in flat.items():
        if key in FIXED_VALUES:
            _check_fixed(key, value)
        elif key in IDENTITY_KEYS:
            _check_model_type(key, value)
        elif key in UNUSED_KEYS:
            unused.append(key)
        elif key == "draft_vocab_size":
            if value not in (None, flat.get("vocab_size")):
                raise ConfigError(
                    f"draft_vocab_size is {value}, vocab_size is {flat.get('vocab_size')}; "
                    "a drafter with a vocabulary of its own is not supported"
                )
        elif key in known:
            result[key] = value
        else:
            raise ConfigError(unknown_key("config.json", key, known))
    result["rope_scaling"] = _one_rope_type(result.get("rope_scaling"))
    result["unused_keys"] = sorted(unused)
    return result


def unknown_key(where: str, key: str, known: Iterable[str]) -> str:
    """Return the message for a key that nobody knows, with the nearest known name.

    Args:
        where: the object that holds the key.
        key: the unknown key.
        known: names that would have been accepted.
    """
    names = {
        *known,
        *FIXED_VALUES,
        *IDENTITY_KEYS,
        *UNUSED_KEYS,
        *FLAT_ALIASES,
        *FLAT_ROPE,
        *FLAT_QUANTIZATION,
    }
    close = difflib.get_close_matches(key, sorted(names), n=1)
    hint = f"did you mean {close[0]!r}?" if close else "remove it or use a newer version"
    return f"{where} has the unknown key {key!r}; {hint}"


def _merge_text_config(raw: Mapping[str, object]) -> dict[str, object]:
    text = raw["text_config"]
    assert isinstance(text, Mapping)
    flat = {str(key): value for key, value in text.items() if key not in ("model_type", "dtype")}
    _check_model_type("model_type", text.get("model_type"))
    for key, value in raw.items():
        if key == "text_config":
            continue
        _put(flat, key, key, value)
    return flat


def _rename_flat(raw: Mapping[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    rope: dict[str, object] = {}
    quantization: dict[str, object] = {}
    vision: dict[str, object] = {}
    for key, value in raw.items():
        if key in FLAT_ROPE:
            _put(rope, FLAT_ROPE[key], key, value)
        elif key in FLAT_QUANTIZATION:
            _put(quantization, FLAT_QUANTIZATION[key], key, value)
        elif key.startswith("vision_") and key not in _NESTED:
            name = key.removeprefix("vision_")
            _put(vision, FLAT_VISION.get(name, name), key, value)
        else:
            _put(flat, FLAT_ALIASES.get(key, key), key, value)
    if rope:
        _put(flat, "rope_scaling", "rope_factor", {"rope_type": "yarn", **rope})
    if quantization:
        # The release's flat config names only what differs between its variants.
        defaults: dict[str, object] = {"weight_block_size": [32, 32], "scale_fmt": "ue8m0"}
        _put(flat, "quantization_config", "expert_dtype", {**defaults, **quantization})
    if vision:
        _put(flat, "vision_config", "vision_*", vision)
    return flat


def _put(target: dict[str, object], name: str, key: str, value: object) -> None:
    if name in target and target[name] != value:
        raise ConfigError(
            f"config.json gives {name} twice with different values: {target[name]!r} and "
            f"{value!r} (as {key!r}); keep one spelling"
        )
    target[name] = value


def _check_fixed(key: str, value: object) -> None:
    accepted = FIXED_VALUES[key]
    if not any(value == choice and _same_kind(value, choice) for choice in accepted):
        names = " or ".join(repr(choice) for choice in accepted if choice is not None) or "null"
        raise ConfigError(
            f"{key} is {value!r}; only {names} is supported, another value changes the model's "
            "results"
        )


def _same_kind(value: object, choice: object) -> bool:
    return isinstance(value, bool) == isinstance(choice, bool)


def _check_model_type(key: str, value: object) -> None:
    if key == "model_type" and value is not None and value not in MODEL_TYPES:
        raise ConfigError(
            f"model_type is {value!r}, expected one of {sorted(MODEL_TYPES)}; "
            "this engine runs the DeepSeek-V4.1 family only"
        )


def _one_rope_type(value: object) -> object:
    """Fold the second spelling `type` of the scaling kind into `rope_type`."""
    if not isinstance(value, Mapping) or "type" not in value:
        return value
    scaling = {str(key): entry for key, entry in value.items() if key != "type"}
    _put(scaling, "rope_type", "type", value["type"])
    return scaling
