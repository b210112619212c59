"""The interpreter rounds as the device does; each check fails without the correction."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from deepinfer_kernels import interpreter


@triton.jit
def _cast(x_ptr, out_ptr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + column).to(tl.float32)
    tl.store(out_ptr + column, x.to(out_ptr.dtype.element_ty))


@triton.jit
def _product(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def _bf16_sum(x_ptr, out_ptr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + column)
    tl.store(out_ptr + column, x + x)


@triton.jit
def _count(out_ptr, num_steps, limit):
    total = tl.zeros([1], tl.int32)
    for step in range(0, num_steps, 2):
        total += step
    reached = total >= limit
    spread = tl.full([1], True, tl.int1) & reached
    tl.store(out_ptr + tl.arange(0, 1), tl.where(spread, total, -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_casts_round_to_nearest_even(generator: torch.Generator, dtype: torch.dtype) -> None:
    x = torch.randn(1024, generator=generator) * 4.0
    out = torch.empty(1024, dtype=dtype)
    _cast[(1,)](x, out, BLOCK=1024)
    bits = torch.int16 if dtype is torch.bfloat16 else torch.uint8
    assert torch.equal(out.view(bits), x.to(dtype).view(bits))


def test_bf16_products_are_those_of_the_values(generator: torch.Generator) -> None:
    a, b = (torch.randn(32, 32, generator=generator).bfloat16() for _ in range(2))
    out = torch.empty(32, 32)
    _product[(1,)](a, b, out, SIZE=32)
    assert torch.allclose(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_bf16_arithmetic_is_refused() -> None:
    with pytest.raises(Exception, match=r"compute in fp32"):
        _bf16_sum[(1,)](torch.ones(16).bfloat16(), torch.empty(16).bfloat16(), BLOCK=16)


@pytest.mark.parametrize(("num_steps", "limit", "expected"), [(7, 12, 12), (7, 13, -1), (0, 0, 0)])
def test_loops_and_comparisons_take_run_time_values(
    num_steps: int, limit: int, expected: int
) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    _count[(1,)](out, num_steps, limit)
    assert out.item() == expected


def test_enabling_after_triton_was_imported_for_compiling_is_refused() -> None:
    code = (
        "import os; os.environ.pop('TRITON_INTERPRET', None)\n"
        "import triton\n"
        "from deepinfer_kernels import interpreter\n"
        "interpreter.enable()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "start the process with TRITON_INTERPRET=1" in done.stderr


def test_this_process_interprets() -> None:
    assert interpreter.is_enabled()
