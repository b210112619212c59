"""Probes of the in-tree device backends, on made-up file systems."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer.device.probe import Finding, Probe, find_package
from deepinfer_ascend950.probe import probe_ascend950, probe_emulation
from deepinfer_cuda_sm100.plugin import deepinfer_probe
from deepinfer_cuda_sm100.probe import probe_cuda_sm100, probe_interpreter

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file below the made-up root."""

    def write_file(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")

    return write_file


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides every package from `find_spec`."""

    def find_nothing(name: str) -> importlib.machinery.ModuleSpec | None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", find_nothing)


def reason_about(probe: Probe, word: str) -> str:
    """Return the only reason with `word` in it."""
    (reason,) = [reason for reason in probe.reasons if word in reason]
    return reason


def test_probe_cannot_be_available_against_reasons() -> None:
    with pytest.raises(ValueError, match="available=True with 1 reasons"):
        Probe("toy", True, ("no driver",), "", 1)


def test_probe_cannot_be_unavailable_without_reason() -> None:
    with pytest.raises(ValueError, match="available=False with 0 reasons"):
        Probe("toy", False, (), "", 1)


def test_findings_without_reason_make_an_available_probe() -> None:
    findings = (Finding(versions={"driver": "1.0"}), Finding(device="one toy"))
    probe = Probe.from_findings("toy", 1, findings)
    assert probe == Probe("toy", True, (), "one toy", 1, {"driver": "1.0"})


def test_find_package_gives_the_recorded_version() -> None:
    finding = find_package("pluggy", distribution="pluggy", remedy="-")
    assert finding.versions["pluggy"][0].isdigit()
    assert not finding.reason


def test_cuda_probe_names_every_missing_piece(tmp_path: Path, no_packages: None) -> None:
    probe = probe_cuda_sm100(tmp_path)
    assert len(probe.reasons) == 4
    for piece in ("driver", "nvidia0", "torch", "package triton"):
        assert reason_about(probe, piece)


def test_cuda_probe_finds_an_sm100_gpu(tmp_path: Path, write: Write) -> None:
    write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Module  580.65.06  Sun Jul 27")
    write("proc/driver/nvidia/gpus/0000:1b:00.0/information", "Model: \t\t NVIDIA B200\nIRQ: 1\n")
    write("dev/nvidia0", "")
    write("dev/nvidiactl", "")
    probe = probe_cuda_sm100(tmp_path)
    assert probe.device == "1 x NVIDIA B200"
    assert probe.versions["nvidia-driver"] == "580.65.06"
    assert not [reason for reason in probe.reasons if "NVIDIA" in reason]


def test_cuda_probe_takes_passed_on_devices_for_a_driver(tmp_path: Path, write: Write) -> None:
    write("dev/nvidiactl", "")
    write("dev/nvidia0", "")
    probe = probe_cuda_sm100(tmp_path)
    assert not [reason for reason in probe.reasons if "NVIDIA" in reason]
    assert probe.versions["nvidia-driver"] == "unknown version"


def test_cuda_probe_takes_an_sm90_gpu_for_checking(tmp_path: Path, write: Write) -> None:
    write("proc/driver/nvidia/gpus/0000:1b:00.0/information", "Model: \t\t NVIDIA H200\n")
    write("dev/nvidia0", "")
    probe = probe_cuda_sm100(tmp_path)
    assert "1 x NVIDIA H200 (SM90: the same kernels, for checking" in probe.device
    assert not [reason for reason in probe.reasons if "SM100" in reason]


def test_cuda_probe_refuses_another_gpu_by_name(tmp_path: Path, write: Write) -> None:
    write("proc/driver/nvidia/gpus/0000:1b:00.0/information", "Model: \t\t NVIDIA A100-SXM4\n")
    write("dev/nvidia0", "")
    assert "1 x NVIDIA A100-SXM4" in reason_about(probe_cuda_sm100(tmp_path), "neither an SM100")


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton exists for Linux only"
)


@needs_triton
def test_interpreting_needs_neither_driver_nor_gpu() -> None:
    probe = probe_interpreter()
    assert probe.available
    assert "interpreted on the CPU" in probe.device


@needs_triton
def test_plugin_is_probed_with_the_options_of_the_user() -> None:
    assert deepinfer_probe({"interpret": True}).available
    assert deepinfer_probe({"interpret": False}) == deepinfer_probe({})


@pytest.mark.parametrize("has_cuda", [True, False])
def test_cuda_probe_tells_a_cuda_build_of_torch_by_its_library(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch, has_cuda: bool
) -> None:
    write("torch/__init__.py", "raise AssertionError('imported while probing')")
    write(f"torch/lib/{'libtorch_cuda.so' if has_cuda else 'libtorch_cpu.so'}", "")
    spec = importlib.util.spec_from_file_location(
        "torch",
        tmp_path / "torch/__init__.py",
        submodule_search_locations=[str(tmp_path / "torch")],
    )
    monkeypatch.setattr(importlib.util, "find_spec", {"torch": spec}.get)
    reasons = [reason for reason in probe_cuda_sm100(tmp_path).reasons if "without CUDA" in reason]
    assert bool(reasons) is not has_cuda


def test_ascend_probe_names_every_missing_piece(tmp_path: Path, no_packages: None) -> None:
    probe = probe_ascend950(tmp_path, {})
    assert len(probe.reasons) == 3
    for piece in ("/davinci0", "CANN toolkit", "package torch_npu"):
        assert reason_about(probe, piece)


def test_emulation_of_ascend_needs_torch_only(no_packages: None) -> None:
    assert "package torch " in reason_about(probe_emulation(), "torch")


def test_emulation_of_ascend_says_what_it_is() -> None:
    probe = probe_emulation()
    assert probe.available
    assert "emulating" in probe.device
    assert set(probe.versions) == {"torch"}


@pytest.mark.parametrize("library", ["lib64/libascendcl.so", "aarch64-linux/lib64/libascendcl.so"])
def test_ascend_probe_accepts_a_toolkit_named_by_the_environment(
    tmp_path: Path, write: Write, library: str
) -> None:
    write(f"cann/{library}", "")
    write("cann/version.cfg", "runtime_running_version=[7.7.0.1:8.5.0]\n")
    write("dev/davinci0", "")
    write("dev/davinci_manager", "")
    probe = probe_ascend950(tmp_path, {"ASCEND_HOME_PATH": str(tmp_path / "cann")})
    assert not [reason for reason in probe.reasons if "CANN toolkit" in reason]
    assert probe.device == "1 x Ascend NPU"
    assert probe.versions["cann"] == "7.7.0.1"
    assert not probe.available


def test_ascend_probe_names_the_variable_of_an_incomplete_toolkit(
    tmp_path: Path, write: Write
) -> None:
    write("cann/version.cfg", "")
    reason = reason_about(
        probe_ascend950(tmp_path, {"ASCEND_TOOLKIT_HOME": str(tmp_path / "cann")}), "libascendcl"
    )
    assert f"ASCEND_TOOLKIT_HOME={tmp_path / 'cann'}" in reason
