"""Looks for what the backend needs, by files and package metadata only: nothing is imported."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from deepinfer.device.probe import Finding, Probe, find_package

_EXTRA = "pip install 'deepinfer-hal[cuda-sm100]'"
_SM100_PRODUCT = re.compile(r"\bG?B[123]00\b")  # B100, B200, B300 and their Grace boards
_SM90_PRODUCT = re.compile(r"\bG?H[12]00\b")  # H100, H200 and their Grace boards


def probe_cuda_sm100(root: Path = Path("/")) -> Probe:
    """Return the state of driver, GPU, torch and kernel packages.

    Args:
        root: folder under which dev and proc are looked for; tests pass one of their own.
    """
    findings = (
        _find_driver(root),
        _find_gpu(root),
        _find_cuda_torch(),
        find_package("triton", distribution="triton", remedy=_EXTRA),
    )
    return Probe.from_findings("cuda_sm100", seam_version=1, findings=findings)


def probe_interpreter() -> Probe:
    """Return the state of what `backend.options.interpret=true` needs: torch and Triton."""
    findings = (
        Finding(device="no GPU: kernels interpreted on the CPU"),
        find_package("torch", distribution="torch", remedy="pip install 'torch>=2.11'"),
        find_package("triton", distribution="triton", remedy=_EXTRA),
    )
    return Probe.from_findings("cuda_sm100", seam_version=1, findings=findings)


def _find_driver(root: Path) -> Finding:
    version_file = root / "proc/driver/nvidia/version"
    if not version_file.is_file():
        if (root / "dev/nvidiactl").exists():  # a sandbox that passes the devices on, not /proc
            return Finding(versions={"nvidia-driver": "unknown version"})
        return Finding(
            reason=f"no NVIDIA driver is loaded ({version_file} is missing): install the driver, "
            "or start the container with GPU access"
        )
    numbers = re.search(r"\b\d+\.\d+(\.\d+)?\b", version_file.read_text(encoding="utf-8"))
    return Finding(versions={"nvidia-driver": numbers.group() if numbers else "unknown version"})


def _find_gpu(root: Path) -> Finding:
    nodes = sorted((root / "dev").glob("nvidia[0-9]*"))
    if not nodes:
        return Finding(
            reason=f"no NVIDIA GPU is visible (no {root / 'dev'}/nvidia0): run on a machine with "
            "an SM100 GPU, start the container with GPU access, or check the kernels on a CPU with "
            "backend.options.interpret=true"
        )
    products = _products(root)
    device = f"{len(nodes)} x {' / '.join(sorted(set(products))) or 'NVIDIA GPU of unknown model'}"
    if any(_SM100_PRODUCT.search(product) for product in products) or not products:
        return Finding(device=device)
    if any(_SM90_PRODUCT.search(product) for product in products):
        return Finding(device=f"{device} (SM90: the same kernels, for checking and measuring)")
    return Finding(
        reason=f"neither an SM100 nor an SM90 GPU is visible, only {device}: this backend is for "
        "B200, GB200, B300 and GB300, and runs on H100 and H200 for checking and measuring",
        device=device,
    )


def _products(root: Path) -> list[str]:
    texts = [
        path.read_text(encoding="utf-8")
        for path in (root / "proc/driver/nvidia/gpus").glob("*/information")
    ]
    models = [re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE) for text in texts]
    return [model.group(1) for model in models if model]


def _find_cuda_torch() -> Finding:
    finding = find_package("torch", distribution="torch", remedy=_EXTRA)
    if finding.reason:
        return finding
    spec = importlib.util.find_spec("torch")
    folders = (spec.submodule_search_locations if spec else None) or []
    # The library decides: a CUDA build from the public index has no "+cu" in its version.
    if any(True for folder in folders for _ in (Path(folder) / "lib").glob("*torch_cuda*")):
        return finding
    return Finding(
        reason=f"torch {finding.versions['torch']} is built without CUDA: install a CUDA build "
        "of torch",
        versions=finding.versions,
    )
