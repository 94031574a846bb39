"""torch_remat: what its checkpoints keep is moved, and what would hide that from our hooks is an error.

    attachment = actoffload.integrations.remat.attach(model, target="nvme", path="/mnt/nvme0")

torch_remat hands the hooks around a ``remat.checkpoint`` the inputs of the region, what its SAVE regions save, and
those of their outputs that run again in backward.
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

    A forward raises a `ConfigError` where torch_remat is given other hooks, and if it runs in a ``remat.checkpoint``.

    Raises:
        ConfigError: ``module`` is attached already, ``recompute`` is given, or an option cannot work.
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
        if _state.get() is not None:
            remedy = (
                "it runs in a remat.checkpoint, whose hooks ours would hide: attach a module around that, and choose"
            )
            raise ConfigError("module", type(self.module).__name__, f"{remedy} with include=")
        token = _inside.set(True)
        try:
            return super().run(function, *args, **kwargs)
        finally:
            _inside.reset(token)


@functools.cache
def _watch_hooks() -> None:
    """Once: raise where a pair of hooks other than those around it is handed to torch_remat in an attached forward."""
    kind = _api._SavedTensorsHooks

    def checked(pack: Any, unpack: Any, *rest: Any) -> Any:
        around = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if _inside.get() and (around is None or around[0] is not pack):
            remedy = (
                "of nested hooks only the innermost act: leave this pair out, or do not attach the module around it"
            )
            raise ConfigError("saved_tensors_hooks", getattr(pack, "__qualname__", pack), remedy)
        return kind(pack, unpack, *rest)

    _api._SavedTensorsHooks = checked
