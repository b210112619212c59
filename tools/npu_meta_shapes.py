"""Record what torch_npu's own shape functions say about the calls of the ascend950 backend.

Usage: python tools/npu_meta_shapes.py WHEEL [--out FILE]

The wheel's Meta functions are plain Python; they run here on meta tensors, with stand-ins for the
four modules they import, so neither an NPU nor CANN is needed. Each call is built by the
backend's own function, at a tiny shape and at that of V4.1-Flash. The result is committed, and a
test compares the emulation with it.
"""

from __future__ import annotations

import argparse
import enum
import json
import sys
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.library import Library

from deepinfer_ascend950.operators import NpuOperators

_FUNCTIONS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
_META = "torch_npu/op_plugin/meta/_meta_registrations.py"
_DEFAULT_OUT = Path("tests/data/ascend950/meta_shapes.json")
# torch_npu's names for its dtype codes, as its own documentation gives them.
_CODES = {
    "int4": 285,
    "hifloat8": 290,
    "float8_e5m2": 291,
    "float8_e4m3fn": 292,
    "float8_e8m0fnu": 293,
    "float4_e2m1fn_x2": 296,
    "float4_e1m2fn_x2": 297,
}
Spec = tuple[tuple[int, ...], str]
"""Shape and dtype of a tensor argument."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the JSON; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, default=_DEFAULT_OUT)
    args = parser.parse_args(argv)
    libraries = load_meta_functions(args.wheel)
    calls = [run(name, *case) for name, case in cases().items()]
    found = {"wheel": args.wheel.name, "calls": calls}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for call in calls:
        print(f"{call['name']:<24} {call['operator']:<26} {call['results']}")
    print(f"{len(calls)} calls accepted by {args.wheel.name} -> {args.out}")
    del libraries
    return 0


def load_meta_functions(wheel: Path) -> list[Library]:
    """Define the wheel's operators and their shape functions in this process."""
    with zipfile.ZipFile(wheel) as archive:
        functions, meta = archive.read(_FUNCTIONS).decode(), archive.read(_META).decode()
    _install_stand_ins()
    library = Library("npu", "DEF")
    for entry in yaml.safe_load(functions)["custom"]:
        library.define(str(entry["func"]))
    module = types.ModuleType("npu_meta_registrations")
    exec(compile(meta, _META, "exec"), module.__dict__)
    return [library, module.__dict__["m"], module.__dict__["m_aten"]]


def _install_stand_ins() -> None:
    class ErrCode(enum.Enum):
        """Any error code: only its presence in a message matters."""

        PARAM = TYPE = VALUE = NOT_SUPPORT = INTERNAL = NOT_FOUND = 1

    def module(name: str, **attributes: object) -> None:
        made = types.ModuleType(name)
        made.__dict__.update(attributes)
        sys.modules[name] = made

    module("torch_npu", **_CODES)
    module("torch_npu.utils")
    module("torch_npu.utils._error_code", ErrCode=ErrCode, ops_error=str)
    module("torch_npu.npu")
    module("torch_npu.npu.utils", get_cann_version=lambda *names: "9.0.0")
    module("torch_npu.npu._backends", get_soc_version=lambda: 260)


