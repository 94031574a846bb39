"""Results of operators in place of running them again: a handle of the open offloader stands for each, and moves.

Dispatch modes run below autograd, where ``detach`` and views do not share the version counter by default. So every use
of a tensor's version goes through `quietly`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as plain
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves

from ..errors import SavedTensorModifiedError
from ..runtime.identity import storages
from .handles import Handle, Wrapped, sharing_counters

ALIASES = frozenset(
    {
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    }
)
"""Views that no schema declares as views."""


@contextmanager
def quietly() -> Iterator[None]:
    """A context in which no mode sees our operations, and an alias shares the version counter of its tensor."""
    with _disable_current_modes(), sharing_counters():
        yield


class Cached:
    """One cached tensor: the handle that stands for it."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def counter(self) -> Tensor:
        """Return a tensor that shares the version counter of the cached tensor."""
        if isinstance(self.handle, Handle):
            return self.handle.probe
        counter: Tensor = self.handle.counter.probe if isinstance(self.handle, Wrapped) else self.handle.alias
        return counter

    def value(self) -> Tensor:
        """Return the cached tensor, bit for bit, and without a graph, as an operation below autograd returns it.

        Raises:
            SavedTensorModifiedError: it was changed in place.
            StorageReadError: it could not be read back.
        """
        with quietly():
            try:
                tensor: Tensor = self.handle.unpack()
            except SavedTensorModifiedError as error:
                raise SavedTensorModifiedError(
                    f"Tensor cached during selective activation checkpoint has been mutated: {error}"
                ) from error
            return tensor.detach()


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that counts the calls of each operation."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: dict[Any, int] = defaultdict(int)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Treat a call of a compiled function as one operation, as PyTorch's own contexts do."""
        return True

    def __exit__(self, *error: Any) -> None:
        """Leave the stack of modes, also where this mode is not on top: a finalizer may end a checkpoint late."""
        stack = _get_current_dispatch_mode_stack()
        if self not in stack:  # this is another thread's finalizer
            _push_mode(self)
        above = stack[stack.index(self) + 1 :] if self in stack else []
        for _ in above:
            _pop_mode()
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for mode in above:
            _push_mode(mode)

    def _next(self, func: Any, args: Any) -> tuple[Any, int]:
        key = key_of(func, args)
        self._calls[key] += 1
        return key, self._calls[key] - 1


def key_of(func: Any, args: Any) -> Any:
    """Return the key under which calls of an operation count; PyTorch has a rule of its own for compiled regions."""
    rule = getattr(plain, "_sac_storage_key", None)
    return func if rule is None else rule(func, args)


@cache
def is_mutable(func: Any) -> bool:
    """Return whether an operation changes one of its arguments in place."""
    schema = getattr(func, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation changes in place."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return found


def numbers(tree: Any) -> set[int]:
    """Return the numbers (``_cdata``) of the storages of all tensors in a tree."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {storage._cdata for tensor in tensors for storage in storages(tensor)}
