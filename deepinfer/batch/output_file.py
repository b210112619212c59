"""The file that results are appended to, one whole line at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from deepinfer.batch.records import encode_record
from deepinfer.device.errors import DeepInferError

logger = logging.getLogger(__name__)


class BatchFileError(DeepInferError):
    """The input or output file of a batch run cannot be used."""


def check_paths(input_path: Path, output_path: Path, *, overwrite: bool) -> None:
    """Refuse a run whose files would not work, before anything expensive is done.

    Raises:
        BatchFileError: the input is no file, the output exists and may not be replaced, it is
            the input, or its folder is missing.
    """
    if not input_path.is_file():
        raise BatchFileError(f"input {input_path} is not a file; expected JSON lines of requests")
    if output_path.exists() and output_path.samefile(input_path):
        raise BatchFileError(f"output {output_path} is the input file; choose another name")
    if output_path.exists() and not overwrite:
        raise BatchFileError(f"output {output_path} exists; choose another name or allow overwrite")
    if not output_path.parent.is_dir():
        raise BatchFileError(f"folder {output_path.parent} of the output does not exist; make it")


class OutputFile:
    """Appends records; each is a whole line on disk when `write` returns."""

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        """Create the file.

        Raises:
            BatchFileError: it exists and may not be replaced, or cannot be made.
        """
        self._path = path
        try:
            self._file = path.open("wb" if overwrite else "xb")
        except OSError as error:
            raise BatchFileError(f"output {path} cannot be made: {error}") from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record.

        Raises:
            BatchFileError: the disk is full or the like; earlier records are complete.
        """
        try:
            self._file.write(encode_record(record))
            self._file.flush()
        except OSError as error:
            raise BatchFileError(f"output {self._path} cannot be written: {error}") from error

    def __enter__(self) -> Self:
        """Nothing more than the file itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self._file.close()
