"""Multiply-accumulates of the op calls that a model really makes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from deepinfer.device.op import OpSpec, OpTable, declared_ops
from deepinfer.device.ops import load_all
from deepinfer.model.config import V41Config

Work = Callable[[Mapping[str, Any], Any], int]


class WorkCounter:
    """An op table whose calls are counted while `running`; it reads tensors of the device then.

    Attributes:
        macs: multiply-accumulates so far, by op.
        running: whether calls are counted.
    """

    def __init__(self, ops: OpTable, config: V41Config) -> None:
        """Wrap a table.

        Args:
            ops: of the backend; what a composed op calls inside is not counted again.
            config: of the model that will call them.
        """
        self.macs: Counter[str] = Counter()
        self.running = False
        load_all()
        self.ops = OpTable(ops.backend, device=ops.device, dtype=ops.dtype)
        counted = _work_of(config)
        for spec in declared_ops().values():
            if spec in ops:
                self._wrap(spec, ops[spec], counted.get(spec.name))

    @property
    def total(self) -> int:
        """Multiply-accumulates of all ops."""
        return sum(self.macs.values())

    def _wrap(
        self, spec: OpSpec[..., Any], function: Callable[..., Any], work: Work | None
    ) -> None:
        if work is None:
            self.ops.implements(spec)(function)
            return

        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            result = function(*args, **kwargs)
            if self.running:
                arguments = spec.signature.bind(*args, **kwargs).arguments
                self.macs[spec.name] += work(arguments, result)
            return result

        self.ops.implements(spec)(call)


def _work_of(config: V41Config) -> dict[str, Work]:
    """Work of a call by op, from its arguments and its result."""

    def linear(arguments: Mapping[str, Any], result: Tensor) -> int:
        return result.numel() * int(arguments["weight"].in_features)

    def grouped(arguments: Mapping[str, Any], result: Tensor) -> int:
        return result.numel() * int(arguments["x"].shape[-1])

    def gate(arguments: Mapping[str, Any], _: object) -> int:
        return int(arguments["x"].numel()) * int(arguments["weight"].out_features)

    def experts(arguments: Mapping[str, Any], _: object) -> int:
        # Known at dispatch already; slots may be padded, rows sent are not.
        rows = int(arguments["valid"].sum()) * int(arguments["routing"].ids.shape[1])
        return rows * 3 * config.hidden_size * config.moe_intermediate_size

    def mixing(arguments: Mapping[str, Any], _: object) -> int:
        return int(arguments["streams"].shape[0]) * int(arguments["weights"].fn.numel())

    def attention(arguments: Mapping[str, Any], _: object) -> int:
        slots = (arguments["window_slots"], arguments["compressed_slots"])
        keys = sum(int((value >= 0).sum()) for value in slots if value is not None)
        return 2 * keys * config.num_attention_heads * config.head_dim

    def index(arguments: Mapping[str, Any], _: object) -> int:
        plan = arguments["plan"]
        if plan.max_visible <= plan.topk:
            return 0
        return int(plan.visible.sum()) * config.index_n_heads * config.index_head_dim

    return {
        "linear": linear,
        "linear_f32": linear,
        "grouped_linear": grouped,
        "moe_gate": gate,
        "moe_dispatch": experts,
        "mhc_mix": mixing,
        "mhc_boundary": mixing,
        "sparse_attention": attention,
        "index_select": index,
    }
