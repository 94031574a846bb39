"""Names of saved tensors. ``include``, ``exclude`` and policies match them, as they match the names of modules."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from ..errors import ConfigError
from ..policy import CHECKPOINT_INPUT
from ..runtime.untraced import untraced
from .owners import StorageSet
from .tensors import storages

_NAMES = StorageSet()
_CHECKPOINTS = frozenset(
    {
        "torch.utils.checkpoint",
        "deepspeed.runtime.activation_checkpointing.checkpointing",
        "megatron.core.tensor_parallel.random",
    }
)
"""Modules with functions that save the inputs of a block that they run again, and nothing else."""
_BETWEEN = ("actoffload.", "torch.autograd.function")
"""Modules with frames between such a function and this module."""


@untraced
def name(tensor: Tensor, name: str) -> Tensor:
    """Name a tensor and every view of it from now on: ``include="tensor:attn_out"`` moves it by that name.

    The name applies when autograd saves the tensor. An operation that saves its own result (``exp``, attention) saves
    it before the program can name it. The name then applies from the next save on, and to that place from the second
    forward on.

    Args:
        tensor: any tensor.
        name: a text that is not empty; a later name replaces an earlier one.

    Returns:
        The same tensor.

    Raises:
        ConfigError: ``tensor`` is no tensor, or ``name`` is no text.
    """
    if not isinstance(tensor, Tensor):
        raise ConfigError("tensor", tensor, "name() takes a tensor")
    if not isinstance(name, str) or not name:
        raise ConfigError("name", name, "give a text that is not empty")
    for storage in storages(tensor):
        _NAMES.by_number.pop(storage._cdata, None)
    _NAMES.add(tensor, name)
    return tensor


def name_of(storage: torch.UntypedStorage, *, only_boundaries: bool = False) -> str | None:
    """Return a saved tensor's name, or None. With ``only_boundaries`` only `CHECKPOINT_INPUT` is a name."""
    known = None if only_boundaries else _NAMES.by_number.get(storage._cdata)
    if known is not None:
        return known[1]
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    return CHECKPOINT_INPUT if frame.f_globals.get("__name__") in _CHECKPOINTS else None
