"""Names for saved tensors, by which ``include``, ``exclude`` and policies choose them beside the names of modules."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from ..errors import ConfigError
from ..policy import CHECKPOINT_INPUT
from ..runtime.identity import StorageSet
from ..runtime.untraced import untraced

_NAMES = StorageSet()
_CHECKPOINTS = frozenset(
    {
        "torch.utils.checkpoint",
        "deepspeed.runtime.activation_checkpointing.checkpointing",
        "megatron.core.tensor_parallel.random",
    }
)
"""Modules whose functions save the inputs of a block that they run again, and nothing else."""
_BETWEEN = ("actoffload.", "torch.autograd.function")
"""Modules whose frames lie between such a function and ours."""


@untraced
def name(tensor: Tensor, name: str) -> Tensor:
    """Give a tensor, and every view of it, a name from now on: ``include="tensor:attn_out"`` moves it by that name.

    It counts when autograd saves the tensor. An operation that saves its own result (``exp``, attention) did so before
    there was a name: it is known from the next save on, and at that place from the second forward on.

    Args:
        tensor: any tensor.
        name: any text but an empty one; a later name takes the place of an earlier one.

    Returns:
        The same tensor.

    Raises:
        ConfigError: ``tensor`` is no tensor, or ``name`` no text.
    """
    if not isinstance(tensor, Tensor):
        raise ConfigError("tensor", tensor, "name() takes a tensor")
    if not isinstance(name, str) or not name:
        raise ConfigError("name", name, "give a text that is not empty")
    _NAMES.replace(tensor, name)
    return tensor


def name_of(storage: torch.UntypedStorage, *, only_boundaries: bool = False) -> str | None:
    """The name of a tensor that is being saved: a given one unless ``only_boundaries``, `CHECKPOINT_INPUT`, or None."""
    known = _NAMES.get(storage) if len(_NAMES) and not only_boundaries else None
    if known is not None:
        return known
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    return CHECKPOINT_INPUT if frame.f_globals.get("__name__") in _CHECKPOINTS else None
