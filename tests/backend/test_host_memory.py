"""Freed memory stays with the process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from deepinfer_reference import host_memory

_PROGRAM = """
import resource
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.registry import load_backend
import torch

backend = load_backend(BackendConfig("reference", Numerics.NORMATIVE, {}))
for number in range(60):
    if number == 20:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    # Temporaries of a step: some megabytes, of other sizes each time.
    kept = [torch.ones(1_000_000 + 50_000 * (number % 7), dtype=torch.float32) for _ in range(4)]
    del kept
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(**variables: str) -> int:
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        capture_output=True, text=True, check=True, env=os.environ | variables,
    )  # fmt: skip
    return int(result.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's allocator")
def test_temporaries_of_the_next_step_cost_no_page_faults() -> None:
    # With one of its own variables set the allocator is left alone, here at its defaults.
    left_alone = page_faults(MALLOC_TOP_PAD_="131072")
    assert left_alone > 10_000
    assert page_faults() < left_alone / 20


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert not host_memory.keep_freed_memory()
