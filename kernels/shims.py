"""The three shims of Triton's interpreter; ``kvproof.kernels.interpreter`` says what for.

Import it through ``use_interpreter`` only.  Works with Triton 3.6, 3.7 and 3.9.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as ti

from kvproof.kernels import speed
from kvproof.kernels.interpreter import InterpreterError

Array = NDArray[Any]

TORCH_FLOAT8: dict[str, torch.dtype] = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
"""Triton's name of a float8 type: torch's type of the same format."""

FLOAT8_MAX: dict[str, float] = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
"""Largest finite value, to which a cast saturates (PTX: ``cvt.rn.satfinite``)."""

RAW = frozenset(("bf16", *TORCH_FLOAT8))
"""Types that the interpreter keeps as bare bits, since numpy lacks them."""

QUIET_NAN = 0x7FC00000
MARK_SHIFT, MARKS = 16, 0x3F
"""Where the sanitizer marks a float32 NaN (``kvproof.kernels.sanitizer.poison``)."""

FLOAT8_NAN, FLOAT8_MARKED_NAN, MARK_OF_FLOAT8 = 0x7F, 0xFF, 63
"""A NaN of either float8 type, and the one that stands for marked ones, whatever their mark."""


def _float8_values(dtype: torch.dtype) -> Array:
    values: Array = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32).numpy()
    bits = np.where(np.isnan(values), QUIET_NAN, values.view(np.uint32)).astype(np.uint32)
    bits[FLOAT8_MARKED_NAN] |= MARK_OF_FLOAT8 << MARK_SHIFT
    return bits.view(np.float32)


FLOAT8_VALUES: dict[str, Array] = {
    name: _float8_values(dtype) for name, dtype in TORCH_FLOAT8.items()
}
"""The float32 value of each of the 256 patterns."""

COMPARISONS: frozenset[object] = frozenset(
    (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)
)
BITWISE: frozenset[object] = frozenset((np.bitwise_and, np.bitwise_or, np.bitwise_xor))


def decode(bits: Array, name: str) -> Array:
    """The float32 values of raw ``bits`` (uint16 or uint8, any shape) of the type ``name``."""
    if name != "bf16":
        return FLOAT8_VALUES[name][bits]
    return (bits.astype(np.uint32) << 16).view(np.float32).reshape(bits.shape)


def encode(values: Array, name: str) -> Array:
    """The bits of ``values`` (floating, any shape) in the type ``name``, rounded to nearest even.

    float8 saturates, also infinity.  A NaN stays a NaN, and a marked one stays marked.
    """
    values = np.ascontiguousarray(values, dtype=np.float32).reshape(np.shape(values))
    if name == "bf16":
        wide = values.view(np.uint32)
        rounded = (wide + np.uint32(0x7FFF) + ((wide >> 16) & 1)) >> 16
        return np.where(np.isnan(values), (wide >> 16) | 0x40, rounded).astype(np.uint16)
    finite = np.atleast_1d(np.clip(values, -FLOAT8_MAX[name], FLOAT8_MAX[name]))
    bits = torch.from_numpy(finite).to(TORCH_FLOAT8[name]).view(torch.uint8).numpy()
    marked = (values.view(np.uint32) >> MARK_SHIFT) & MARKS
    nan = np.where(marked, FLOAT8_MARKED_NAN, FLOAT8_NAN).astype(np.uint8)
    return np.where(np.isnan(values), nan, bits.reshape(values.shape))


def _scalar(handle: Any) -> str:
    """The name of the element type of a tensor handle."""
    return str(handle.dtype.scalar.name)


def _values(handle: Any) -> Array:
    """What a handle holds, as numbers that numpy can work with."""
    name = _scalar(handle)
    data: Array = handle.data
    return decode(data, name) if name in RAW else data


def _converted(source: Any, target_type: Any) -> Any:
    target = target_type.scalar
    values = _values(source)
    if target.name in RAW:
        return ti.TensorHandle(encode(values, target.name), target)
    return ti.TensorHandle(values.astype(ti._get_np_dtype(target)), target)


def _product(a: Array, b: Array) -> Array:
    """The product of two tiles in float32, each element added up in the same way.

    BLAS treats a row by where it stands in the tile, so that moving a row changes its last bits;
    no GPU does that, and a kernel whose rows do not depend on each other would seem to be wrong.
    """
    a, b = a.astype(np.float32, copy=False), b.astype(np.float32, copy=False)
    result: Array
    if a.ndim == 2:
        result = np.einsum("ik,jk->ij", np.ascontiguousarray(a), np.ascontiguousarray(b.T))
    else:
        result = np.matmul(a, b)
    return result


def _numerics(builder: Any, reductions: Any) -> None:
    """Replace what computes on the bits of bfloat16 and float8 by what computes on values."""
    cast, fp_to_fp = builder.cast_impl, builder.create_fp_to_fp
    unary, binary, dot = builder.unary_op, builder.binary_op, builder.create_dot

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if _scalar(source) in RAW or target.scalar.name in RAW:
            return _converted(source, target)
        return cast(self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        nearest = rounding is None or rounding == ti._ir.ROUNDING_MODE.RTNE
        if nearest and (_scalar(source) in RAW or target.scalar.name in RAW):
            return _converted(source, target)
        return fp_to_fp(self, source, target, rounding)

    def binary_op(self: Any, left: Any, right: Any, op: Callable[[Array, Array], Array]) -> Any:
        name = _scalar(left)
        if name not in RAW or op in BITWISE:
            return binary(self, left, right, op)
        result = op(_values(left), _values(right))
        if op in COMPARISONS:
            return ti.TensorHandle(result, tl.int1)
        return ti.TensorHandle(encode(result, name), left.dtype.scalar)

    def unary_op(self: Any, argument: Any, op: Callable[[Array], Array]) -> Any:
        name = _scalar(argument)
        if name not in RAW:
            return unary(self, argument, op)
        return ti.TensorHandle(encode(op(_values(argument)), name), argument.dtype.scalar)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        name = _scalar(z)
        if name not in RAW:
            return ti.TensorHandle(x.data * y.data + z.data, z.dtype.scalar)
        return ti.TensorHandle(encode(_values(x) * _values(y) + _values(z), name), z.dtype.scalar)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        left, right = _values(a), _values(b)
        if left.dtype.kind != "f" or d.data.dtype.itemsize > 4:
            return dot(self, a, b, d, *options)
        return ti.TensorHandle(_product(left, right).astype(d.data.dtype) + d.data, d.dtype.scalar)

    def get_bf16(self: Any, value: float) -> Any:
        return ti.TensorHandle(encode(np.array([value], np.float32), "bf16"), tl.bfloat16)

    # maxNum and minNum of IEEE 754-2008, as on the GPU: of a NaN and a number, the number.
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    for operation in (cast_impl, create_fp_to_fp, unary_op, binary_op, create_fma, create_dot):
        setattr(builder, operation.__name__, operation)
    builder.get_bf16 = get_bf16
    _reductions(reductions)


def _reductions(reductions: Any) -> None:
    """Sum, maximum and minimum of bfloat16 and float8 over values, not over bits."""
    plain_sum, plain_min_max = reductions.sum, reductions.min_max

    def widened(argument: Any) -> Any:
        name = _scalar(argument.handle)
        handle = ti.TensorHandle(decode(argument.handle.data, name), tl.float32)
        return tl.core.tensor(handle, tl.block_type(tl.float32, list(handle.data.shape)))

    def narrowed(result: Any, element: Any) -> Any:
        handle = ti.TensorHandle(encode(result.handle.data, element.name), element)
        kind = element if not result.type.is_block() else tl.block_type(element, result.shape)
        return tl.core.tensor(handle, kind)

    def sum_(self: Any, argument: Any) -> Any:
        if argument.dtype.scalar.name not in RAW:
            return plain_sum(self, argument)
        return narrowed(plain_sum(self, widened(argument)), argument.dtype.scalar)

    def min_max(self: Any, argument: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        argument = argument[0] if isinstance(argument, tuple) else argument
        # nanmax warns of a row of NaN; fmax gives the same and does not.
        quiet = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}
        ops = quiet.get(val_reduce_op, val_reduce_op), idx_reduce_op
        if argument.dtype.scalar.name not in RAW:
            return plain_min_max(self, argument, *ops)
        result = plain_min_max(self, widened(argument), *ops)
        if isinstance(result, tuple):
            return narrowed(result[0], argument.dtype.scalar), result[1]
        return narrowed(result, argument.dtype.scalar)

    reductions.sum, reductions.min_max = sum_, min_max


def _index() -> None:
    """Let a tensor of one element be a loop bound: Triton 3.6 asks numpy for what 2.4 refuses."""
    patch = ti._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    ti._patch_lang_tensor = patched


PARTS: tuple[tuple[object, str], ...] = (
    (ti, "_patch_lang _patch_lang_tensor _patch_attr _LangPatchScope"),
    (ti, "_get_np_dtype interpreter_builder"),
    (TritonSemantic, "broadcast_impl_value"),
    (ti.ReduceOps, "sum min_max"),
    (ti.InterpreterBuilder, "cast_impl create_fp_to_fp unary_op binary_op create_fma create_dot"),
    (ti.InterpreterBuilder, "create_maxnumf create_minnumf create_assert"),
    (ti.InterpreterBuilder, "set_grid_idx set_grid_dim"),
    (ti.InterpreterBuilder, "create_masked_load create_masked_store"),
    (ti.InterpreterBuilder, "create_atomic_rmw create_atomic_cas"),
)
"""What the shims and the sanitizer replace or rely on."""


def _require() -> None:
    """Refuse an interpreter that has lost one of its parts: what replaces it had no effect."""
    lost = [name for owner, names in PARTS for name in names.split() if not hasattr(owner, name)]
    if lost:
        raise InterpreterError(
            f"the interpreter of Triton {triton.__version__} has no {', '.join(lost)}: "
            "kvproof knows the interpreters of 3.6, 3.7 and 3.9"
        )


_installed = False


def install() -> None:
    """Install the three shims, once per process."""
    global _installed
    if _installed:
        return
    _require()
    _numerics(ti.InterpreterBuilder, ti.ReduceOps)
    _index()
    speed.install()
    _set_options(sanitize_overflow=False)
    _installed = True


def _set_options(**options: bool) -> None:
    builder = ti.interpreter_builder
    builder.options = dataclasses.replace(builder.options, **options)


@contextmanager
def overflow_checks() -> Iterator[None]:
    """Switch on the interpreter's own test of 32-bit integer results."""
    before = ti.interpreter_builder.options
    _set_options(debug=True, sanitize_overflow=True)
    try:
        yield
    finally:
        ti.interpreter_builder.options = before


@contextmanager
def shuffled_order(seed: int) -> Iterator[None]:
    """Map each program that the interpreter is about to run to another of the same launch."""
    builder = ti.InterpreterBuilder
    plain = builder.set_grid_idx
    orders: dict[tuple[int, ...], list[int]] = {}

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        grid = tuple(int(n) for n in self.grid_dim)
        if grid not in orders:
            orders[grid] = list(range(grid[0] * grid[1] * grid[2]))
            random.Random(f"{seed} {grid}").shuffle(orders[grid])
        program = orders[grid][(x * grid[1] + y) * grid[2] + z]
        row, z = divmod(program, grid[2])
        plain(self, *divmod(row, grid[1]), z)

    builder.set_grid_idx = set_grid_idx
    try:
        yield
    finally:
        builder.set_grid_idx = plain
