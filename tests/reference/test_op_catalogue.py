"""Every op of the catalogue has samples, a naive truth and a reference implementation."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpSpec
from deepinfer.device.ops import load_all
from deepinfer.device.samples import build_arguments, samples_of
from deepinfer_conformance.cases import op_cases
from deepinfer_conformance.naive import has_truth, truth_of
from deepinfer_reference.backend import build_op_table

EVERY_OP = [pytest.param(spec, id=name) for name, spec in sorted(load_all().items())]


@pytest.mark.parametrize("spec", EVERY_OP)
def test_op_has_samples_in_both_modes(spec: OpSpec[..., Any]) -> None:
    modes = {numerics for sample in samples_of(spec) for numerics in sample.numerics}
    assert modes == set(Numerics)


@pytest.mark.parametrize("spec", EVERY_OP)
def test_op_has_a_naive_truth_with_its_parameters(spec: OpSpec[..., Any]) -> None:
    assert has_truth(spec)
    found = list(inspect.signature(truth_of(spec)).parameters)
    assert found == list(spec.signature.parameters)


@pytest.mark.parametrize("numerics", Numerics)
@pytest.mark.parametrize("spec", EVERY_OP)
def test_op_is_on_the_reference(spec: OpSpec[..., Any], numerics: Numerics) -> None:
    assert spec in build_op_table(numerics)


@pytest.mark.parametrize("spec", EVERY_OP)
def test_samples_give_the_arguments_of_the_contract(spec: OpSpec[..., Any]) -> None:
    required = {
        name
        for name, parameter in spec.signature.parameters.items()
        if parameter.default is inspect.Parameter.empty
    }
    for sample in samples_of(spec):
        given = set(build_arguments(spec, sample, Numerics.EXACT))
        assert required <= given <= set(spec.signature.parameters), sample.name


@pytest.mark.parametrize("spec", EVERY_OP)
def test_op_is_sampled_without_rows(spec: OpSpec[..., Any]) -> None:
    names = [sample.name for sample in samples_of(spec)]
    assert any("n=0" in name or name.startswith("zero_") for name in names)


def test_case_ids_are_unique_and_select_themselves() -> None:
    ids = [case.case_id for case in op_cases()]
    assert len(ids) == len(set(ids))
    assert next(case.case_id for case in op_cases(ids[7])) == ids[7]


def test_query_selects_by_prefix_and_by_pattern() -> None:
    by_prefix = {case.spec.name for case in op_cases("ops/norm/")}
    by_pattern = {case.spec.family for case in op_cases("*:exact,n=1")}
    assert by_prefix == {"rmsnorm"}
    assert {"norm", "moe", "kv"} <= by_pattern