def cases() -> dict[str, tuple[str, list[Spec | float | int], dict[str, float]]]:
    """Function of `NpuOperators`, its positional and its keyword arguments, by name."""
    found: dict[str, tuple[str, list[Spec | float | int], dict[str, float]]] = {}
    sizes = {
        "tiny": {"T": 5, "D": 128, "K": 192, "N": 64, "E": 6, "k": 2, "G": 4, "C": 64, "I": 96},
        "flash": {
            "T": 256, "D": 5120, "K": 2304, "N": 5120, "E": 384, "k": 6, "G": 8, "C": 4096,
            "I": 1024,
        },
    }  # fmt: skip
    for scale, n in sizes.items():
        rows, width, inner, outputs = n["T"], n["D"], n["K"], n["N"]
        experts, slots, pairs = n["E"], n["T"] * n["k"], -(-n["K"] // 64)
        quantized: list[Spec] = [((slots, inner), "float8_e4m3fn"), ((slots, pairs, 2), "uint8")]
        counts: Spec = ((experts,), "int64")
        streams: Spec = ((rows, 4, width), "bfloat16")
        made: dict[str, tuple[list[Spec | float | int], dict[str, float]]] = {
            "mx_quantize": ([((rows, width), "bfloat16")], {}),
            "mx_matmul": (
                [
                    *quantized,
                    ((outputs, inner), "float8_e4m3fn"),
                    ((outputs, pairs, 2), "uint8"),
                ],
                {},
            ),
            "grouped_w4a8": (
                [
                    *quantized,
                    ((experts, outputs, inner // 2), "uint8"),
                    ((experts, outputs, pairs, 2), "uint8"),
                    counts,
                ],
                {},
            ),
            "grouped_w8a8": (
                [
                    *quantized,
                    ((experts, outputs, inner), "float8_e4m3fn"),
                    ((experts, outputs, pairs, 2), "uint8"),
                    counts,
                ],
                {},
            ),
            "grouped_float": (
                [((slots, inner), "float32"), ((experts, outputs, inner), "float32"), counts],
                {},
            ),
            "block_diagonal": (
                [
                    ((rows, n["G"], n["C"]), "bfloat16"),
                    ((n["G"], n["C"], n["I"]), "bfloat16"),
                ],
                {},
            ),
            "rms_norm": ([((rows, width), "float32"), ((width,), "float32"), 1e-20], {}),
            "mhc_pre": (
                [
                    streams,
                    ((24, 4 * width), "float32"),
                    ((3,), "float32"),
                    ((24,), "float32"),
                ],
                {"norm_eps": 1e-20, "hc_eps": 1e-6},
            ),
            "mhc_sinkhorn": ([((rows, 4, 4), "float32"), 1e-6, 20], {}),
            "mhc_post": (
                [
                    streams,
                    ((rows, 4, 4), "float32"),
                    ((rows, width), "bfloat16"),
                    ((rows, 4), "float32"),
                ],
                {},
            ),
            "permute": ([((rows, width), "bfloat16"), ((rows, n["k"]), "int64")], {}),
            "combine": ([((slots, width), "float32"), ((rows, n["k"]), "int32")], {}),
            "put_rows": ([((64, 528), "int8"), ((rows,), "int64"), ((rows, 528), "int8")], {}),
        }
        for function, (positional, keywords) in made.items():
            found[f"{function}:{scale}"] = (function, positional, keywords)
    return found


def run(
    name: str, function: str, positional: list[Spec | float | int], keywords: dict[str, float]
) -> dict[str, Any]:
    """What the Meta function of the called operator returns."""
    seen: list[tuple[str, Any]] = []

    def call(operator: str, *args: object, **kwargs: object) -> object:
        result = getattr(torch.ops.npu, operator)(*args, **kwargs)
        seen.append((operator, result))
        return result

    arguments = [
        torch.empty(value[0], dtype=getattr(torch, value[1]), device="meta")
        if isinstance(value, tuple)
        else value
        for value in positional
    ]
    getattr(NpuOperators(call), function)(*arguments, **keywords)
    ((operator, result),) = seen
    results = result if isinstance(result, tuple | list) else (result,)
    return {
        "name": name,
        "function": function,
        "arguments": [list(value) if isinstance(value, tuple) else value for value in positional],
        "keywords": keywords,
        "operator": operator,
        "results": [_described(value) for value in results],
    }


def _described(value: Tensor | None) -> list[object] | None:
    if value is None:
        return None
    return [list(value.shape), str(value.dtype).removeprefix("torch.")]


if __name__ == "__main__":
    raise SystemExit(main())
