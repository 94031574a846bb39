"""Finds saved tensors that hooks of the program's own took: autograd calls such hooks in place of this library's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..runtime.untraced import untraced
from .hook_stack import OUR_UNPACKS

_COMPUTE_AGAIN = ("torch.utils.checkpoint", "torch_remat")
"""The packages with hooks that hold no tensor: backward computes those tensors again."""
_MOST_NODES = 10_000
"""The search reads no more nodes: PyTorch frees a longer chain of such nodes recursively, see `originals.MOST`."""
ADVICE = (
    "saved tensor hooks of the program's own ({}) take {} tensors of the first forward in place of actoffload's. These "
    "tensors neither move nor count: switch those hooks off, or attach only the modules without them"
)


@untraced
def next_node() -> int:
    """Return the number of the next node that this thread makes."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def taken_by_others(output: object, first: int) -> str | None:
    """Return advice on a forward with this output; "" if it needs none, None if the output has no graph.

    Args:
        output: with the tensors that the forward has returned.
        first: the `next_node` as the forward began. Earlier nodes are of the program around it.
    """
    nodes = list(_nodes(output, first))
    owners = Counter(owner for node in nodes for owner in _taken(node))
    if not owners:
        return "" if nodes else None
    return ADVICE.format(", ".join(owners), owners.total())


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


def _taken(node: Any) -> Iterator[str]:
    """Yield the name of the hook that took it, for each tensor of a node that the program's own hooks took."""
    for name in dir(node):
        if not name.startswith("_raw_saved"):
            continue
        with suppress(RuntimeError):  # the node has freed its saved tensors
            raw = getattr(node, name)
            for saved in raw if isinstance(raw, (tuple, list)) else (raw,):
                hook = getattr(saved, "unpack_hook", None)
                if hook is None or hook in OUR_UNPACKS:
                    continue
                if not str(getattr(hook, "__module__", "")).startswith(_COMPUTE_AGAIN):
                    owner = str(getattr(hook, "__qualname__", None) or type(hook).__name__)
                    yield owner.partition(".<locals>")[0].removesuffix(".__init__")
