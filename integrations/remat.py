"""torch_remat: moves the tensors that its checkpoints keep, and raises in a checkpoint, which would lose them.

    attachment = actoffload.integrations.remat.attach(model, target="nvme", path="/mnt/nvme0")

torch_remat calls the hooks around a ``remat.checkpoint`` for the inputs of the region, for the tensors that its SAVE
regions save, and for the outputs of these that the recomputation in backward needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from actoffload import Attachment, offload_activations
from actoffload.errors import ConfigError

try:
    from torch_remat import _region
except ImportError as error:
    raise ImportError(f"needs torch_remat, tested with 0.2.2 (pip install actoffload[remat]): {error}") from error


def attach(module: nn.Module, **options: Any) -> Attachment:
    """As `actoffload.attach`, for a module with ``remat.checkpoint`` in its forward.

    A forward raises a `ConfigError` if it runs in a ``remat.checkpoint``.

    Raises:
        ConfigError: ``module`` is attached already, ``recompute`` is set, or an option cannot work.
    """
    if Attachment.of(module) is not None:
        raise ConfigError("module", type(module).__name__, "is attached already: first detach()")
    if options.get("recompute"):
        remedy = "the regions of torch_remat say what runs again: leave it out"
        raise ConfigError("recompute", options["recompute"], remedy)
    return _RematAttachment(module, offload_activations(model=module, **options).offloader)


class _RematAttachment(Attachment):
    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Before our hooks are installed: torch_remat's checkpoint captured the hooks around it, and ours inside would
        # be the innermost ones, so it would never see the tensors that it has to keep.
        if _region._state.get() is not None:
            remedy = "it runs in a remat.checkpoint, whose hooks ours would hide: "
            remedy += "attach a module around that, and choose with include="
            raise ConfigError("module", type(self.module).__name__, remedy)
        return super().run(function, *args, **kwargs)
