"""Declaring ops and binding implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepinfer.device import op as op_module
from deepinfer.device.comparison import Exact
from deepinfer.device.errors import CapabilityError, ContractError
from deepinfer.device.op import OpSpec, OpTable, declared_ops, op


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops declared here stay out of the catalogue."""
    monkeypatch.setattr(op_module, "_REGISTRY", {})


@pytest.fixture
def table() -> OpTable:
    return OpTable("toy", device="cpu", dtype="float32")


def _declare_double() -> OpSpec[[int], int]:
    @op(family="toy", compare=Exact())
    def double(x: int) -> int:
        """Twice x."""
        raise NotImplementedError

    return double


def _declare_quadruple(double: OpSpec[[int], int]) -> OpSpec[[int], int]:
    def compose(ops: OpTable) -> Callable[..., Any]:
        inner = ops[double]
        return lambda x: inner(inner(x))

    @op(family="toy", compare=Exact(), compose=compose)
    def quadruple(x: int) -> int:
        """Four times x."""
        raise NotImplementedError

    return quadruple


def test_declared_op_carries_its_contract() -> None:
    spec = _declare_double()
    assert (spec.name, spec.family, spec.doc) == ("double", "toy", "Twice x.")
    assert list(spec.signature.parameters) == ["x"]
    assert spec.compare == {"out": Exact()}
    assert declared_ops() == {"double": spec}


def test_two_ops_of_one_name_are_refused() -> None:
    _declare_double()
    with pytest.raises(ContractError, match="double is declared twice"):
        _declare_double()


def test_op_without_docstring_is_refused() -> None:
    with pytest.raises(ContractError, match="silent has no docstring"):

        @op(family="toy", compare=Exact())
        def silent(x: int) -> int:
            raise NotImplementedError


def test_registered_implementation_is_returned_itself(table: OpTable) -> None:
    spec = _declare_double()

    @table.implements(spec)
    def double(x: int) -> int:
        return 2 * x

    assert table[spec] is double
    assert spec in table


def test_implementation_with_other_parameter_names_is_refused(table: OpTable) -> None:
    spec = _declare_double()
    with pytest.raises(ContractError, match=r"takes \['y'\], the contract says \['x'\]"):

        @table.implements(spec)
        def double(y: int) -> int:
            return 2 * y


def test_second_implementation_is_refused(table: OpTable) -> None:
    spec = _declare_double()
    table.implements(spec)(lambda x: 2 * x)
    with pytest.raises(ContractError, match="double is implemented twice"):
        table.implements(spec)(lambda x: x + x)


def test_missing_op_is_refused_with_op_dtype_and_device(table: OpTable) -> None:
    spec = _declare_double()
    with pytest.raises(CapabilityError, match="toy/double for float32 on device cpu"):
        table[spec]
    assert spec not in table


def test_composite_op_is_built_from_its_parts(table: OpTable) -> None:
    double = _declare_double()
    quadruple = _declare_quadruple(double)
    table.implements(double)(lambda x: 2 * x)
    assert table[quadruple](3) == 12
    assert table[quadruple] is table[quadruple]


def test_own_implementation_of_a_composite_op_is_preferred(table: OpTable) -> None:
    double = _declare_double()
    quadruple = _declare_quadruple(double)
    table.implements(double)(lambda x: 2 * x)
    table.implements(quadruple)(lambda x: 40 * x)
    assert table[quadruple](3) == 120


def test_composite_op_with_a_missing_part_names_both(table: OpTable) -> None:
    quadruple = _declare_quadruple(_declare_double())
    with pytest.raises(CapabilityError, match=r"toy/quadruple is composed.*toy/double"):
        table[quadruple]


def test_explain_tells_implemented_composed_and_missing(table: OpTable) -> None:
    double = _declare_double()
    _declare_quadruple(double)

    @op(family="toy", compare=Exact())
    def absent(x: int) -> int:
        """Nobody has it."""
        raise NotImplementedError

    table.implements(double, reason="fast")(lambda x: 2 * x)
    choices = {choice.op: (choice.implementation, choice.reason) for choice in table.explain()}
    assert choices["toy/absent"][0] == "-"
    assert choices["toy/double"][1] == "fast"
    assert choices["toy/quadruple"][0] == "composed"
