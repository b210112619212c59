"""Result shapes of the emulation are those of torch_npu's own shape functions.

`tools/npu_meta_shapes.py` recorded them from the wheel; at V4.1-Flash shapes only the calls are
bound again, as their values would take too long here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_ascend950.emulation.calls import EMULATED
from deepinfer_ascend950.operators import NpuOperators
from deepinfer_ascend950.schema.binding import bind
from deepinfer_ascend950.schema.signature import wheel_schemas

RECORDED = json.loads(
    (Path(__file__).parents[1] / "data/ascend950/meta_shapes.json").read_text(encoding="utf-8")
)
TINY = [call for call in RECORDED["calls"] if call["name"].endswith(":tiny")]


def _arguments(call: dict[str, Any], device: str) -> list[Any]:
    return [
        torch.zeros(value[0], dtype=getattr(torch, value[1]), device=device)
        if isinstance(value, list)
        else value
        for value in call["arguments"]
    ]


def _described(results: Any) -> list[Any]:  # noqa: ANN401
    listed = results if isinstance(results, tuple | list) else (results,)
    return [
        None if value is None else [list(value.shape), str(value.dtype).removeprefix("torch.")]
        for value in listed
    ]


def test_recorded_wheel_is_that_of_the_schemas() -> None:
    assert wheel_schemas().version in RECORDED["wheel"]


def test_every_operator_and_every_use_of_it_is_recorded() -> None:
    uses = {name for name in vars(NpuOperators) if not name.startswith("_")}
    assert {call["operator"] for call in RECORDED["calls"]} == set(EMULATED)
    assert {call["function"] for call in RECORDED["calls"]} == uses


@pytest.mark.parametrize("call", TINY, ids=lambda call: call["name"])
def test_emulation_gives_the_recorded_shapes(call: dict[str, Any]) -> None:
    results: list[Any] = []

    def emulate(operator: str, *args: object, **kwargs: object) -> object:
        bound = bind(wheel_schemas().operators[operator], args, kwargs)
        results.append(EMULATED[operator](**bound))
        return results[-1]

    getattr(NpuOperators(emulate), call["function"])(*_arguments(call, "cpu"), **call["keywords"])
    assert _described(results[0]) == call["results"]


@pytest.mark.parametrize("call", RECORDED["calls"], ids=lambda call: call["name"])
def test_call_still_binds_to_the_operator_it_was_recorded_with(call: dict[str, Any]) -> None:
    called: list[str] = []

    def only_bind(operator: str, *args: object, **kwargs: object) -> object:
        bind(wheel_schemas().operators[operator], args, kwargs)
        called.append(operator)
        results = call["results"]
        made = [
            None if r is None else torch.empty(r[0], dtype=getattr(torch, r[1]), device="meta")
            for r in results
        ]
        return made if len(made) > 1 or operator == "npu_grouped_matmul" else made[0]

    getattr(NpuOperators(only_bind), call["function"])(
        *_arguments(call, "meta"), **call["keywords"]
    )
    assert called == [call["operator"]]
