"""The shims of Triton's interpreter compute what a GPU computes: every pattern, every operation.

A Triton that changes its interpreter, so that a shim has no effect any more, fails here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch

from kvproof.kernels.interpreter import (
    InterpreterError,
    checking_overflow,
    is_interpreting,
    shuffled_programs,
)

if not is_interpreting():
    pytest.skip("with a GPU the kernels are compiled", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime import interpreter as ti

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
RAW = (torch.bfloat16, *FLOAT8)
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@triton.jit
def copy_kernel(source, target, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + at, tl.load(source + at))


@triton.jit
def cast_kernel(source, target, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))


@triton.jit
def binary_kernel(left, right, target, OP: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(left + at)
    y = tl.load(right + at)
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    elif OP == "mul":
        z = x * y
    elif OP == "less":
        z = tl.where(x < y, x, y)
    elif OP == "fma":
        z = tl.fma(x, y, y)
    elif OP == "twice":
        z = x * 2
    else:
        z = -x
    tl.store(target + at, z)


@triton.jit
def extremum_kernel(left, right, low, high, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(left + at)
    y = tl.load(right + at)
    tl.store(low + at, tl.minimum(x, y))
    tl.store(high + at, tl.maximum(x, y))


@triton.jit
def dot_kernel(a, b, target, N: tl.constexpr):
    at = tl.arange(0, N)
    tile = at[:, None] * N + at[None, :]
    zero = tl.zeros((N, N), dtype=tl.float32)
    tl.store(target + tile, tl.dot(tl.load(a + tile), tl.load(b + tile), zero))


@triton.jit
def reduce_kernel(source, total, high, low, N: tl.constexpr):
    at = tl.arange(0, N)
    tile = tl.load(source + at[:, None] * N + at[None, :])
    tl.store(total + at, tl.sum(tile, 1))
    tl.store(high + at, tl.max(tile, 1))
    tl.store(low + at, tl.min(tile, 1))


@triton.jit
def loop_kernel(bound, target):
    count = 0
    for _ in range(tl.load(bound)):
        count += 1
    tl.store(target, count)


@triton.jit
def product_kernel(left, right, target):
    tl.store(target, tl.load(left) * tl.load(right))


@triton.jit
def last_writer_kernel(target):
    tl.store(target, tl.program_id(0) * 6 + tl.program_id(1) * 2 + tl.program_id(2))


@triton.jit
def visit_kernel(target, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    at = (tl.program_id(0) * B + tl.program_id(1)) * C + tl.program_id(2)
    tl.store(target + at, tl.load(target + at) + 1)


def patterns(dtype):
    """Every bit pattern of a type of one or two bytes."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def rounded(values, dtype):
    """float32 ``values`` rounded to nearest even; float8 saturates (also where torch does not)."""
    if dtype in LARGEST:
        values = values.clamp(-LARGEST[dtype], LARGEST[dtype])
    return values.to(dtype)


def midpoints(dtype):
    """Every value of the type and the middle to the next, one ulp below and above: the ties."""
    values = patterns(dtype).float()
    values = values[values.isfinite()].unique()
    middles = (values[1:].double() + values[:-1].double()).div(2).float()
    infinite = torch.tensor(float("inf"))
    around = [middles, middles.nextafter(infinite), middles.nextafter(-infinite), values]
    flat = torch.cat(around)
    return flat[torch.randperm(len(flat), generator=torch.Generator().manual_seed(1))]


def padded(values):
    """Cut to a power of two, as ``tl.arange`` demands."""
    return values[: 1 << (len(values).bit_length() - 1)].contiguous()


def same(actual, expected) -> bool:
    """Bitwise equal as numbers; a NaN equals a NaN."""
    actual, expected = actual.float(), expected.float()
    equal = (actual == expected) & (actual.signbit() == expected.signbit())
    return bool((equal | (actual.isnan() & expected.isnan())).all())


@pytest.mark.parametrize("dtype", RAW)
def test_every_pattern_reads_as_its_value(dtype) -> None:
    source = patterns(dtype)
    target = torch.empty(len(source), dtype=torch.float32)
    cast_kernel[(1,)](source, target, len(source))
    assert same(target, source)


