"""Reports of compute-sanitizer are read for what they say."""

from __future__ import annotations

import pytest

from benchmarks.gpu.sanitizer_report import read_report

MEMORY = """
3 of 3 cases passed
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at _scores+0x1270 in scores_triton.py:61
=========     by thread (3,0,0) in block (0,0,0)
=========     Access at 0x7f04 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: _launch [0x1234] in launcher.so
=========
========= Invalid __global__ read of size 16 bytes
=========     at _scores+0x1270 in scores_triton.py:61
=========     by thread (4,0,0) in block (0,0,0)
=========     Access at 0x7f14 is out of bounds
=========
========= ERROR SUMMARY: 2 errors
"""
RACES = """
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _place(int *, int *)+0x90 in slots_triton.py:40
=========     and Read access at _place(int *, int *)+0x100 in slots_triton.py:47 [12 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""  # noqa: E501
REFUSED = """
========= COMPUTE-SANITIZER
========= Error: Device not supported. Please refer to the documentation.
========= ERROR SUMMARY: 0 errors
"""


def test_errors_of_memory_are_counted_and_joined_by_place() -> None:
    found = read_report(MEMORY)
    assert (found.ran, found.errors, found.warnings) == (True, 2, 0)
    assert found.reports == {
        "Invalid __global__ read of size 16 bytes at _scores (scores_triton.py:61)": 2
    }


def test_races_name_both_accesses() -> None:
    found = read_report(RACES)
    assert (found.ran, found.errors, found.warnings) == (True, 1, 0)
    assert found.reports == {
        "Error: Race reported between Write access at _place (slots_triton.py:40) "
        "at _place (slots_triton.py:47)": 1
    }


def test_clean_run_has_no_reports() -> None:
    found = read_report("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n")
    assert found == (True, 0, 0, {}, "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (REFUSED, "Device not supported"),
        ("Traceback\nValueError: 3", "no summary; last line: ValueError: 3"),
        ("", "no summary; last line: it printed nothing"),
    ],
)
def test_tool_that_did_not_run_is_not_clean(text: str, words: str) -> None:
    found = read_report(text)
    assert not found.ran
    assert words in found.refusal
