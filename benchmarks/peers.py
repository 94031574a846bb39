"""Peers on the same work: what each one's own documentation says to do, as a context around the forward."""

from __future__ import annotations

import inspect
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
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


class Transformers(Peer):
    """What ``gradient_checkpointing_kwargs={"offload": True}`` of Transformers' trainer does to a model."""

    def __init__(self, model: Any) -> None:
        enable = getattr(model, "activation_checkpointing_enable", None)
        if enable is None or "offload" not in inspect.signature(enable).parameters:
            raise Unavailable("this version of transformers has no checkpoints that are offloaded")
        self._undo = restore_module_hooks(model)
        self._model = model
        enable(offload=True)

    def close(self) -> None:
        self._model.activation_checkpointing_disable()
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


class Megatron(Peer):
    """Megatron-core's fine-grained offloading, a group for each block, as its own transformer layers use it."""

    def __init__(self, model: nn.Module, blocks: tuple[str, ...], device: torch.device) -> None:
        if device.type != "cuda":
            raise Unavailable("needs CUDA")
        try:
            from megatron.core.extensions import transformer_engine
            from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload
        except ImportError as error:
            raise Unavailable(f"megatron-core does not import: {error}") from error
        if getattr(transformer_engine, "cpu_offload", None) is None:
            # TransformerEngine is missing: Megatron sets one flag there, which only TransformerEngine's modules read.
            transformer_engine.cpu_offload = SimpleNamespace(CPUOffloadEnabled=False)
        self.interface: Any = offload.FineGrainedActivationOffloadingInterface
        self.interface.reset_instance()
        self.manager: Any = offload.PipelineOffloadManager.get_instance()
        self.weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._save = self.manager.on_save_for_backward
        self.manager.on_save_for_backward = self._leave_weights
        self.modules = [model.get_submodule(name) for name in blocks]
        for module in self.modules:
            object.__setattr__(module, "forward", self._grouped(module.forward))

    def _leave_weights(self, tensor: Tensor) -> Any:
        # A Linear saves a view of its weight, which Megatron's own mark on the parameter does not reach.
        if tensor.untyped_storage().data_ptr() in self.weights:
            self.interface.mark_not_offloadable(tensor)
        return self._save(tensor)

    def _grouped(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(hidden: Tensor, *args: Any, **options: Any) -> Any:
            with self.interface(True, hidden, "block") as started:
                out = forward(started, *args, **options)
            return self.interface.group_commit(out, name="block")

        return run

    @contextmanager
    def context(self) -> Iterator[None]:
        self.interface.reset()
        self.interface.init_chunk_handler(1, None, 1 << 20)
        yield

    def close(self) -> None:
        for module in self.modules:
            object.__delattr__(module, "forward")
        self.interface.reset_instance()
