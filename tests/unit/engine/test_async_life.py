"""Random schedules of the asynchronous engine on the null device."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.unit.engine.async_life import AsyncLife
from tests.unit.engine.prefix_life import PrefixLife, TierLife


class LongAsyncLife(AsyncLife):
    """The same life with another name, so that it has settings of its own."""


TestAsyncLife = AsyncLife.TestCase
TestAsyncLife.settings = settings(max_examples=500, stateful_step_count=40, deadline=None)
TestLongAsyncLife = pytest.mark.timeout(7200)(pytest.mark.slow(LongAsyncLife.TestCase))
TestLongAsyncLife.settings = settings(max_examples=5000, stateful_step_count=60, deadline=None)


class LongPrefixLife(PrefixLife):
    """The same life with another name, so that it has settings of its own."""


class LongTierLife(TierLife):
    """The same life with another name, so that it has settings of its own."""


TestTierLife = TierLife.TestCase
TestTierLife.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestLongTierLife = pytest.mark.timeout(7200)(pytest.mark.slow(LongTierLife.TestCase))
TestLongTierLife.settings = settings(max_examples=5000, stateful_step_count=60, deadline=None)
TestPrefixLife = PrefixLife.TestCase
TestPrefixLife.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestLongPrefixLife = pytest.mark.timeout(7200)(pytest.mark.slow(LongPrefixLife.TestCase))
TestLongPrefixLife.settings = settings(max_examples=5000, stateful_step_count=60, deadline=None)