@pytest.mark.parametrize("dtype", RAW)
def test_every_pattern_survives_a_round_trip(dtype) -> None:
    source = patterns(dtype)
    finite = source.float().isfinite() | (source.float().isinf() & (dtype == torch.bfloat16))
    wide, back = torch.empty(len(source)), torch.empty(len(source), dtype=dtype)
    cast_kernel[(1,)](source, wide, len(source))
    cast_kernel[(1,)](wide, back, len(source))
    assert torch.equal(back[finite].view(torch.uint8), source[finite].view(torch.uint8))
    assert same(back[source.float().isnan()], source[source.float().isnan()])


@pytest.mark.parametrize("dtype", RAW)
def test_a_copy_keeps_the_bits(dtype) -> None:
    source = patterns(dtype)
    target = torch.zeros_like(source)
    copy_kernel[(1,)](source, target, len(source))
    assert torch.equal(source.view(torch.uint8), target.view(torch.uint8))


@pytest.mark.parametrize("dtype", RAW)
def test_casts_round_to_nearest_even_at_every_tie(dtype) -> None:
    values = padded(midpoints(dtype))
    target = torch.empty(len(values), dtype=dtype)
    cast_kernel[(1,)](values, target, len(values))
    assert same(target, rounded(values, dtype))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_saturates_and_keeps_nan(dtype) -> None:
    infinite, largest = float("inf"), LARGEST[dtype]
    values = torch.tensor([infinite, -infinite, 1e30, -1e30, float("nan"), 0.0, -0.0, largest])
    target = torch.empty(8, dtype=dtype)
    cast_kernel[(1,)](values, target, 8)
    expected = torch.tensor(
        [largest, -largest, largest, -largest, float("nan"), 0.0, -0.0, largest]
    )
    assert same(target, expected)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.bfloat16, torch.float16),
        (torch.bfloat16, torch.float64),
        (torch.bfloat16, torch.int32),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float16, torch.bfloat16),
        (torch.float16, torch.float8_e5m2),
        (torch.float64, torch.bfloat16),
        (torch.int32, torch.bfloat16),
        (torch.int64, torch.bfloat16),
        (torch.float8_e5m2, torch.float16),
        (torch.float8_e4m3fn, torch.bfloat16),
    ],
)
def test_casts_between_narrow_types(source, target) -> None:
    values = torch.randn(256, generator=torch.Generator().manual_seed(2)) * 100
    values = values.to(source)
    result = torch.empty(256, dtype=target)
    cast_kernel[(1,)](values, result, 256)
    exact = values.float()
    expected = rounded(exact, target) if target in RAW else exact.to(target)
    assert torch.equal(result.float(), expected.float())


ARITHMETIC = [(torch.bfloat16, op) for op in ("add", "sub", "mul", "less", "neg", "fma", "twice")]
ARITHMETIC += [(dtype, op) for dtype in FLOAT8 for op in ("add", "sub", "mul", "less", "neg")]


