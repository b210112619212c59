"""Faults that can be planted into kernels, and the op cases that have to notice them.

A mutation replaces a piece of a kernel file's text; the changed file is loaded beside the right
one and bound in its place. Used in the interpreter by `test_planted_mutations.py`, on a GPU by
`benchmarks/gpu/mutations.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from deepinfer.device.numerics import Numerics
from deepinfer_conformance.cases import OpCase, op_cases


class Mutation(NamedTuple):
    """A fault and where it shows.

    Attributes:
        kernel: module of the kernel.
        text: what stands there.
        fault: what is put instead.
        binding: module of the backend's ops that uses it.
        name: attribute of the binding that is replaced: a module, or a function of it.
        query: op cases that have to fail.
    """

    kernel: str
    text: str
    fault: str
    binding: str
    name: str
    query: str


def _of(family: str, kernel: str, text: str, fault: str, query: str, name: str = "") -> Mutation:
    return Mutation(
        f"deepinfer_kernels.{family}.{kernel}_triton", text, fault,
        f"deepinfer_cuda_sm100.ops.{family}", name or f"{kernel}_triton", f"ops/{family}/{query}",
    )  # fmt: skip


MUTATIONS = {
    "norm ignores eps": _of(
        "norm", "rmsnorm", "/ width + eps)", "/ width + 1e-3)", "rmsnorm:*", "rmsnorm"
    ),
    "rotated keys are rounded unasked": _of(
        "attention", "rope", "rounds_mxfp4: bool = False\n", "rounds_mxfp4: bool = True\n",
        "rope:normative,control",
    ),
    "attention forgets the sink": _of(
        "attention", "sparse_attention", "return total + tl.exp(sink - safe)",
        "return total + 0.0 * sink",
        "sparse_attention:normative,control",
    ),
    "attention keeps absent rows": _of(
        "attention", "sparse_attention",
        "scores = tl.where((slot >= 0)[None, :], scores * scale, float(\"-inf\"))",
        "scores = scores * scale", "sparse_attention:normative,window=0,1,W-1,W",
    ),
    "a tile of keys is not added": _of(
        "attention", "sparse_attention", "for tile in tl.range(num_tiles,",
        "for tile in tl.range(num_tiles - 1,", "sparse_attention:normative,control",
    ),
    "old output is not rescaled": _of(
        "attention", "sparse_attention", "tl.fma(a0, decay, ", "tl.fma(a0, 1.0, ",
        "sparse_attention:normative,n=36",
    ),
    "outputs of tiles are not rescaled": _of(
        "attention", "sparse_attention", "tl.fma(acc, decay, ", "tl.fma(acc, 1.0, ",
        "sparse_attention:normative,topk=*",
    ),
    "store writes slot 0 for skipped rows": _of(
        "kv", "store", "    if slot >= 0:", "    slot = tl.maximum(slot, 0)\n    if slot >= 0:",
        "rope_store:normative,slot=-1",
    ),
    "entries ignore missing blocks": _of(
        "kv", "store", "tl.where(block >= 0, block *",
        "tl.where(entry >= 0, block *",
        "entry_slots:normative,block-not-allocated",
    ),
    "quantiser without floor": _of(
        "quant", "quantize", "scale = a8_scale(x)", "scale = a8_scale(x * 0.5) * 2.0",
        "quantize_a8:*",
    ),
    "quantiser turns NaN into a number": _of(
        "quant", "quantize", "e4m3_code(x * inverse_pow2(scale)).to(tl.float32)",
        "tl.maximum(x * inverse_pow2(scale), -448.0).to(tl.float8e4nv).to(tl.float32)",
        "linear:normative,one-nan",
    ),
    "product drops the last inner tile": _of(
        "quant", "gemm", "for k0 in range(k_begin, k_end, BK):",
        "for k0 in range(k_begin, k_end - BK + 1, BK):", "linear:normative,control", "gemm",
    ),
    "a product of many rows leaves the last columns out": _of(
        "quant", "gemm", "tl.minimum(k_begin + k_per_split, K), BK):",
        "tl.minimum(k_begin + k_per_split, K) - BK + 1, BK):", "linear:normative,n=520", "gemm",
    ),
    "all tiles of weights have the scales of the first": _of(
        "quant", "gemm", "scales = next_scales", "scales = scales",
        "linear:normative,inner=544", "gemm",
    ),
    "a dequantised matrix has the scales of its first group": _of(
        "quant", "gemm", "scale_tile(w_scales_ptr, group, inside, 0, 32, 32)",
        "scale_tile(w_scales_ptr, group * 0, inside, 0, 32, 32)", "linear:normative,n=520", "gemm",
    ),
    "first of the splits is not added": _of(
        "quant", "gemm", "for split in range(SPLITS):", "for split in range(1, SPLITS):",
        "linear:normative,inner=544", "gemm",
    ),
    "experts read the rows of their slots": _of(
        "quant", "gemm", "row if GATHER else slot", "slot", "", "",
    )._replace(
        binding="deepinfer_cuda_sm100.ops.moe", name="expert_gemm",
        query="ops/moe/moe_experts:normative,n=17",
    ),
    "mixing stops one iteration early": _of(
        "mhc", "mix", "for _ in range(1, num_iters):", "for _ in range(2, num_iters):",
        "mhc_mix:normative,iterations=2",
    ),
    "streams are mixed transposed": _of(
        "mhc", "streams", "row * M * M + source * M + target", "row * M * M + target * M + source",
        "mhc_expand:normative,control",
    ),
    "bias weighs the experts": _of(
        "moe", "gate", "tl.where(expert == best, score, 0.0)",
        "tl.where(expert == best, biased, 0.0)",
        "moe_gate:normative,control",
    ),
    "up is clamped on one side": _of(
        "moe", "swiglu", "tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)", "up",
        "swiglu:normative,clamped",
    ),
    "clamp drops NaN": _of(
        "moe", "swiglu", "tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)",
        "tl.maximum(up, -limit)", "swiglu:normative,one-nan",
    ),
    "invalid rows are dispatched": _of(
        "moe", "slots", "mask=inside & valid, other=-1)", "mask=inside, other=-1)",
        "moe_dispatch:normative,invalid-rows",
    ),
    "rows of two requests share keys": _of(
        "indexer", "scores", "(rows > begin) & (seqs != seq)", "(rows > begin) & (seqs != seqs)",
        "index_scores:normative,n=20",
    ),
    "scores skip the relu": _of(
        "indexer", "scores",
        "tl.maximum(_round_bf16(dots), 0.0, propagate_nan=tl.PropagateNan.ALL)",
        "_round_bf16(dots)", "index_scores:normative,control",
    ),
    "ties go to the highest": _of(
        "indexer", "select", "rank <= equal_left", "rank < equal_left", "select_topk:normative,*",
    ),
    "newest block is not kept": _of(
        "indexer", "select", 'tl.where(newest, float("inf"), best)', "best",
        "select_candidates:normative,newest-is-worst",
    ),
    "pairs are read from the ring only": _of(
        "compress", "pair", "in_step = inside & (before >= 0)", "in_step = inside & (before >= 99)",
        "compress_pair:normative,control",
    ),
    "hash forgets dead tokens": _of(
        "engram", "hash", "alive = alive & (token >= 0)", "alive = token >= 0",
        "ngram_hash:normative,*",
    ),
    "engram gate loses its sign": _of(
        "engram", "inject", "tl.where(negative, -root, root)", "root",
        "engram_inject:normative,control",
    ),
    "a draft is accepted whatever the drafter says": _of(
        "spec", "verify", "(u * proposed < target)", "(u < target)",
        "verify_drafts:normative,drafter-is-target",
    ),
    "what the drafter had is not taken off": _of(
        "spec", "verify", "tl.exp(z - best) / total - q", "tl.exp(z - best) / total",
        "verify_drafts:normative,one-hot",
    ),
    "the token after a refused draft is a bonus": _of(
        "spec", "verify", "tl.where(refused, _RESIDUAL, tl.where(accepted > 0, _BONUS, _SAMPLE))",
        "tl.where(accepted > 0, _BONUS, _SAMPLE)", "verify_drafts:normative,drafter-far-off",
    ),
    "nucleus is one token short": _of(
        "sampling", "sample", "reached < wanted", "reached + weight < wanted",
        "filter_logits:normative,top_p",
    ),
    "the last of equal parts is taken": _of(
        "sampling", "sample", "return top, tl.min(tl.where(value == top, place, 0x7FFFFFFF)",
        "return top, tl.max(tl.where(value == top, place, -1)", "sample_tokens:normative,*",
    ),
    "draws use another column's number": _of(
        "sampling", "sample", "position, purpose, start, COLUMNS)",
        "position, purpose, start + 4, COLUMNS)",
        "sample_tokens:normative,*",
    ),
    "equal drafts are admitted in the order of requests": _of(
        "spec", "admit", "earlier | (same_place & (other_seq < seq)[None, :])",
        "(other_seq < seq)[None, :]", "admit_drafts:normative,*",
    ),
    "window is one row short": _of(
        "state", "plans", "readable = valid & (key >=", "readable = valid & (key >",
        "window_plan:*",
    ),
}  # fmt: skip


def planted(mutation: Mutation, folder: Path) -> ModuleType:
    """The kernel's module with the fault in it; the text has to stand there."""
    right = importlib.import_module(mutation.kernel)
    assert right.__file__ is not None
    source = Path(right.__file__).read_text()
    assert mutation.text in source, f"{mutation.kernel} has changed: update the mutation"
    path = folder / "planted.py"
    path.write_text(source.replace(mutation.text, mutation.fault))
    spec = importlib.util.spec_from_file_location("planted_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["planted_kernel"] = module
    spec.loader.exec_module(module)
    return module


def plant(mutation: Mutation, folder: Path, put: Callable[[ModuleType, str, object], None]) -> None:
    """Load the kernel with the fault in it and bind it in the right one's place.

    Args:
        mutation: the fault.
        folder: where the changed file is written.
        put: sets an attribute of a module, for example `setattr`.
    """
    module = planted(mutation, folder)
    binding = importlib.import_module(mutation.binding)
    whole = mutation.name.endswith("_triton")
    put(binding, mutation.name, module if whole else getattr(module, mutation.name))


def cases_of(mutation: Mutation) -> list[OpCase]:
    """The op cases of which at least one has to fail; never none."""
    cases = [case for case in op_cases(mutation.query) if case.numerics is Numerics.NORMATIVE]
    assert cases, f"{mutation.query} selects no case: update the mutation"
    return cases
