"""Finds tensors that custom autograd Functions hold as attributes of ``ctx``, where no hook sees them."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Container

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from ..runtime.identity import storages


def held_by_functions(static: Container[int], device_types: Container[str]) -> Counter[str]:
    """Return their bytes by the Function's name, over every live graph. Each storage counts once.

    This walks all objects of Python's garbage collector, which takes some tens of milliseconds.

    Args:
        static: numbers of storages that live anyway.
        device_types: the types of device that count.
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
