"""A small choice of op cases that launches every kernel, proved by `test_every_kernel.py`.

Tools that slow a GPU down a hundredfold (`benchmarks/gpu/sanitizer.py`) run these alone.
"""

from __future__ import annotations

from deepinfer.device.numerics import Numerics
from deepinfer_conformance.cases import OpCase, matches, op_cases

# Kernels, and forms of them, that the first case of their op does not reach.
_MORE = (
    "ops/attention/sparse_attention:normative,n=36",
    "ops/indexer/index_scores:normative,n=20",
    "ops/indexer/index_select:*,publishes",
    "ops/indexer/index_select:*,restricted",
    "ops/indexer/index_select:*,bound=k",
    "ops/indexer/select_topk:normative,columns=40000",
    "ops/quant/linear:*,inner=544",
    "ops/quant/linear:normative,n=520",
    "ops/sampling/sample_tokens:*,greedy",
)


def every_kernel_cases() -> list[OpCase]:
    """The first case of every op in each numerics mode, and those named above."""
    chosen: list[OpCase] = []
    seen: set[tuple[str, Numerics]] = set()
    for case in op_cases():
        key = (case.spec.name, case.numerics)
        if key not in seen or any(matches(case.case_id, query) for query in _MORE):
            chosen.append(case)
        seen.add(key)
    return chosen
