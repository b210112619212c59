"""Running op cases: reports, truths, comparisons chosen, refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from deepinfer.device.backend import Backend
from deepinfer.device.backend_config import BackendConfig
from deepinfer.device.comparison import Exact
from deepinfer.device.errors import ContractError
from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpTable
from deepinfer.device.ops import norm
from deepinfer.device.samples import build_arguments
from deepinfer_conformance import run
from deepinfer_conformance.cases import error_cases, op_cases
from deepinfer_conformance.materialize import Materializer, moved
from deepinfer_conformance.observe import named_outputs
from deepinfer_reference.backend import ReferenceBackend

Backends = dict[Numerics, Backend]


@pytest.fixture
def halved() -> ReferenceBackend:
    """The reference with an rmsnorm that returns half of everything."""
    config = BackendConfig("reference", Numerics.EXACT, {"runtime": "inline"})
    backend = ReferenceBackend(config)
    right = backend.ops[norm.rmsnorm]
    table = OpTable("halved", device="cpu", dtype="float32")

    @table.implements(norm.rmsnorm)
    def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return right(x, weight, eps) / 2.0

    backend.ops = table
    return backend


def test_report_of_a_right_backend_passes(backends: Backends) -> None:
    report = run.run_ops(backends[Numerics.EXACT], query="ops/norm/")
    assert report.passed
    assert report.results[0].case_id == "ops/norm/rmsnorm:exact,control"
    assert all(":exact," in result.case_id for result in report.results)


def test_report_of_a_wrong_backend_names_case_output_and_place(halved: ReferenceBackend) -> None:
    report = run.run_ops(halved, query="ops/norm/rmsnorm:exact,n=1")
    assert not report.passed
    words = report.failures[0].explain()
    assert words.startswith("ops/norm/rmsnorm:exact,n=1 out: error ")
    assert "bound 2, at [0, " in words


def test_missing_op_is_a_failed_case(halved: ReferenceBackend) -> None:
    report = run.run_ops(halved, query="ops/quant/embed:exact,control")
    assert "CapabilityError: backend halved has no implementation" in report.failures[0].explain()


@pytest.mark.parametrize("query", ["ops/norm/", "ops/moe/moe_gate", "ops/indexer/index_select"])
def test_reference_can_be_the_truth(
    monkeypatch: pytest.MonkeyPatch, backends: Backends, query: str
) -> None:
    monkeypatch.setattr(run, "load_backend", ReferenceBackend)
    report = run.run_ops(backends[Numerics.NORMATIVE], run.Truth.REFERENCE, query)
    assert report.results
    assert report.passed


def test_wrong_backend_fails_against_the_reference(
    monkeypatch: pytest.MonkeyPatch, halved: ReferenceBackend
) -> None:
    monkeypatch.setattr(run, "load_backend", ReferenceBackend)
    assert not run.run_ops(halved, run.Truth.REFERENCE, "ops/norm/").passed


def test_sample_may_replace_the_comparison_of_the_contract() -> None:
    seen_through = op_cases("ops/moe/moe_dispatch:exact,control")[0]
    own = op_cases("ops/moe/moe_experts:exact,control")[0]
    assert not isinstance(run.comparison_of(seen_through, "out"), Exact)
    assert run.comparison_of(own, "out") is own.spec.compare["out"]


def test_output_without_comparison_is_refused() -> None:
    case = op_cases("ops/moe/moe_gate:exact,control")[0]
    with pytest.raises(ContractError, match="gave output extra"):
        run.comparison_of(case, "extra")


def test_refusal_as_the_contract_says_is_right(backends: Backends) -> None:
    case = error_cases("ops/kv/rope_store:exact,error=foreign-handle")[0]
    assert run.refusal_fault(backends[Numerics.EXACT], case) == ""


def test_refusal_with_another_message_is_a_fault(backends: Backends) -> None:
    case = error_cases("ops/kv/rope_store:exact,error=foreign-handle")[0]
    other = dataclasses.replace(case, error=dataclasses.replace(case.error, pattern="moon"))
    assert "does not match 'moon'" in run.refusal_fault(backends[Numerics.EXACT], other)


def test_missing_refusal_is_a_fault(backends: Backends) -> None:
    case = error_cases("ops/kv/rope_store:exact,error=foreign-handle")[0]
    right = op_cases("ops/kv/rope_store:exact,control")[0].sample.build
    allowed = dataclasses.replace(case, error=dataclasses.replace(case.error, build=right))
    assert run.refusal_fault(backends[Numerics.EXACT], allowed).startswith("not refused")


def test_moved_tensor_keeps_its_gaps() -> None:
    gapped = torch.arange(12.0).view(3, 4)[:, ::2]
    copy = moved(gapped, torch.device("cpu"))
    assert copy.stride() == gapped.stride()
    assert torch.equal(copy, gapped)
    copy.zero_()
    assert gapped[1, 1] == 6.0


def test_object_given_twice_is_packed_once(backends: Backends) -> None:
    case = op_cases("ops/kv/copy_rows:exact,within-one-cache")[0]
    canonical = build_arguments(case.spec, case.sample, case.numerics)
    made = Materializer(backends[Numerics.EXACT]).arguments(canonical)
    assert made["source"] is made["destination"]


def test_outputs_are_named_by_field_and_by_number() -> None:
    pair = (torch.zeros(1), torch.ones(1))
    assert list(named_outputs(pair)) == ["out.0", "out.1"]
    assert list(named_outputs(pair[0])) == ["out"]
    assert named_outputs(None) == {}


def test_refusal_leaves_the_stream_of_a_backend_usable() -> None:
    backend = ReferenceBackend(BackendConfig("reference", Numerics.EXACT, {"runtime": "thread"}))
    for case in error_cases("ops/kv/rope_store:exact"):
        assert run.refusal_fault(backend, case) == ""
    right = op_cases("ops/kv/rope_store:exact,control")[0]
    assert run.run_case(backend, right, None).passed
    backend.close()
