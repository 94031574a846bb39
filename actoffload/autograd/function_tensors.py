"""Tensors that custom autograd functions hold as attributes of ``ctx``, where no hook sees them."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Container

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from ..runtime.identity import storages


def held_by_functions(static: Container[int], device_types: Container[str]) -> Counter[str]:
    """Return the bytes of them, by the function's name: of every graph that is alive now, each storage once.

    Python's garbage collector is asked for all of its objects, which takes some tens of milliseconds.

    Args:
        static: numbers of storages that live anyway.
        device_types: other devices do not count.
    """
    held: Counter[str] = Counter()
    seen: set[int] = set()
    for node in gc.get_objects():
        if not issubclass(type(node), BackwardCFunction):
            continue
        for value in tree_leaves(vars(node)):
            if not isinstance(value, Tensor) or value.device.type not in device_types:
                continue
            for storage in storages(value):
                if storage._cdata not in seen and storage._cdata not in static:
                    seen.add(storage._cdata)
                    held[type(node).__name__.removesuffix("Backward")] += storage.nbytes()
    return held
