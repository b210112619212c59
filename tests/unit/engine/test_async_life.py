"""Random schedules of the asynchronous engine on the null device."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.unit.engine.async_life import AsyncLife


class LongAsyncLife(AsyncLife):
    """The same life with another name, so that it has settings of its own."""


TestAsyncLife = AsyncLife.TestCase
TestAsyncLife.settings = settings(max_examples=500, stateful_step_count=40, deadline=None)
TestLongAsyncLife = pytest.mark.timeout(7200)(pytest.mark.slow(LongAsyncLife.TestCase))
TestLongAsyncLife.settings = settings(max_examples=5000, stateful_step_count=60, deadline=None)
