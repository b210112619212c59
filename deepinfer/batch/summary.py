"""What a batch run came to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

EXIT_ALL_ANSWERED = 0
EXIT_SOME_FAILED = 1


@dataclass(slots=True)
class BatchSummary:
    """Counts of a run, added to as records are written."""

    num_ok: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    error_codes: Counter[str] = field(default_factory=Counter)
    marks: Counter[str] = field(default_factory=Counter)

    def add(self, record: dict[str, Any]) -> None:
        """Count one record of the output file."""
        if record["response"] is None:
            self.num_failed += 1
            self.error_codes[record["error"]["code"]] += 1
            return
        body = record["response"]["body"]
        self.num_ok += 1
        self.prompt_tokens += body["usage"]["prompt_tokens"]
        self.completion_tokens += body["usage"]["completion_tokens"]
        self.cached_tokens += body["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.finish_reasons.update(str(choice["finish_reason"]) for choice in body["choices"])
        self.marks.update(body.get("marks", ()))

    @property
    def num_requests(self) -> int:
        """Lines with a record: all of the input but blank ones, once the run is complete."""
        return self.num_ok + self.num_failed

    @property
    def exit_code(self) -> int:
        """0 when every line was answered, 1 when some failed."""
        return EXIT_SOME_FAILED if self.num_failed else EXIT_ALL_ANSWERED

    def to_json(self) -> dict[str, Any]:
        """All figures, for reports."""
        rate = self.completion_tokens / self.seconds if self.seconds > 0 else 0.0
        return {
            "num_requests": self.num_requests,
            "num_ok": self.num_ok,
            "num_failed": self.num_failed,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "seconds": round(self.seconds, 3),
            "completion_tokens_per_s": round(rate, 3),
            "finish_reasons": dict(self.finish_reasons),
            "error_codes": dict(self.error_codes),
            "marks": dict(self.marks),
        }
