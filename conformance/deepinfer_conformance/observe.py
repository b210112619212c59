"""From what an op returns or changes to named tensors that can be compared.

Results in a backend's own layout are seen through the ops that follow; parts that the contract
leaves open (padding of plans, order of emitted entries) are brought to one form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from deepinfer.device.backend import Backend
from deepinfer.device.handles import RowCache
from deepinfer.device.op import OpSpec
from deepinfer.device.ops.engram import engram_fetch_wait
from deepinfer.device.ops.moe import moe_combine, moe_experts
from deepinfer.device.runtime import run_on
from deepinfer.device.samples.canonical import CanonicalBatch, CanonicalCache
from deepinfer.device.samples.moe import PROBE_LIMIT, probe_experts
from deepinfer.device.samples.registry import Arguments
from deepinfer_conformance.materialize import Materializer, moved

Outputs = dict[str, Tensor]


def _combined(backend: Backend, slots: object, batch: object, like: Tensor) -> Tensor:
    combine = cast("Callable[..., Tensor]", backend.ops[moe_combine])
    return combine(slots, batch, torch.zeros_like(like))


def _see_through(
    spec: OpSpec[..., Any],
    backend: Backend,
    result: object,
    *,
    arguments: Arguments,
    canonical: Arguments,
) -> object:
    """Results in the backend's own layout, brought back to rows."""
    if spec.name == "engram_fetch_start":
        return backend.ops[engram_fetch_wait](result)
    if spec.name == "moe_dispatch":
        x, physical = arguments["x"], arguments["physical"]
        assert isinstance(x, Tensor)
        assert isinstance(physical, Tensor)
        experts = probe_experts(int(physical.max()) + 1, x.shape[1])
        run = cast("Callable[..., Tensor]", backend.ops[moe_experts])
        slots = run(result, Materializer(backend).value(experts), PROBE_LIMIT)
        return _combined(backend, slots, result, x)
    if spec.name == "moe_experts":
        batch = canonical["batch"]
        assert isinstance(batch, CanonicalBatch)
        like = moved(batch.x, backend.runtime.device)
        return _combined(backend, result, arguments["batch"], like)
    return result


def run_op(backend: Backend, spec: OpSpec[..., Any], canonical: Arguments) -> Outputs:
    """Call a backend's op on canonical arguments, on its compute stream.

    Args:
        backend: the backend under test.
        spec: the op.
        canonical: fresh canonical arguments.

    Returns:
        Named outputs on the CPU: fields of the result and changed arguments.
    Raises:
        DeepInferError: whatever the op refuses.
    """

    def work() -> Outputs:
        arguments = Materializer(backend).arguments(canonical)
        result = backend.ops[spec](**arguments)
        result = _see_through(spec, backend, result, arguments=arguments, canonical=canonical)
        outputs = named_outputs(result)
        for name in spec.mutates:
            outputs[name] = _contents(arguments[name], backend.runtime.device)
        return {name: tensor.cpu() for name, tensor in outputs.items()}

    return normal_form(spec, run_on(backend.runtime.compute_stream, work), canonical)


def run_truth(
    spec: OpSpec[..., Any], truth: Callable[..., object], canonical: Arguments
) -> Outputs:
    """Call a naive truth on canonical arguments; outputs named as `run_op` names them."""
    outputs = named_outputs(truth(**canonical))
    for name in spec.mutates:
        outputs[name] = _contents(canonical[name], torch.device("cpu"))
    return normal_form(spec, outputs, canonical)


def _contents(argument: object, device: torch.device) -> Tensor:
    """Values of a changed argument: a tensor itself, all rows of a cache."""
    if isinstance(argument, Tensor):
        return argument
    if isinstance(argument, CanonicalCache):
        return argument.values
    cache = cast("RowCache", argument)
    return cache.unpack(torch.arange(cache.num_rows, device=device))


def named_outputs(result: object) -> Outputs:
    """Tensors of a result by name: field names, numbers of a plain tuple, or `out`."""
    if result is None:
        return {}
    if isinstance(result, Tensor):
        return {"out": result}
    assert isinstance(result, tuple)
    fields: tuple[str, ...] | None = getattr(result, "_fields", None)
    outputs: Outputs = {}
    for index, value in enumerate(result):
        name = fields[index] if fields else f"out.{index}"
        if isinstance(value, Tensor):
            outputs[name] = value
        else:
            outputs.update(named_outputs(value))
    return outputs


def normal_form(spec: OpSpec[..., Any], outputs: Outputs, canonical: Mapping[str, Any]) -> Outputs:
    """Outputs with what the contract leaves open brought to one form."""
    if spec.name == "window_plan":
        for pair in (("history_from", "history_to"), ("commit_from", "commit_to")):
            skipped = (outputs[pair[0]] < 0) | (outputs[pair[1]] < 0)
            outputs |= {name: outputs[name].masked_fill(skipped, -1) for name in pair}
    elif spec.name == "compress_plan":
        emitted = outputs["emit_rows"] >= 0
        order = torch.argsort(outputs["emit_rows"][emitted])
        for name in ("emit_rows", "entries", "positions", "slots"):
            outputs[name] = outputs[name][emitted][order]
        if canonical["ratio"] > 1:
            rows = canonical["rows"]
            used = (outputs["previous_row"] < 0) & (rows.positions > 0) & rows.valid
            outputs["ring_read"] = outputs["ring_read"].masked_fill(~used, -1)
    elif spec.name == "moe_gate":
        # Best first is checked on the scores; weights are compared expert by expert.
        order = torch.argsort(outputs["ids"], dim=1)
        outputs["weights"] = outputs["weights"].gather(1, order)
    return outputs