@pytest.mark.parametrize(("dtype", "op"), ARITHMETIC)
def test_arithmetic_is_that_of_the_values(dtype, op: str) -> None:
    generator = torch.Generator().manual_seed(3)
    left = rounded(torch.randn(4096, generator=generator) * 3, dtype)
    right = rounded(torch.randn(4096, generator=generator) * 3, dtype)
    result = torch.empty(4096, dtype=dtype)
    binary_kernel[(1,)](left, right, result, op, 4096)
    x, y = left.float(), right.float()
    exact = {
        "add": x + y,
        "sub": x - y,
        "mul": x * y,
        "less": torch.where(x < y, x, y),
        "fma": x * y + y,
        "twice": x * 2,
        "neg": 0 - x,
    }[op]
    # The negative of zero is -0 from Triton 3.9 on, and 0 - 0 = 0 before: adding 0 makes both 0.
    assert same(result.float() + 0.0, rounded(exact, dtype).float() + 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_extrema_pass_over_nan_as_a_gpu_does(dtype) -> None:
    nan = float("nan")
    left = torch.tensor([nan, 1.0, -2.0, nan], dtype=dtype)
    right = torch.tensor([3.0, nan, -3.0, nan], dtype=dtype)
    low, high = torch.empty(4, dtype=dtype), torch.empty(4, dtype=dtype)
    extremum_kernel[(1,)](left, right, low, high, 4)
    assert same(low, torch.tensor([3.0, 1.0, -3.0, nan]))
    assert same(high, torch.tensor([3.0, 1.0, -2.0, nan]))


@pytest.mark.parametrize("dtype", [torch.float16, *RAW])
def test_dot_multiplies_values(dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    a = rounded(torch.randn(32, 32, generator=generator), dtype)
    b = rounded(torch.randn(32, 32, generator=generator), dtype)
    target = torch.empty(32, 32)
    dot_kernel[(1,)](a, b, target, 32)
    exact = a.double() @ b.double()
    # 32 exact products are added in float32: at most 32 roundings of partial sums.
    bound = 32 * 2.0**-24 * (a.double().abs() @ b.double().abs())
    assert ((target.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_dot_does_not_depend_on_its_place(dtype) -> None:
    """BLAS, which the interpreter uses untreated, takes 16 rows as 6 + 6 + 4."""
    generator = torch.Generator().manual_seed(6)
    a, b = (torch.randn(16, 16, generator=generator).to(dtype) for _ in range(2))
    straight, moved = torch.empty(16, 16), torch.empty(16, 16)
    dot_kernel[(1,)](a, b, straight, 16)
    for shift in range(1, 16):
        dot_kernel[(1,)](a.roll(shift, 0).contiguous(), b, moved, 16)
        assert torch.equal(moved.roll(-shift, 0), straight)


@pytest.mark.parametrize("dtype", [torch.float16, *RAW])
def test_reductions_work_on_values(dtype) -> None:
    values = rounded(torch.randn(16, 16, generator=torch.Generator().manual_seed(5)), dtype)
    total, high, low = (torch.empty(16, dtype=dtype) for _ in range(3))
    reduce_kernel[(1,)](values, total, high, low, 16)
    assert same(high, values.float().amax(1))
    assert same(low, values.float().amin(1))
    exact, magnitude = values.double().sum(1), values.double().abs().sum(1)
    error = (total.double() - exact).abs()
    # float16 is added in float16; the others in float32, and rounded once.
    unit = torch.finfo(dtype).eps / 2
    added = unit if dtype is torch.float16 else 2.0**-24
    assert (error <= 16 * added * magnitude + unit * exact.abs() + torch.finfo(dtype).tiny).all()


def test_a_loop_bound_may_be_read_from_memory() -> None:
    target = torch.zeros(1, dtype=torch.int32)
    loop_kernel[(1,)](torch.tensor([7], dtype=torch.int32), target)
    assert target.item() == 7


def test_overflow_wraps_unless_it_is_asked_for() -> None:
    left, right = (torch.tensor([n], dtype=torch.int32) for n in (70_000, 65_536))
    target = torch.zeros(1, dtype=torch.int32)
    product_kernel[(1,)](left, right, target)
    assert target.item() == 70_000 * 65_536 % 2**32
    with checking_overflow(), pytest.raises(Exception, match="int32 overflow"):
        product_kernel[(1,)](left, right, target)
    product_kernel[(1,)](left, right, target)


def test_programs_run_in_another_order_each_exactly_once() -> None:
    grid = (4, 3, 2)
    last = torch.zeros(1, dtype=torch.int32)
    last_writer_kernel[grid](last)
    assert last.item() == 23
    seen = set()
    for seed in range(5):
        with shuffled_programs(seed):
            last_writer_kernel[grid](last)
            visits = torch.zeros(24, dtype=torch.int32)
            visit_kernel[grid](visits, *grid)
        assert (visits == 1).all()
        seen.add(last.item())
    assert len(seen) > 2
    last_writer_kernel[grid](last)
    assert last.item() == 23


def test_the_language_is_put_back_after_a_launch() -> None:
    before = tl.load
    loop_kernel[(1,)](torch.tensor([1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    assert tl.load is before
    with pytest.raises(ti.InterpreterError):
        dot_kernel[(1,)](1.5, 2.5, 3.5, 16)
    assert tl.load is before


def test_no_warning_leaves_a_kernel() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = torch.full((4,), float("inf"))
        binary_kernel[(1,)](values, values, torch.empty(4), "sub", 4)
        nothing = torch.full((16, 16), float("nan"))
        total, high, low = (torch.empty(16) for _ in range(3))
        reduce_kernel[(1,)](nothing, total, high, low, 16)
    assert high.isnan().all()
    assert low.isnan().all()


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )


LANGUAGE = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as ti
if sys.argv[1:]:
    from kvproof.kernels.interpreter import use_interpreter
    use_interpreter()
constexpr, tensor, pointer = tl.constexpr, tl.core.tensor, tl.pointer_type(tl.float16)
scalars = tl.int1, tl.int32, tl.int64, tl.float8e5, tl.bfloat16, tl.float32, pointer
shapes = [1], [16], [constexpr(16), 4], tl.core.tuple([2, 8]), [1, 1, 64]
kinds = [tl.block_type(scalar, shape) for scalar in scalars for shape in [*shapes, *shapes]]
for kind in [*scalars, *kinds]:
    made = tensor(None, kind)
    print(kind, repr(kind), kind.name, kind.mangle(), made.shape, made.shape.type, made.numel)
    print(made.dtype, made.type, kind.is_block() and (kind.shape, kind.shape[0], kind.numel))
print([[one == other for other in kinds + [*scalars, "fp32", 1]] for one in [*kinds, *scalars]])
unwrap = tl.core._unwrap_if_constexpr
values = 1, 2.0, True, constexpr(3), [constexpr(4), 5], (constexpr(6), 7), tl.int8, None
print([unwrap(value) for value in values])
for refused in ([3], [0.5], [], [1 << 30], [16.0], (16,), [constexpr(16.0)], 16):
    for _ in range(2):
        try: print(tl.block_type(tl.int32, refused))
        except Exception as error: print(type(error).__name__, error)
semantic = TritonSemantic(ti.interpreter_builder)
filled = [semantic.full(shape, 1, tl.int32) for shape in ([1, 4], [2, 1], [2, 4], [2, 4], [4, 1])]
for left in filled:
    for right in filled:
        try: print([str(t.type) for t in semantic.broadcast_impl_value(left, right)])
        except ValueError as error: print(error)
"""


def test_the_language_is_what_it_is_without_the_shims() -> None:
    """What the speed shim remembers is what Triton would make anew: every type, shape, refusal."""
    plain, shimmed = run_python(LANGUAGE), run_python(LANGUAGE, "shimmed")
    assert plain.returncode == shimmed.returncode == 0, plain.stderr + shimmed.stderr
    assert plain.stdout == shimmed.stdout
    assert len(plain.stdout.splitlines()) > 150
    assert "must be a power of 2" in plain.stdout


@triton.jit
def doubled(x):
    return tl.math.exp2(x) * 2 + tl.sum(x) * 0


@triton.jit
def helper_kernel(source, target, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + at, doubled(tl.load(source + at)))


def test_every_launch_finds_the_language_patched_and_leaves_it_plain() -> None:
    """In whichever order kernels are launched, and functions of other modules called."""
    source = torch.arange(4.0)
    plain = {name: getattr(tl, name) for name in dir(tl)} | {"tensor.to": tl.core.tensor.to}
    for _ in range(3):
        target, count = torch.empty(4), torch.zeros(1, dtype=torch.int32)
        helper_kernel[(2,)](source, target, 4)
        assert target.tolist() == [2.0, 4.0, 8.0, 16.0]
        loop_kernel[(1,)](torch.tensor([3], dtype=torch.int32), count)
        assert count.item() == 3
        assert plain == {n: getattr(tl, n) for n in dir(tl)} | {"tensor.to": tl.core.tensor.to}


def test_too_late_is_said() -> None:
    code = (
        "import triton.language\n"
        "from kvproof.kernels.interpreter import *\n"
        "try: use_interpreter()\n"
        "except InterpreterError as error: print('refused:', error)\n"
    )
    result = run_python(code)
    assert "refused: triton was imported before" in result.stdout, result.stderr


def test_an_interpreter_that_has_changed_is_refused() -> None:
    code = (
        "import os; os.environ['TRITON_INTERPRET'] = '1'\n"
        "import triton.runtime.interpreter as ti\n"
        "del ti.InterpreterBuilder.create_dot\n"
        "from kvproof.kernels.interpreter import *\n"
        "try: use_interpreter()\n"
        "except InterpreterError as error: print('refused:', error)\n"
    )
    result = run_python(code)
    assert "has no create_dot" in result.stdout, result.stderr


def test_interpreter_error_is_a_runtime_error() -> None:
    assert issubclass(InterpreterError, RuntimeError)
