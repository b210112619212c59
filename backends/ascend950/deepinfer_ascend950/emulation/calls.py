"""Calls that are checked against the schemas and computed by the emulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepinfer.device.errors import CapabilityError
from deepinfer_ascend950.emulation.batch_matmul import npu_transpose_batchmatmul
from deepinfer_ascend950.emulation.grouped_matmul import npu_grouped_matmul
from deepinfer_ascend950.emulation.mhc import npu_mhc_post, npu_mhc_pre, npu_mhc_sinkhorn
from deepinfer_ascend950.emulation.moe import npu_moe_finalize_routing, npu_moe_token_permute
from deepinfer_ascend950.emulation.mx_quant import npu_dynamic_mx_quant
from deepinfer_ascend950.emulation.norm import npu_rms_norm
from deepinfer_ascend950.emulation.quant_matmul import npu_quant_matmul
from deepinfer_ascend950.emulation.scatter import npu_scatter_nd_update_
from deepinfer_ascend950.schema.binding import bind
from deepinfer_ascend950.schema.signature import wheel_schemas

EMULATED: Mapping[str, Callable[..., Any]] = {
    operator.__name__: operator
    for operator in (
        npu_dynamic_mx_quant,
        npu_grouped_matmul,
        npu_mhc_post,
        npu_mhc_pre,
        npu_mhc_sinkhorn,
        npu_moe_finalize_routing,
        npu_moe_token_permute,
        npu_quant_matmul,
        npu_rms_norm,
        npu_scatter_nd_update_,
        npu_transpose_batchmatmul,
    )
}

Observer = Callable[[str, Mapping[str, Any], Any], None]
"""Is told of every call: operator, arguments by name, result."""


class EmulatedCalls:
    """Binds every call to its schema, then computes it on the CPU."""

    def __init__(self, observer: Observer | None = None) -> None:
        self.observer = observer

    def __call__(self, operator: str, *args: object, **kwargs: object) -> object:
        """What the operator's documentation says it returns.

        Raises:
            ContractError: the call does not fit the schema or breaks a documented constraint.
            CapabilityError: the operator, or this use of it, is not emulated.
        """
        signature = wheel_schemas().operators.get(operator)
        if signature is None or operator not in EMULATED:
            raise CapabilityError(
                f"{operator} is not emulated; emulated are {', '.join(sorted(EMULATED))}"
            )
        bound = bind(signature, args, kwargs)
        result = EMULATED[operator](**bound)
        if self.observer is not None:
            self.observer(operator, bound, result)
        return result
