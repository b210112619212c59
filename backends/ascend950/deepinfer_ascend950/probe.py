"""Looks for what the backend needs, by files and package metadata only: nothing is imported."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from deepinfer.device.probe import Finding, Probe, find_package

_HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_DEFAULT_HOME = "usr/local/Ascend/ascend-toolkit/latest"


def probe_ascend950(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Probe:
    """Return the state of driver nodes, CANN toolkit and torch_npu.

    Args:
        root: folder under which dev and usr are looked for; tests pass one of their own.
        environ: environment that may name the toolkit's folder; None means the process's own.
    """
    findings = (
        _find_npu(root),
        _find_cann(root, os.environ if environ is None else environ),
        find_package(
            "torch_npu",
            distribution="torch-npu",
            remedy="install the torch-npu that matches torch and CANN "
            "(pip install 'deepinfer-hal[ascend950]')",
        ),
    )
    return Probe.from_findings("ascend950", seam_version=1, findings=findings)


def probe_emulation() -> Probe:
    """Return whether the emulation can run: it needs torch and nothing of Ascend."""
    torch = find_package("torch", distribution="torch", remedy="pip install 'torch>=2.11'")
    machine = Finding(device=f"CPU ({platform.machine()}), emulating an Ascend 950")
    return Probe.from_findings("ascend950", seam_version=1, findings=(torch, machine))


def _find_npu(root: Path) -> Finding:
    nodes = [
        path for path in (root / "dev").glob("davinci*") if re.fullmatch(r"davinci\d+", path.name)
    ]
    if not nodes:
        return Finding(
            reason=f"no Ascend NPU is visible (no {root / 'dev'}/davinci0): run on a machine with "
            "an Ascend 950, or give the container its /dev/davinci devices"
        )
    return Finding(device=f"{len(nodes)} x Ascend NPU")


def _find_cann(root: Path, environ: Mapping[str, str]) -> Finding:
    named = next((variable for variable in _HOME_VARIABLES if environ.get(variable)), None)
    home = Path(environ[named]) if named else root / _DEFAULT_HOME
    origin = f"{named}={home}" if named else f"{home}; {' and '.join(_HOME_VARIABLES)} are not set"
    if not home.is_dir():
        return Finding(
            reason=f"the CANN toolkit is missing ({origin}): install it and source its set_env.sh"
        )
    # Recent releases keep the library below a folder named after the machine.
    if not any(home.glob("lib64/libascendcl.so")) and not any(
        home.glob("*-linux/lib64/libascendcl.so")
    ):
        return Finding(
            reason=f"the CANN toolkit has no libascendcl.so ({origin}): install the complete "
            "toolkit, or point ASCEND_HOME_PATH at it"
        )
    return Finding(versions={"cann": _cann_version(home)})


def _cann_version(home: Path) -> str:
    for path in (home / "version.cfg", *sorted(home.glob("*-linux/ascend_toolkit_install.info"))):
        if path.is_file():
            numbers = re.search(r"\d+\.\d+[.\w]*", path.read_text(encoding="utf-8"))
            if numbers:
                return numbers.group()
    return "unknown version"
