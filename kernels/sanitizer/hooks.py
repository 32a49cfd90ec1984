"""How the sanitizer gets between a kernel and memory: in Triton's interpreter, while it is on.

Every load, store and atomic of the interpreter ends in one of the operations replaced here, those
of block pointers and tensor descriptors included.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch.overrides import TorchFunctionMode
from triton.runtime import interpreter as ti

from kvproof.kernels.sanitizer.watch import Sanitizer, kernel_location

_EMPTY = frozenset(
    (
        *(torch.empty, torch.empty_like, torch.empty_strided),
        *(torch.Tensor.new_empty, torch.Tensor.new_empty_strided),
    )
)
"""What allocates without writing."""


class Allocations(TorchFunctionMode):
    """Notes which tensors torch has allocated and nothing has written to yet.

    Being written to is told by the function: in place, assignment, ``out=``; and ``numpy()``,
    behind which nothing can be seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fresh: dict[int, torch.Tensor] = {}
        self.on_write: list[Callable[[torch.Tensor], None]] = []

    def is_fresh(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._fresh

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function in _EMPTY:
            # Kept alive, so that its memory cannot become that of another tensor.
            self._fresh[result.untyped_storage().data_ptr()] = result
        elif (written := _written(function, args, kwargs)) is not None:
            self._fresh.pop(written.untyped_storage().data_ptr(), None)
            for notify in self.on_write:
                notify(written)
        return result


def _written(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The tensor that a torch function may write to, or None."""
    if isinstance(kwargs.get("out"), torch.Tensor):
        return kwargs["out"]
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or name in ("__setitem__", "numpy"):
        return args[0] if args and isinstance(args[0], torch.Tensor) else None
    return None


def _tensors(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among a kernel's arguments: also in tuples, descriptors and reinterpreted."""
    found: dict[str, torch.Tensor] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, tuple | list):
            found |= _tensors({f"{name}[{i}]": item for i, item in enumerate(value)})
        elif isinstance(getattr(value, "base", None), torch.Tensor):
            found[name] = value.base
    return found


def _replacements(sanitizer: Sanitizer) -> dict[str, Callable[..., Any]]:
    """The operations of the interpreter with the sanitizer asked first, by name."""
    builder = ti.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas
    unary, affirm, grid = builder.unary_op, builder.create_assert, builder.set_grid_idx

    def create_masked_load(
        self: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any
    ) -> Any:
        element = pointers.get_element_ty()
        kind = ti._get_np_dtype(element)
        good = sanitizer.read(pointers.data, mask.data, kind.itemsize)
        if other is None and not good.all():
            off = ~np.broadcast_to(np.asarray(mask.data, bool), good.shape)
            fill = np.zeros(good.shape, kind)
            if off.any():
                poison = sanitizer.poison.lanes(good.shape, element.name, kind, kernel_location())
                fill = np.where(off, poison, fill)
            other = ti.TensorHandle(fill, element)
        return load(self, pointers, ti.TensorHandle(good, tl.int1), other, *rest, **named)

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        size = ti._get_np_dtype(pointers.get_element_ty()).itemsize
        name = value.dtype.scalar.name
        good = sanitizer.write(pointers.data, value.data, name, mask.data, size)
        return store(self, pointers, value, ti.TensorHandle(good, tl.int1), *rest)

    def create_atomic_rmw(
        self: Any, operation: Any, pointer: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        size = ti._get_np_dtype(pointer.get_element_ty()).itemsize
        good = sanitizer.update(pointer.data, mask.data, size)
        return rmw(self, operation, pointer, value, ti.TensorHandle(good, tl.int1), *rest)

    def create_atomic_cas(self: Any, pointer: Any, expected: Any, value: Any, *rest: Any) -> Any:
        size = ti._get_np_dtype(pointer.get_element_ty()).itemsize
        good = sanitizer.update(pointer.data, np.ones_like(pointer.data, bool), size)
        if not good.all():  # it has no mask: the whole operation is left out
            return ti.TensorHandle(expected.data, expected.dtype.scalar)
        return cas(self, pointer, expected, value, *rest)

    def unary_op(self: Any, argument: Any, operation: Any) -> Any:
        """Of a NaN the very same NaN: numpy's exp would lose the mark of poison."""
        result = unary(self, argument, operation)
        if argument.data.dtype.kind != "f" or argument.data.dtype != result.data.dtype:
            return result
        data = np.where(np.isnan(argument.data), argument.data, result.data)
        return ti.TensorHandle(data, result.dtype)

    def create_assert(self: Any, condition: Any, message: str) -> Any:
        if "overflow detected" not in message:
            return affirm(self, condition, message)
        if not condition.data.all():
            sanitizer.overflowed(message, int(np.sum(~condition.data)))
        return None

    def set_grid_idx(self: Any, *index: int) -> None:
        grid(self, *index)
        x, y, z = self.grid_dim
        sanitizer.before_program(self.grid_idx, (int(x), int(y), int(z)))

    replaced: dict[str, Callable[..., Any]] = {
        function.__name__: function
        for function in (
            *(create_masked_load, create_masked_store, create_atomic_rmw, create_atomic_cas),
            *(unary_op, create_assert, set_grid_idx),
        )
    }
    # Triton 3.9: an atomic load, store or poll is an ordinary one that orders the programs.
    for name in ("create_atomic_load", "create_atomic_store", "create_atomic_poll"):
        if hasattr(builder, name):
            replaced[name] = _ordering(sanitizer, getattr(builder, name))
    return replaced


def _ordering(sanitizer: Sanitizer, operation: Callable[..., Any]) -> Callable[..., Any]:
    def ordered(self: Any, *arguments: Any, **named: Any) -> Any:
        sanitizer.synchronise()
        return operation(self, *arguments, **named)

    return ordered


@contextmanager
def watching(sanitizer: Sanitizer) -> Iterator[None]:
    """Within it, the interpreter asks ``sanitizer`` before it touches memory."""
    builder, launch = ti.InterpreterBuilder, ti.GridExecutor.__call__
    before = {name: getattr(builder, name) for name in _replacements(sanitizer)}

    def watched_launch(self: Any, *arguments: Any, **named: Any) -> Any:
        known = inspect.getfullargspec(self.fn).args
        bound = inspect.getcallargs(
            self.fn, *arguments, **{name: value for name, value in named.items() if name in known}
        )
        sanitizer.before_launch(self.fn.__name__, _tensors(bound))
        return launch(self, *arguments, **named)

    for name, operation in _replacements(sanitizer).items():
        setattr(builder, name, operation)
    ti.GridExecutor.__call__ = watched_launch
    try:
        yield
    finally:
        ti.GridExecutor.__call__ = launch
        for name, operation in before.items():
            setattr(builder, name, operation)
