"""Extract the operator schemas that the ascend950 backend calls from a torch_npu wheel.

Usage: python tools/npu_schemas.py WHEEL [--out FILE]

WHEEL comes from `pip download --no-deps torch-npu==VERSION`; nothing of it is imported, so
neither an NPU nor CANN is needed. The result is committed: the backend's calls are checked
against it wherever they are made.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

_FUNCTIONS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
_META = "torch_npu/op_plugin/meta/_meta_registrations.py"
_DEFAULT_OUT = Path("backends/ascend950/deepinfer_ascend950/schema/signatures.json")
OPERATORS = (
    "npu_dynamic_mx_quant",
    "npu_grouped_matmul",
    "npu_mhc_post",
    "npu_mhc_pre",
    "npu_mhc_sinkhorn",
    "npu_moe_finalize_routing",
    "npu_moe_token_permute",
    "npu_quant_matmul",
    "npu_rms_norm",
    "npu_scatter_nd_update_",
    "npu_transpose_batchmatmul",
)
# The map of storage dtypes in the wheel has no entry for this scale format.
_E8M0 = (293, "uint8")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the JSON; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, default=_DEFAULT_OUT)
    args = parser.parse_args(argv)
    with zipfile.ZipFile(args.wheel) as archive:
        texts = schema_texts(archive.read(_FUNCTIONS).decode())
        codes = dtype_codes(archive.read(_META).decode())
    missing = [name for name in OPERATORS if name not in texts]
    if missing:
        parser.error(f"{args.wheel.name} has no schema of {', '.join(missing)}")
    found = {
        "wheel": args.wheel.name,
        "version": args.wheel.name.split("-")[1],
        "sha256": hashlib.sha256(args.wheel.read_bytes()).hexdigest(),
        "dtype_codes": {str(code): name for code, name in sorted(codes.items())},
        "operators": {name: describe(texts[name]) for name in OPERATORS},
    }
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{len(OPERATORS)} schemas, {len(codes)} dtype codes -> {args.out}")
    return 0


def schema_texts(functions: str) -> dict[str, str]:
    """Schema text of every custom operator without an overload name, by operator."""
    entries: list[dict[str, Any]] = yaml.safe_load(functions)["custom"]
    texts = (str(entry["func"]) for entry in entries)
    return {text.split("(")[0]: text for text in texts if "." not in text.split("(")[0]}


def dtype_codes(meta: str) -> dict[int, str]:
    """Torch storage dtype of every dtype code that operators take as an integer."""
    name = "TORCH_DTYPE_ENUM_VALUE_TO_SCALAR_TYPE_MAP"
    for node in ast.parse(meta).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            pairs = zip(node.value.keys, node.value.values, strict=True)  # type: ignore[attr-defined]
            codes = {int(key.value): str(value.attr) for key, value in pairs}
            return {**codes, _E8M0[0]: _E8M0[1]}
    raise SystemExit(f"{_META} has no {name}: the wheel's layout changed")


def describe(text: str) -> dict[str, Any]:
    """Arguments and returns of one schema."""
    schema = torch._C.parse_schema(f"npu::{text}")
    return {
        "schema": text,
        "arguments": [
            {
                "name": argument.name,
                "type": plain_type(str(argument.type)),
                "keyword_only": argument.kwarg_only,
                "required": not argument.has_default_value(),
            }
            for argument in schema.arguments
        ],
        "returns": len(schema.returns),
    }


def plain_type(text: str) -> str:
    """`Optional[List[Tensor]]` as the schema language writes it: `Tensor[]?`."""
    suffix = ""
    while text.endswith("]"):
        outer, _, text = text.partition("[")
        text = text[:-1]
        suffix = {"Optional": "?", "List": "[]"}[outer] + suffix
    return text + suffix


if __name__ == "__main__":
    raise SystemExit(main())
