"""The log of a run: timed lines for people, a JSON file for pictures and the model card."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


class RunLog:
    """Prints lines with the seconds since its start and keeps records."""

    def __init__(self, file: Path, header: dict[str, Any]) -> None:
        """Start the clock.

        Args:
            file: JSON file that `save` writes.
            header: facts about the run, kept as they are.
        """
        self._file = file
        self._started = time.monotonic()
        self.content: dict[str, Any] = {**header, "records": []}

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def line(self, text: str) -> None:
        """Print one line at once."""
        sys.stdout.write(f"[{self.elapsed_s():6.1f}s] {text}\n")
        sys.stdout.flush()

    def record(self, **values: Any) -> None:  # noqa: ANN401
        """Keep one record of the run, with its time."""
        self.content["records"].append({"seconds": round(self.elapsed_s(), 1), **values})

    def save(self) -> None:
        """Write everything so far."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.content, ensure_ascii=False, indent=1)
        self._file.write_text(text + "\n", encoding="utf-8")
