"""Questions about one tensor that is saved: its kind, its parts, and the bytes of its storage that it needs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from ..runtime.identity import Counter

PLAIN_TYPES = frozenset({Tensor, nn.Parameter, nn.Buffer})

SPAN_ALIGNMENT = 512
"""Spans begin at multiples of this many bytes, so that a restored view has its old address modulo 512."""


def byte_span(tensor: Tensor, storage_bytes: int) -> tuple[int, int]:
    """Return the bytes ``[begin, end)`` of its storage that a strided view needs, widened to be worth one move.

    A view that spans half of its storage or more stands for the whole storage, so that its other views (query, key and
    value of a fused projection) share one copy. A smaller view stands for its own span, from a multiple of 512 on.

    Args:
        tensor: any strided tensor with at least one element.
        storage_bytes: the size of its storage.
    """
    itemsize = tensor.element_size()
    begin = int(tensor.storage_offset()) * itemsize
    reach = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        reach += (int(size) - 1) * int(stride)
    end = begin + reach * itemsize
    if 2 * (end - begin) >= storage_bytes:
        return 0, storage_bytes
    begin -= begin % SPAN_ALIGNMENT
    return begin, min(storage_bytes, -(-end // SPAN_ALIGNMENT) * SPAN_ALIGNMENT)


def is_parameter(tensor: Tensor) -> bool:
    """Return whether a saved tensor is a parameter, another leaf that requires grad, or a view of either.

    A Linear saves ``weight.t()``, which is no ``Parameter``, but its ``_base`` is. The local tensor of a DTensor that
    holds an activation looks like such a leaf, but its base is no leaf.
    """
    base = tensor._base
    wanted = tensor.requires_grad
    if base is None:
        return (wanted and tensor.is_leaf) or _says_parameter(tensor)
    if base.is_leaf and (base.requires_grad or (wanted and tensor.is_leaf)):
        return True
    return _says_parameter(base)


def _says_parameter(tensor: Tensor) -> bool:
    """Return ``isinstance(tensor, nn.Parameter)``, without that slow call for a plain tensor."""
    kind = type(tensor)
    return kind is not Tensor and (kind is nn.Parameter or isinstance(tensor, nn.Parameter))


def own_counter(tensor: Tensor) -> tuple[Counter, ...]:
    """Return a counter of its own for a tensor that may be the local tensor of a DTensor, or a view of it; else ().

    An in-place change of the DTensor bumps the DTensor's version alone, so local tensors of equal versions may differ.
    A tensor that is taken out of a DTensor is a view of its local tensor, which has no history. (Never read ``grad_fn``
    here: a graph whose nodes have Python objects is freed recursively, and a deep one ends the process.)
    """
    base = tensor._base
    if base is None or "torch.distributed.tensor" not in sys.modules:
        return ()
    if not (dist.is_available() and dist.is_initialized()):
        return ()
    # PyTorch marks a view that a Function made, and `to_local` is a Function: such a view may be of a DTensor.
    autograd = torch._C._autograd
    plain = base.requires_grad and autograd._get_creation_meta(tensor) == autograd.CreationMeta.DEFAULT
    return () if plain else (Counter(torch.empty(0), 0),)


def inner_names(tensor: Any) -> list[str]:
    """Return the names of a wrapper subclass's inner tensors; a DTensor also lists its mesh, which is left out."""
    return [name for name in tensor.__tensor_flatten__()[0] if isinstance(getattr(tensor, name), Tensor)]


def inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors inside a wrapper subclass (DTensor, NF4, jagged, ...), or the tensor itself."""
    if type(tensor) in PLAIN_TYPES or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in inner_names(tensor):
        yield from inner_tensors(getattr(tensor, name))


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor and its inner tensors; a sparse, meta or lazy tensor has none."""
    for inner in inner_tensors(tensor):
        if is_lazy(inner):
            continue
        with contextlib.suppress(NotImplementedError, RuntimeError):
            yield inner.untyped_storage()


def storage_numbers(tree: Any) -> set[int]:
    """Return the numbers (``_cdata``) of the storages of all tensors in a tree."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {storage._cdata for tensor in tensors for storage in storages(tensor)}
