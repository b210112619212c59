"""Error cases that follow from a contract: each tensor once with a wrong dtype, once a wrong shape.

They are made from the op's first sample, so a new op has them without anybody writing them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from deepinfer.device.contract import TensorContract
from deepinfer.device.errors import ContractError
from deepinfer.device.numerics import Numerics
from deepinfer.device.op import OpSpec
from deepinfer.device.samples.registry import Arguments, Builder, ErrorCase, Sample

_OTHER_DTYPES = {
    torch.int64: torch.int32,
    torch.int32: torch.int64,
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.bool: torch.uint8,
    torch.uint8: torch.int8,
}


def _with_other_dtype(value: Tensor, contract: TensorContract) -> Tensor:
    dtype = torch.int64 if contract.dtype == "float" else _OTHER_DTYPES[value.dtype]
    return value.to(dtype)


def _with_another_axis(value: Tensor, contract: TensorContract) -> Tensor:
    # Any number of leading axes is right for "...": take one of the named ones away instead.
    return value.flatten()[:1].view(()) if contract.axes[0] == "..." else value.unsqueeze(-1)


def _replaced(
    sample: Sample, contract: TensorContract, change: Callable[[Tensor, TensorContract], Tensor]
) -> Builder:
    argument, _, attribute = contract.name.partition(".")

    def build(generator: torch.Generator, numerics: Numerics) -> Arguments:
        arguments = sample.build(generator, numerics)
        value = cast("Any", arguments[argument])
        if attribute:
            wrong = change(getattr(value, attribute), contract)
            return {**arguments, argument: value._replace(**{attribute: wrong})}
        return {**arguments, argument: change(value, contract)}

    return build


def _tensor_in(arguments: Arguments, contract: TensorContract) -> Tensor | None:
    argument, _, attribute = contract.name.partition(".")
    value = arguments.get(argument)
    found = getattr(value, attribute, None) if attribute else value
    # Named tuples in canonical form (packed weights) are no tensors yet.
    return found if isinstance(found, Tensor) else None


def derived_errors(spec: OpSpec[..., Any], sample: Sample) -> tuple[ErrorCase, ...]:
    """Error cases of a primitive op; a composite is refused by its parts.

    Args:
        spec: the op.
        sample: a right call of it.
    """
    if spec.compose is not None:
        return ()
    arguments = sample.build(torch.Generator().manual_seed(0), Numerics.NORMATIVE)
    cases = []
    for contract in spec.tensors:
        if _tensor_in(arguments, contract) is None:
            continue
        kinds = [("shape", _with_another_axis)]
        if contract.dtype is not None:
            kinds.insert(0, ("dtype", _with_other_dtype))
        for kind, change in kinds:
            cases.append(
                ErrorCase(
                    name=f"{kind}:{contract.name}",
                    build=_replaced(sample, contract, change),
                    exception=ContractError,
                    pattern=rf"^{spec.name}: \S+ has {kind} .*; the contract says",
                    numerics=(Numerics.NORMATIVE,),
                )
            )
    return tuple(cases)
