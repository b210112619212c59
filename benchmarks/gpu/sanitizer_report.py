"""What compute-sanitizer prints, read: whether it ran, and what it found in which kernel."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

_PREFIX = "========="
_MEMORY = re.compile(r"ERROR SUMMARY: (\d+) error")
_RACES = re.compile(r"RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?\)")
_REFUSAL = re.compile(
    r"not supported|No attachable process|terminated before first instrumented|"
    r"Failed to initialize|internal error",
    re.IGNORECASE,
)
_PLACE = re.compile(r"\bat (?:0x[0-9a-f]+ in )?(.+?)(?:\+0x[0-9a-f]+)?(?: in (\S+:\d+))?$")
_SHOWN = 20


class Findings(NamedTuple):
    """What one process under the tool yielded.

    Attributes:
        ran: whether the tool instrumented the process and came to its summary.
        errors: as its summary counts them.
        warnings: the same; memcheck has none.
        reports: distinct reports with their number, the most frequent first, at most 20.
        refusal: what the tool said instead, when it did not run.
    """

    ran: bool
    errors: int
    warnings: int
    reports: dict[str, int]
    refusal: str


def read_report(text: str) -> Findings:
    """Findings in what a process printed under the tool.

    Args:
        text: output of tool and process, mixed line by line.
    """
    lines = [line.removeprefix(_PREFIX) for line in text.splitlines() if line.startswith(_PREFIX)]
    refusal = next((line.strip() for line in lines if _REFUSAL.search(line)), "")
    races = _RACES.search(text)
    memory = _MEMORY.search(text)
    found = races or memory
    if found is None or refusal:
        last = text.strip().splitlines()[-1] if text.strip() else "it printed nothing"
        return Findings(False, 0, 0, {}, refusal or f"no summary; last line: {last[:200]}")
    warnings = int(races[2]) if races else 0
    return Findings(True, int(found[1]), warnings, dict(_reports(lines)), "")


def _reports(lines: list[str]) -> list[tuple[str, int]]:
    """Headlines with the places that follow them; addresses and threads are left out."""
    counts: Counter[str] = Counter()
    headline, places = "", list[str]()

    def end() -> None:
        if headline:
            counts[" ".join([headline, *places])] += 1

    for line in lines:
        if not line.strip():
            continue
        indented = line.startswith("     ")
        if not indented:
            end()
            text = line.strip()
            is_report = text.startswith(("Invalid", "Error:", "Warning:", "Program hit"))
            headline, places = (text if is_report else ""), []
            if is_report and " at " in text:
                before, _, after = text.partition(" at ")
                headline, places = before, [_place(f"at {after}")]
        elif headline and re.match(r"\s+(at|and \w+ access at) ", line) and len(places) < 2:
            places.append(_place(line.strip()))
    end()
    return counts.most_common(_SHOWN)


def _place(text: str) -> str:
    """Kernel, file and line of `at kernel(arguments)+0x90 in file.py:12`."""
    matched = _PLACE.search(re.sub(r"\s*\[\d+ hazards?\]", "", text))
    if matched is None:
        return text
    kernel = matched[1].partition("(")[0]
    return f"at {kernel}" + (f" ({matched[2]})" if matched[2] else "")
