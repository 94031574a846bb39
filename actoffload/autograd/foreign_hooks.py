"""Finds saved tensors that hooks of the program's own hold: autograd calls such hooks in place of this library's."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..runtime.untraced import untraced
from ..sizes import format_size

_MOST_NODES = 10_000
"""So many nodes are read at most: PyTorch frees a longer chain of such nodes recursively, see `originals.MOST`."""
ADVICE = (
    "saved tensor hooks of the program's own ({}) take {} tensors, {}, of the first forward in place of actoffload's. "
    "These tensors neither move nor count: switch those hooks off, or attach only the modules without them"
)


@untraced
def next_node() -> int:
    """Return the number of the next node that this thread makes."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def held_by_others(output: object, first: int) -> str:
    """Return advice on a forward with this output; "" if no hooks of the program's own hold a tensor of it.

    Args:
        output: with the tensors that the forward has returned.
        first: the `next_node` as the forward began. Earlier nodes are of the program around it.
    """
    found = [one for node in _nodes(output, first) for one in _taken(node)]
    if not found:
        return ""
    owners = ", ".join(dict.fromkeys(owner for owner, _ in found))
    return ADVICE.format(owners, len(found), format_size(sum(nbytes for _, nbytes in found)))


def _nodes(output: object, first: int) -> Iterator[Any]:
    """Yield the nodes that made an output, from number ``first`` on."""
    left: list[Any] = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    seen: set[Any] = {None}
    while left and len(seen) < _MOST_NODES:
        node = left.pop()
        if node not in seen and node._sequence_nr() >= first:
            seen.add(node)
            yield node
            left.extend(following for following, _ in node.next_functions)


@functools.cache
def _raw_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved"))


def _taken(node: Any) -> Iterator[tuple[str, int]]:
    """Yield, for each tensor of a node that the program's own hooks hold, the hook's name and the bytes it holds."""
    kind: Any = type(node)
    for name in _raw_names(kind):
        with suppress(RuntimeError):  # the node has freed its saved tensors
            raw = getattr(node, name)
            for saved in raw if isinstance(raw, (tuple, list)) else (raw,):
                if (hook := getattr(saved, "unpack_hook", None)) is None:
                    continue
                # This library's hooks hold handles, and those of checkpoints nothing: they compute the tensor again.
                held = [leaf for leaf in tree_leaves(saved.data) if isinstance(leaf, Tensor)]
                if held:
                    owner = getattr(hook, "__qualname__", type(hook).__name__).partition(".<locals>")[0]
                    yield owner.removesuffix(".__init__"), sum(leaf.nbytes for leaf in held)
