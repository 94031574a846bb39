"""Peers on the same work: what each one's own documentation says to do, as a context around the forward."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks


class Unavailable(Exception):
    """A peer cannot run here; the text says why."""


class Peer:
    """One way to run a forward; this one, without any hooks.

    Attributes:
        backward_inside: backward is run inside the context, too, as the peer's own training loop does.
    """

    backward_inside = False

    def context(self) -> AbstractContextManager[Any]:
        """What one forward runs in."""
        return nullcontext()

    def facts(self) -> dict[str, Any]:
        """What it counted so far: ``written_bytes``, ``read_bytes`` and ``wait_s``, where they are known."""
        return {}

    def close(self) -> None:
        """Leave the model as it was and give everything back."""


class SaveOnCpu(Peer):
    """PyTorch's ``torch.autograd.graph.save_on_cpu``; on CPU tensors its copy is the tensor itself."""

    def __init__(self, device: torch.device) -> None:
        self.pin = device.type != "cpu"

    def context(self) -> AbstractContextManager[Any]:
        return save_on_cpu(pin_memory=self.pin)


class TorchSave(Peer):
    """The hooks of PyTorch's own tutorial on saved tensors: ``torch.save`` in pack, ``torch.load`` in unpack."""

    LEAST_ELEMENTS = 1000

    def __init__(self, path: str | None) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=path or os.environ.get("ACTOFFLOAD_PATH"))
        self.written_bytes = self.read_bytes = 0

    def context(self) -> AbstractContextManager[Any]:
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.numel() < self.LEAST_ELEMENTS:
            return tensor
        file = SelfDeletingFile(Path(self.folder.name) / uuid.uuid4().hex)
        torch.save(tensor, file.path)
        self.written_bytes += file.path.stat().st_size
        return file

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.read_bytes += packed.path.stat().st_size
        tensor: Tensor = torch.load(packed.path)
        return tensor

    def facts(self) -> dict[str, Any]:
        return {"written_bytes": self.written_bytes, "read_bytes": self.read_bytes}

    def close(self) -> None:
        self.folder.cleanup()


class SelfDeletingFile:
    """A file that goes with the last reference to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)


class Trl(Peer):
    """TRL's ``OffloadActivations`` by its own factory, with its defaults: pinned memory, streams, all but the head."""

    backward_inside = True

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        if device.type not in ("cuda", "xpu"):
            raise Unavailable("needs CUDA")
        try:
            from trl.models.activation_offloading import get_act_offloading_ctx_manager
        except ImportError as error:
            raise Unavailable(f"trl does not import: {error}") from error
        self._undo = restore_module_hooks(model)
        self._context: AbstractContextManager[Any] = get_act_offloading_ctx_manager(model)

    def context(self) -> AbstractContextManager[Any]:
        return self._context

    def close(self) -> None:
        self._undo()


def restore_module_hooks(model: nn.Module) -> Callable[[], None]:
    """What sets every module's forward hooks back to what they are now."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
    before = [(getattr(module, name), dict(getattr(module, name))) for module in model.modules() for name in names]

    def undo() -> None:
        for hooks, kept in before:
            hooks.clear()
            hooks.update(kept)

    return undo
