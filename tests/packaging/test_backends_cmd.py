"""`deepinfer backends` as a user calls it."""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from deepinfer.cli import main

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


def figures(path: Path, *arguments: str) -> dict[str, Any]:
    """Return the figures that the command writes with the given arguments."""
    assert main(["backends", "--json", str(path), *arguments]) == 0
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["figures"]
    return found


def test_every_in_tree_backend_is_listed_with_reasons_unless_available(tmp_path: Path) -> None:
    backends = {entry["name"]: entry for entry in figures(tmp_path / "out.json")["backends"]}
    assert backends["reference"]["available"]
    assert backends["reference"]["distribution"].startswith("deepinfer-hal ")
    assert not backends["ascend950"]["available"]
    assert "no Ascend NPU" in backends["ascend950"]["reasons"][0]
    cuda = backends["cuda_sm100"]
    assert cuda["available"] is not bool(cuda["reasons"])  # this machine may have a GPU


def test_options_of_the_chosen_backend_reach_its_probe(tmp_path: Path) -> None:
    arguments = ("--backend", "ascend950", "--set", "backend.options.emulated=true")
    found = figures(tmp_path / "out.json", *arguments)["backends"]
    (ascend,) = [entry for entry in found if entry["name"] == "ascend950"]
    assert ascend["available"]
    assert "emulating" in ascend["device"]


def test_table_marks_the_chosen_backend_and_prints_reasons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["backends"]) == 0
    text = capsys.readouterr().out
    assert "→ reference" in text
    assert "ascend950 is not available:" in text
    assert "no Ascend NPU" in text


def test_explain_gives_implementation_and_reason_of_each_op(tmp_path: Path) -> None:
    ops = figures(tmp_path / "out.json", "--explain")["ops"]
    assert ops
    assert all(choice["op"] and choice["implementation"] and choice["reason"] for choice in ops)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton exists for Linux only")
def test_explain_says_that_kernels_are_interpreted(run_python: RunPython, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code = (
        "from deepinfer.cli import main\n"
        "assert main(['backends', '--explain', '--backend', 'cuda_sm100', '--set',\n"
        f"  'backend.options.interpret=true', '--json', {str(out)!r}]) == 0\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    ops = json.loads(out.read_text(encoding="utf-8"))["figures"]["ops"]
    reasons = {choice["op"]: choice["reason"] for choice in ops}
    assert "interpreted on the CPU" in reasons["quant/linear"]
    assert "torch index_select" in reasons["quant/embed"]
    assert "missing" not in " ".join(reasons.values())


def test_assumed_backend_is_explained_without_its_device(tmp_path: Path) -> None:
    ops = figures(tmp_path / "out.json", "--explain", "--assume", "ascend950")["ops"]
    choices = {choice["op"]: choice for choice in ops}
    assert "npu_grouped_matmul" in choices["moe/moe_experts"]["reason"]
    assert "antiquant_scale" in choices["moe/moe_experts"]["layout"]
    assert all(choice["reason"] and choice["implementation"] != "-" for choice in ops)


def test_assuming_without_explaining_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "--assume", "ascend950"]) == 2
    assert "add --explain" in capsys.readouterr().err


def test_backend_without_a_plan_cannot_be_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "--explain", "--assume", "reference"]) == 2
    assert "deepinfer_plan" in capsys.readouterr().err


def test_explain_of_an_unavailable_backend_fails_with_the_reasons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["backends", "--explain", "--backend", "ascend950"]) == 2
    assert "no Ascend NPU" in capsys.readouterr().err


def test_listing_imports_no_torch_and_takes_less_than_a_second(run_python: RunPython) -> None:
    code = (
        "import sys\n"
        "from deepinfer.cli import main\n"
        "assert main(['backends']) == 0\n"
        "heavy = {'torch', 'triton', 'torch_npu', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_python(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    # Processor time, so that a busy machine does not fail the test.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
