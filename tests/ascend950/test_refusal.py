"""Without an NPU the backend refuses at once and says what is missing."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.errors import CapabilityError, ConfigError
from deepinfer.device.numerics import Numerics
from deepinfer.device.registry import load_backend
from deepinfer_ascend950.probe import probe_ascend950

without_npu = pytest.mark.skipif(probe_ascend950().available, reason="an NPU is here")


@without_npu
def test_generate_refuses_within_three_seconds_and_lists_what_is_missing() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = "from deepinfer.cli import main; raise SystemExit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", "--backend", "ascend950", "Hello"],
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2
    for piece in ("/dev/davinci0", "CANN toolkit", "torch_npu is missing"):
        assert piece in done.stderr
    # Processor time, so that a busy machine does not fail the test.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"emulated": True, "emulate": 1}, "backend.options.emulate is unknown to ascend950"),
        ({"emulated": "yes"}, "backend.options.emulated is 'yes'; expected true or false"),
        ({"emulated": True, "device_index": -1}, "device_index is -1; expected the number"),
    ],
)
def test_wrong_option_is_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_backend(BackendConfig("ascend950", Numerics.NORMATIVE, options))


@without_npu
def test_not_emulated_is_refused_by_the_probe() -> None:
    with pytest.raises(CapabilityError, match="no Ascend NPU is visible"):
        load_backend(BackendConfig("ascend950", Numerics.NORMATIVE, {"emulated": False}))
