"""Running the kernels without a GPU, in Triton's interpreter, with the device's rounding.

Triton 3.6 interprets a kernel in numpy when `TRITON_INTERPRET=1` is set before Triton is
imported. Left alone it truncates fp32 to bf16, rounds fp8 half up, computes bf16 on its bit
patterns, keeps NaN where a minimum of the device drops it, and fails on loops with a run-time
bound under numpy 2.4. `enable` corrects all of it and launches without copying arguments. An
interpreting process cannot compile kernels.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

_VARIABLE = "TRITON_INTERPRET"
_SUPPORTED = "3.6."
_TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
_DOT_STEP = 16
_enabled = False


def is_enabled() -> bool:
    """Whether kernels of this process run in the interpreter."""
    return _enabled


def enable() -> None:
    """Make every kernel imported from now on run in the interpreter, on CPU tensors.

    Raises:
        RuntimeError: Triton is already imported for compilation, or is a version whose
            interpreter has not been checked.
    """
    global _enabled
    if _enabled:
        return
    # torch looks for Triton lazily and may have imported it: the variable counts when a kernel
    # is decorated, and Triton's own library functions are decorated when it is imported.
    if "triton" in sys.modules and os.environ.get(_VARIABLE) != "1":
        raise RuntimeError(
            f"Triton was imported before {_VARIABLE}=1 was set, so its library functions are "
            f"compiled ones; start the process with {_VARIABLE}=1 in the environment"
        )
    os.environ[_VARIABLE] = "1"
    import triton

    if not triton.__version__.startswith(_SUPPORTED):
        raise RuntimeError(
            f"Triton {triton.__version__} is installed; the interpreter's corrections were checked "
            f"with {_SUPPORTED}x: pip install 'triton>=3.6,<3.7'"
        )
    _correct()
    _enabled = True


def _as_torch(data: np.ndarray[Any, Any], name: str) -> torch.Tensor:
    """A tensor over the bits that the interpreter keeps for a float type."""
    return torch.from_numpy(np.array(data, order="C")).view(_TORCH_DTYPES[name])


def _convert_float(
    data: np.ndarray[Any, Any], source: Any, target: Any, rounding: object
) -> np.ndarray[Any, Any]:
    """Bits of `data` converted from one float type to another, to nearest even."""
    values = _as_torch(data, source.name).float()
    if target.name.startswith("fp8e4"):
        values = values.clamp(-448.0, 448.0)  # the device saturates; torch would give NaN
    bits = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
    wide = values.to(_TORCH_DTYPES[target.name]).view(bits[target.primitive_bitwidth])
    converted: np.ndarray[Any, Any] = wide.numpy().view(f"uint{target.primitive_bitwidth}")
    return converted


def _correct() -> None:
    """Replace the parts of the interpreter that round or loop wrongly."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    narrow = (tl.bfloat16, tl.float8e4nv, tl.float8e5)

    def widened(handle: Any) -> np.ndarray[Any, Any]:
        if handle.dtype.scalar in narrow:
            return _as_torch(handle.data, handle.dtype.scalar.name).float().numpy()
        data: np.ndarray[Any, Any] = handle.data
        return data

    def dot(self: Any, a: Any, b: Any, d: Any, precision: object, imprecise: object) -> Any:
        left, right = widened(a), widened(b)
        if a.dtype.scalar not in narrow:
            product = np.matmul(left, right, dtype=d.data.dtype)
            return interpreter.TensorHandle(product + d.data, d.dtype.scalar)
        # As tensor cores add: one step of k after the other, whatever the tile's size. Inside a
        # step float64 holds the sum, so that the order of BLAS does not show.
        total = d.data
        for k in range(0, left.shape[-1], _DOT_STEP):
            step = np.s_[k : k + _DOT_STEP]
            product = np.matmul(left[..., step], right[..., step, :], dtype=np.float64)
            total = (total + product).astype(d.data.dtype)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    def refuse_narrow(operation: Any) -> Any:
        def checked(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
            if lhs.dtype.scalar in narrow:
                raise TypeError(
                    f"arithmetic on {lhs.dtype.scalar.name}: kernels compute in fp32 and cast at "
                    "the end; add .to(tl.float32)"
                )
            result = operation(self, lhs, rhs, op)
            if result.data.dtype == np.bool_:
                # A comparison keeps its operands' type otherwise, and a scalar one is then
                # spread over a block as numbers.
                return interpreter.TensorHandle(result.data, tl.int1)
            return result

        return checked

    # Hashing wraps around on purpose, and the check doubles the time of every addition.
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    interpreter._convert_float = _convert_float
    builder.create_dot = dot
    # The device's minimum and maximum drop NaN unless they are told to keep it.
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    builder.binary_op = refuse_narrow(builder.binary_op)
    interpreter.GridExecutor.__call__ = _launch
    interpreter._patch_lang = _patch_language_once(interpreter._patch_lang)


class _Kept:
    """Stands for the scope of a patch that stays."""

    def restore(self) -> None:
        """Nothing: an interpreting process never compiles."""


def _patch_language_once(patch: Any) -> Any:
    """The interpreter patches the language at each call of a function; once is enough here."""
    import triton.language as tl

    patched: list[object] = []
    # The patch looks for the two modules among a function's globals.
    carrier = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def patch_once(function: object) -> _Kept:
        if not patched:
            patched.append(patch(carrier))
            tl.core.tensor.__index__ = lambda self: int(self.handle.data.item())
        return _Kept()

    return patch_once


def _launch(executor: Any, *arguments: Any, **named: Any) -> None:
    """Run a kernel for every program of its grid, one after the other, on tensors in place."""
    from triton.runtime import interpreter

    names = inspect.getfullargspec(executor.fn).args
    named = {name: value for name, value in named.items() if name in names}
    interpreter._patch_lang(executor.fn)
    values = inspect.getcallargs(executor.fn, *arguments, **named)
    converted = {
        name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
        for name, value in values.items()
    }
    grid = (*executor.grid, 1, 1)[:3]
    builder = interpreter.interpreter_builder
    builder.set_grid_dim(*grid)
    # Overflow and NaN are data here, as on the device.
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for x in range(grid[0]):
            for y in range(grid[1]):
                for z in range(grid[2]):
                    builder.set_grid_idx(x, y, z)
                    executor.fn(**converted)
