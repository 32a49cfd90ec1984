"""The speed shim: Triton's interpreter without what it does over and over.

Most of the time of a launch goes into Python, not into numpy: on decode with tiles of 16 keys,
into patching the language, and into shapes (a shape is checked, and each of its sizes wrapped,
again for each result).  What is remembered here is what such work came to the first time, so that
kernels compute the same, bit for bit, in about a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as ti


def install() -> None:
    """Install the shim; ``kvproof.kernels.shims`` does, once per process."""
    _remember_numpy_types()
    _remember_shapes()
    _compare_at_a_glance()
    ti._patch_attr = _patch_attr
    _Launches()


def _remember_numpy_types() -> None:
    """Untreated, a dictionary of all types is made each time that one is looked up."""
    look_up, known = ti._get_np_dtype, {}

    def numpy_type(kind: Any) -> Any:
        name = kind.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    ti._get_np_dtype = numpy_type


def _remember_shapes() -> None:
    """Types of blocks share their shape, and so do tensors; equal shapes need no broadcast."""
    block_type, tensor, constexpr = tl.core.block_type, tl.core.tensor, tl.core.constexpr
    make_type, make_tensor = block_type.__init__, tensor.__init__
    broadcast, item = TritonSemantic.broadcast_impl_value, tl.core.tuple.__getitem__
    kinds_of_shape, whole = (list, tl.core.tuple), {int}
    shapes: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def shape_of_tensor(kind: Any) -> tuple[Any, Any]:
        made = tensor.__new__(tensor)
        make_tensor(made, None, kind)
        return made.shape, made.numel

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        is_usual = type(shape) in kinds_of_shape
        sizes = tuple([s.value if type(s) is constexpr else s for s in shape]) if is_usual else ()
        if sizes not in shapes or not whole.issuperset(map(type, sizes)):
            make_type(self, element_ty, shape)
            sizes = tuple(self.shape.values)
            shapes[sizes] = (self.shape, self.numel, f"<{self.shape}, ", shape_of_tensor(self))
        self.element_ty = element_ty
        self.shape, self.numel, name, self.of_tensor = shapes[sizes]
        self.name = f"{name}{element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor

    def broadcast_impl_value(self: Any, left: Any, right: Any) -> Any:
        if left.type.is_block() and right.type.is_block() and left.type.shape is right.type.shape:
            return left, right
        return broadcast(self, left, right)

    def getitem(self: Any, index: Any) -> Any:
        return self.values[index] if type(index) is int else item(self, index)

    tl.core.dtype.of_tensor = shape_of_tensor(tl.int32)  # of every type that is no block
    block_type.__init__, tensor.__init__ = init_type, init_tensor
    TritonSemantic.broadcast_impl_value = broadcast_impl_value
    tl.core.tuple.__getitem__ = getitem


def _compare_at_a_glance() -> None:
    """A type equals itself, and a tensor or a number has no constant in it to be unwrapped."""
    core, equal = tl.core, tl.core.dtype.__eq__
    unwrap, plain = core._unwrap_if_constexpr, frozenset((core.tensor, core.dtype, int, float))

    def unwrap_if_constexpr(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    core._unwrap_if_constexpr = unwrap_if_constexpr
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Give a function of the language its semantic, without a copy of the arguments."""
    semantic = getattr(ti, "interpreter_semantic", None) or TritonSemantic(builder)

    def call(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return member(*arguments, **named)

    scope.set_attr(owner, name, call)


class _Launches:
    """Patches the language once per launch; restores it when the launch ends.

    Triton searches it for what to patch at each call of a helper (210 µs for a ``tl.max``), and
    leaves it patched.
    """

    def __init__(self) -> None:
        self.patch, self.launch = ti._patch_lang, ti.GridExecutor.__call__
        self.depth = 0
        self.patched: list[tuple[Any, ...]] = []
        """What functions of this launch see of the language, in the order of their first calls."""
        self.scopes: list[Any] = []
        self.known: dict[tuple[tuple[Any, ...], ...], list[tuple[Any, str, Any]]] = {}
        """The changes that the last of ``patched`` came to, after the others."""
        launches = self

        def patch_lang(function: Any) -> Any:
            return launches.patch_once(function)

        def launch(executor: Any, *arguments: Any, **named: Any) -> Any:
            return launches.run(executor, *arguments, **named)

        ti._patch_lang, ti.GridExecutor.__call__ = patch_lang, launch

    def patch_once(self, function: Any) -> Any:
        if not self.depth:
            return self.patch(function)
        seen = tuple(v for v in function.__globals__.values() if v is tl or v is tl.core)
        if seen not in self.patched:
            self.patched.append(seen)
            self.scopes.append(self.again(lambda: self.patch(function)))
        return ti._LangPatchScope()

    def again(self, patch: Callable[[], Any]) -> Any:
        """A scope with the changes that ``patch`` makes, or made when it was first called here."""
        order = tuple(self.patched)
        if order not in self.known:
            scope = patch()
            self.known[order] = [(owner, n, vars(owner)[n]) for owner, n, _ in scope._changes]
            return scope
        scope = ti._LangPatchScope()
        for owner, name, value in self.known[order]:
            scope.set_attr(owner, name, value)
        return scope

    def run(self, executor: Any, *arguments: Any, **named: Any) -> Any:
        self.depth += 1
        try:
            # A GPU does not warn of exp2 that overflows or of a NaN; neither may numpy, since a
            # test run that turns warnings into errors would stop in the middle of a kernel.
            with np.errstate(all="ignore"):
                return self.launch(executor, *arguments, **named)
        finally:
            self.depth -= 1
            if not self.depth:
                while self.scopes:
                    self.scopes.pop().restore()
                self.patched.clear()
