"""Pack and unpack single tensors as autograd does, so that a test needs neither a graph nor a private name.

handle = pack(offloader, tensor)
assert torch.equal(unpack(offloader, handle), tensor)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

Context = AbstractContextManager[Any]

_unpack_hooks: WeakKeyDictionary[Context, Callable[[Any], Tensor]] = WeakKeyDictionary()
"""Of each context that has packed something: to enter it again would count as another step."""


@contextmanager
def forward(offloader: Context) -> Iterator[Callable[[Tensor], Any]]:
    """Run the block as one forward; yield what packs a tensor and returns its handle.

    Args:
        offloader: an `Offloader`, or any other context that sets hooks for saved tensors.

    Raises:
        RuntimeError: the context sets no hooks.
    """
    outside = torch._C._autograd._top_saved_tensors_default_hooks(True)
    with offloader:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None or hooks == outside:
            raise RuntimeError("this context sets no hooks for saved tensors")
        pack_hook, _unpack_hooks[offloader] = hooks
        yield pack_hook


def pack(offloader: Context, tensor: Tensor) -> Any:
    """Save ``tensor`` in a forward of its own; return the handle that autograd would hold in its place.

    What was moved takes its room until the handle is deleted.

    Raises:
        RuntimeError: the context sets no hooks.
    """
    with forward(offloader) as save:
        return save(tensor)


def unpack(offloader: Context, handle: Any) -> Tensor:
    """Return the tensor as backward would get it. May be called again, as under ``retain_graph=True``.

    Raises:
        KeyError: ``offloader`` has packed nothing.
    """
    return _unpack_hooks[offloader](handle)


__all__ = ["forward", "pack", "unpack"]
