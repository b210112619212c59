"""Calls bind to the schemas of the wheel, and misfits are named."""

from __future__ import annotations

import pytest
import torch

from deepinfer.device.errors import ContractError
from deepinfer_ascend950.calls import schema_differences
from deepinfer_ascend950.schema.binding import bind
from deepinfer_ascend950.schema.signature import wheel_schemas

X = torch.ones(2, 32)
RMS_NORM = wheel_schemas().operators["npu_rms_norm"]
MX_QUANT = wheel_schemas().operators["npu_dynamic_mx_quant"]
GROUPED = wheel_schemas().operators["npu_grouped_matmul"]


def test_positions_and_keywords_bind_to_names() -> None:
    assert set(bind(RMS_NORM, (X, X), {"epsilon": 1})) == {"self", "gamma", "epsilon"}


@pytest.mark.parametrize(
    ("signature", "args", "kwargs", "words"),
    [
        (RMS_NORM, (X,), {}, "argument gamma is missing"),
        (RMS_NORM, (X, X), {"eps": 1e-6}, "unknown argument eps; it has"),
        (RMS_NORM, (X, X, 1e-6), {"epsilon": 1e-6}, "by position and by keyword"),
        (RMS_NORM, (X, X, 1e-6, 1), {}, "4 positional arguments, the schema has 3"),
        (RMS_NORM, (X, "gamma"), {}, r"gamma is 'gamma' \(str\), expected Tensor"),
        (RMS_NORM, (X, X), {"epsilon": None}, "epsilon is None .* expected float"),
        (MX_QUANT, (X,), {"axis": True}, r"axis is True \(bool\), expected int"),
        (MX_QUANT, (X,), {"dst_type": 299}, "dst_type is 299, which is no dtype code"),
        (MX_QUANT, (X, -1), {}, "give .*'axis'.* by keyword"),
        (GROUPED, (X, [X]), {}, "x is a Tensor .* expected Tensor"),
        (GROUPED, ([X], [X]), {"group_list": [1, 2]}, "group_list is .* expected Tensor"),
    ],
)
def test_misfit_is_named(signature: object, args: tuple, kwargs: dict, words: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ContractError, match=words):
        bind(signature, args, kwargs)  # type: ignore[arg-type]


def test_optional_arguments_take_none() -> None:
    assert bind(MX_QUANT, (X,), {"scale_alg": None})["scale_alg"] is None


def test_torch_parses_every_committed_schema_alike() -> None:
    for signature in wheel_schemas().operators.values():
        parsed = torch._C.parse_schema(f"npu::{signature.text}")
        assert [a.name for a in parsed.arguments] == [a.name for a in signature.arguments]
        assert [a.kwarg_only for a in parsed.arguments] == [
            a.keyword_only for a in signature.arguments
        ]
        assert len(parsed.returns) == signature.num_returns


def test_installed_operators_that_differ_are_listed() -> None:
    same = {name: f"npu::{s.text}" for name, s in wheel_schemas().operators.items()}
    assert schema_differences(dict(same)) == []
    changed = {
        **same,
        "npu_mhc_post": None,
        "npu_rms_norm": "npu::npu_rms_norm(Tensor self, Tensor gamma, *, float epsilon) -> Tensor",
    }
    missing, other = sorted(schema_differences(changed))
    assert missing == "npu_mhc_post is missing"
    assert other.startswith("npu_rms_norm is npu::npu_rms_norm(Tensor self, Tensor gamma, *")
