"""Freed memory is kept for the next step, and not given back to the system in between."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_SETTINGS = {
    _M_TRIM_THRESHOLD: 2**31 - 1,
    _M_TOP_PAD: 64 * 2**20,
    # The most that it takes; larger blocks go to the system each time.
    _M_MMAP_THRESHOLD: 32 * 2**20,
}
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Tell the C library's allocator to keep what is freed; whether it could be told.

    A step's temporaries are some megabytes each. By default glibc gives such blocks back to the
    system, and the next step takes them anew, with a page fault for each page. The setting is the
    whole process's. Where a user has set one of the
    allocator's own variables, or there is another C library, nothing is changed.
    """
    if any(name in os.environ for name in _VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return all(mallopt(name, value) == 1 for name, value in _SETTINGS.items())
