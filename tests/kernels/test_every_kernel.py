"""The small choice of cases really launches every kernel."""

from __future__ import annotations

import pytest
from triton.runtime import interpreter as triton_interpreter

from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer.device.samples import build_arguments
from deepinfer_conformance.observe import run_op
from deepinfer_cuda_sm100.plugin import deepinfer_create_backend
from deepinfer_kernels.compile import kernel_files
from tests.kernels.every_kernel import every_kernel_cases


def test_every_kernel_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    every = {
        f"{module.__name__}.{case.kernel}"
        for module in kernel_files()
        for case in module.COMPILE_CASES
    }
    launched: set[str] = set()
    launch = triton_interpreter.GridExecutor.__call__

    def counted(executor, *arguments: object, **named: object) -> None:
        launched.add(f"{executor.fn.__module__}.{executor.fn.__name__}")
        launch(executor, *arguments, **named)

    monkeypatch.setattr(triton_interpreter.GridExecutor, "__call__", counted)
    backends = {
        numerics: deepinfer_create_backend(
            BackendConfig("cuda_sm100", numerics, {"interpret": True})
        )
        for numerics in Numerics
    }
    cases = every_kernel_cases()
    for case in cases:
        arguments = build_arguments(case.spec, case.sample, case.numerics)
        run_op(backends[case.numerics], case.spec, arguments)
    assert launched == every
    assert len(cases) < 150  # what a sanitizer gets done in its time
