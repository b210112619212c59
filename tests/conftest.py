"""Settings of every test run: threads, environment, hypothesis profiles, slow tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Two threads everywhere, also in child processes: machines that run the suite have few cores, and
# a fixed number keeps float sums the same. Set before anything imports torch.
os.environ["OMP_NUM_THREADS"] = "2"

# A developer's own settings must not change what is tested.
for _name in [name for name in os.environ if name.startswith("DEEPINFER_")]:
    del os.environ[_name]

# Deadlines measure the machine, not the code. "ci" repeats the same examples on every run.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--runslow` and `--backend`."""
    parser.addoption("--runslow", action="store_true", help="run tests marked slow, too")
    parser.addoption("--backend", help="run the golden fixtures on this backend alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked slow, unless `--runslow` is given."""
    if config.getoption("--runslow"):
        return
    slow = [item for item in items if "slow" in item.keywords]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if "slow" not in item.keywords]
