"""Faults planted into kernels: op conformance has to notice every one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.numerics import Numerics
from deepinfer_conformance.run import run_case
from deepinfer_cuda_sm100.backend import CudaBackend
from deepinfer_cuda_sm100.options import CudaOptions
from deepinfer_reference.backend import ReferenceBackend
from tests.kernels.mutations import MUTATIONS, Mutation, cases_of, plant


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_planted_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mutation: Mutation
) -> None:
    plant(mutation, tmp_path, monkeypatch.setattr)
    options = {"interpret": True}
    config = BackendConfig("cuda_sm100", Numerics.NORMATIVE, options)
    backend = CudaBackend(config, CudaOptions.from_mapping(options))
    reference = ReferenceBackend(
        BackendConfig("reference", Numerics.NORMATIVE, {"runtime": "inline"})
    )
    assert not all(run_case(backend, case, reference).passed for case in cases_of(mutation))
