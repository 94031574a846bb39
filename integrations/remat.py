"""torch_remat: moves the tensors that its checkpoints keep, and raises if other hooks would hide these tensors.

    attachment = actoffload.integrations.remat.attach(model, target="nvme", path="/mnt/nvme0")

torch_remat calls the hooks around a ``remat.checkpoint`` for the inputs of the region, for the tensors that its SAVE
regions save, and for the outputs of these that the recomputation in backward needs.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from actoffload import Attachment, offload_activations
from actoffload.errors import ConfigError

try:
    from torch_remat import _api
    from torch_remat._region import _state
except ImportError as error:
    raise ImportError(f"needs torch_remat, tested with 0.2.2 (pip install actoffload[remat]): {error}") from error

_inside = contextvars.ContextVar("inside", default=False)
"""Whether the forward of an attached module runs."""


def attach(module: nn.Module, **options: Any) -> Attachment:
    """As `actoffload.attach`, for a module with ``remat.checkpoint`` in its forward.

    A forward raises a `ConfigError` if torch_remat gets other hooks, or if the forward runs in a ``remat.checkpoint``.

    Raises:
        ConfigError: ``module`` is attached already, ``recompute`` is set, or an option cannot work.
    """
    if Attachment.of(module) is not None:
        raise ConfigError("module", type(module).__name__, "is attached already: first detach()")
    if options.get("recompute"):
        remedy = "the regions of torch_remat say what runs again: leave it out"
        raise ConfigError("recompute", options["recompute"], remedy)
    _watch_hooks()
    return _RematAttachment(module, offload_activations(model=module, **options).offloader)


class _RematAttachment(Attachment):
    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Before our hooks are installed: torch_remat's checkpoint captured the hooks around it, and ours inside would
        # be the innermost ones, so it would never see the tensors that it has to keep.
        if _state.get() is not None:
            remedy = "it runs in a remat.checkpoint, whose hooks ours would hide: "
            remedy += "attach a module around that, and choose with include="
            raise ConfigError("module", type(self.module).__name__, remedy)
        token = _inside.set(True)
        try:
            return super().run(function, *args, **kwargs)
        finally:
            _inside.reset(token)


@functools.cache
def _watch_hooks() -> None:
    """Once: raise if torch_remat, in an attached forward, gets a pair of hooks other than the pair around it."""
    # torch_remat looks this name up at each call, so a replacement reaches every checkpoint. Only an attached forward
    # is checked: elsewhere the program's hooks are its own business.
    kind = _api._SavedTensorsHooks

    def checked(pack: Any, unpack: Any, *rest: Any) -> Any:
        # Identity of the pack hook, not equality of owners: another offloader's hooks would hide ours just as well.
        around = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if _inside.get() and (around is None or around[0] is not pack):
            remedy = "of nested hooks only the innermost act: leave this pair out, or detach the module around it"
            raise ConfigError("saved_tensors_hooks", getattr(pack, "__qualname__", pack), remedy)
        return kind(pack, unpack, *rest)

    _api._SavedTensorsHooks = checked
