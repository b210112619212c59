"""`deepinfer backend new`: a package to start a backend from, which runs the suite at once."""

from __future__ import annotations

import importlib.resources
import re
from pathlib import Path

from deepinfer.device.errors import ConfigError
from deepinfer.device.probe import SEAM_VERSION

_NAME = re.compile(r"[a-z][a-z0-9_]*")
# Template file -> place in the package; {name} is the backend's name.
_FILES = {
    "pyproject.toml.txt": "pyproject.toml",
    "README.md.txt": "README.md",
    "init.py.txt": "deepinfer_{name}/__init__.py",
    "plugin.py.txt": "deepinfer_{name}/plugin.py",
    "backend.py.txt": "deepinfer_{name}/backend.py",
    "runtime.py.txt": "deepinfer_{name}/runtime.py",
    "ops_init.py.txt": "deepinfer_{name}/ops/__init__.py",
    "norm.py.txt": "deepinfer_{name}/ops/norm.py",
    "expected_failures.yaml.txt": "deepinfer_{name}/expected_failures.yaml",
}


def write_backend(name: str, folder: Path) -> tuple[Path, ...]:
    """Write the package into `folder`.

    Args:
        name: the backend's name; lower case, the word that `backend.name` will select.
        folder: must not exist, or be empty.

    Returns:
        The files written.
    Raises:
        ConfigError: the name is no lower-case identifier, or the folder is not empty.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"backend name {name!r}: expected lower-case letters, digits and underscores, "
            "beginning with a letter"
        )
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"folder {folder} is not empty; name another one with --dir")
    template = importlib.resources.files(__name__) / "template"
    written = []
    for source, place in _FILES.items():
        text = (template / source).read_text(encoding="utf-8")
        text = text.replace("@NAME@", name).replace("@SEAM_VERSION@", str(SEAM_VERSION))
        path = folder / place.format(name=name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return tuple(written)
