"""What the user marks to stay: tensors with ``keep()``, regions with ``no_offload()``."""

from __future__ import annotations

import threading
from functools import wraps
from typing import Any

from torch import Tensor

from .errors import ConfigError
from .identity import StorageSet
from .scopes import untraced

MARKED = StorageSet()
"""Storages that the user marked with ``keep()``."""


class _Regions(threading.local):
    """How many regions that are left alone each thread is in."""

    depth = 0


REGIONS = _Regions()
OPEN_REGIONS: list[None] = []
"""As many as all threads are in: changed by one operation on a list each, which no other thread can split."""


class no_offload:
    """A region that is left alone: what autograd saves inside it stays. A context manager and a decorator.

    >>> with no_offload():
    ...     pass
    """

    @untraced
    def __enter__(self) -> None:
        OPEN_REGIONS.append(None)
        REGIONS.depth += 1

    @untraced
    def __exit__(self, *exc: object) -> None:
        REGIONS.depth -= 1
        OPEN_REGIONS.pop()

    def __call__(self, function: Any) -> Any:
        """Wrap a function so that it runs inside the region."""

        @wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return wrapped


@untraced
def keep(tensor: Tensor) -> Tensor:
    """This tensor stays, with every view of it, from now on; what was moved before is not brought back.

    Args:
        tensor: any tensor.

    Returns:
        The same tensor.
    """
    if not isinstance(tensor, Tensor):
        raise ConfigError("tensor", tensor, "keep() takes a tensor")
    MARKED.add(tensor, "marked")
    return tensor
