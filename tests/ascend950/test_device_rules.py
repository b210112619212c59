"""What a CPU would not notice: ops that read the device on the host, or forget where they are.

Every op case runs under a mode that watches torch itself. Tensors made without a device would
be on the CPU; here they are on `meta`, where no value can come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer.device.numerics import Numerics
from deepinfer.device.ops import load_all
from deepinfer_ascend950.backend import Ascend950Backend
from deepinfer_ascend950.calls import NpuCalls
from deepinfer_ascend950.emulation.calls import EmulatedCalls
from deepinfer_conformance.run import Truth, run_ops

Emulate = Callable[..., Ascend950Backend]
HOST_READS = {
    "aten._local_scalar_dense",  # item, int, bool, if
    "aten.nonzero",
    "aten.masked_select",
    "aten.bincount",
    "aten.unique_dim",
    "aten._unique2",
}
# The table lies in host memory, so its row numbers have to get there; see ops/engram.py.
READS_ON_PURPOSE = {"engram_fetch_wait"}


class BrokenRule(AssertionError):
    """An op did what a device cannot, or would wait for."""


class DeviceRules(TorchDispatchMode):
    """Refuses host reads, boolean indexing and float64 while `active`."""

    active = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        name = str(func._schema.name).replace("::", ".")
        if self.active:
            if name in HOST_READS:
                raise BrokenRule(f"{name} makes the host wait for the device")
            if name in ("aten.index", "aten.index_put", "aten.index_put_"):
                masks = [i for i in args[1] if i is not None and i.dtype is torch.bool]
                if masks:
                    raise BrokenRule(f"{name} with a mask makes the host wait for the device")
        result = func(*args, **(kwargs or {}))
        if self.active and isinstance(result, torch.Tensor) and result.dtype is torch.float64:
            raise BrokenRule(f"{name} gave float64")
        return result


class CallsOutsideTheRules:
    """Emulated calls, to which the rules of a device do not apply: an NPU computes them."""

    def __init__(self) -> None:
        self.inner, self.rules = EmulatedCalls(), DeviceRules()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        before, self.rules.active = self.rules.active, False
        try:
            with torch.device("cpu"):
                yield
        finally:
            self.rules.active = before

    def __call__(self, operator: str, *args: object, **kwargs: object) -> object:
        with self.suspended():
            return self.inner(operator, *args, **kwargs)


def _watched(function: Callable[..., Any], rules: DeviceRules) -> Callable[..., Any]:
    def call(*args: object, **kwargs: object) -> object:
        with torch.device("meta"), rules:
            return function(*args, **kwargs)

    return call


def _watch_every_op(backend: Ascend950Backend, rules: DeviceRules) -> None:
    for name, entry in list(backend.ops._implementations.items()):
        if name not in READS_ON_PURPOSE:
            watched = type(entry)(
                _watched(entry.function, rules), entry.label, entry.reason, entry.layout
            )
            backend.ops._implementations[name] = watched


@pytest.mark.parametrize("numerics", list(Numerics))
def test_ops_stay_on_their_device_and_never_wait(emulate: Emulate, numerics: Numerics) -> None:
    calls = CallsOutsideTheRules()
    backend = emulate(numerics, calls)
    _watch_every_op(backend, calls.rules)
    report = run_ops(backend, Truth.REFERENCE)
    assert "\n".join(failure.explain() for failure in report.failures) == ""


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda x: x[x > 0], "makes the host wait"),
        (lambda x: x * float(x.max()), "_local_scalar_dense"),
        (lambda x: x.double(), "float64"),
    ],
    ids=["mask", "item", "float64"],
)
def test_the_rules_refuse_what_they_name(broken: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(BrokenRule, match=words):
        _watched(broken, DeviceRules())(torch.ones(3))


def test_a_tensor_made_without_its_device_is_noticed() -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        _watched(lambda x: torch.where(x > 0, x, torch.arange(3.0)), DeviceRules())(torch.ones(3))


def test_the_exception_is_an_op() -> None:
    assert set(load_all()) >= READS_ON_PURPOSE


def test_the_calls_are_a_way_to_call_operators() -> None:
    calls: NpuCalls = CallsOutsideTheRules()
    assert callable(calls)
