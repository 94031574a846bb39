"""The tensors that never move: parameters, buffers, inputs, and ``keep()`` marks and `no_offload` regions."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import ContextDecorator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, StateError
from ..policy import STATIC, KeepReason
from ..runtime.untraced import untraced
from .hook_stack import THREAD, enter_region, leave_region
from .owners import StorageSet, live_modules, modules_of
from .tensors import is_parameter, storages

MARKED = StorageSet()
"""Storages that the user marked with ``keep()``."""

RELEARN_EVERY = 100
"""Without ``model=``, the first two entries and every entry at a multiple of this number search all live modules."""

_REASONS = {note: KeepReason(note) for note in STATIC}


FILLED_LATER = frozenset({"rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_"})
"""Operators that save a tensor, then fill it without a version bump: a copy made at the save would be wrong.

A search of PyTorch's operator tests found them (tests/parity/test_opinfo.py looks for more).
"""


def is_filled_later(tensor: Tensor) -> bool:
    """Return whether the operator that saves this tensor may fill it later; see `FILLED_LATER`.

    Autograd does not reveal the operator, so this looks for its name in the code that called into PyTorch.
    """
    if tensor.requires_grad:  # rrelu's noise, which the operator fills, requires no gradient
        return False
    frame = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back  # type: ignore[assignment]  # the thread's first frame has none
    return frame is not None and not FILLED_LATER.isdisjoint(frame.f_code.co_names)


_BETWEEN = ("actoffload.", "torch._ops", "torch._dynamo.eval_frame", "torch.utils._device", "torch.overrides")
"""Modules with frames between the code that calls an operator and this module."""


OPEN_REGIONS: list[None] = []
"""One entry for each open region of any thread. Append and pop are atomic, so this count needs no lock."""


_ENGINE, _CHECKPOINT = "_engine_run_backward", "torch.utils.checkpoint"
_CREATE_GRAPH = 2
"""The index of ``create_graph`` among the arguments of `_engine_run_backward` after the outputs."""


class _Backward(threading.local):
    """The number of the last backward in this thread that is known to build a graph."""

    building = -1


_backward = _Backward()


def _builds_graph() -> bool:
    """Return whether the running backward saves a tensor because it builds a graph (``create_graph=True``).

    If not, a recomputation saves it, by PyTorch's checkpoint or another. The calling thread's frames have the arguments
    of backward. On a thread of autograd's, a save without a Python frame shows it: only ``create_graph`` makes nodes
    written in C++ save.
    """
    frame, in_python = sys._getframe(1), False
    while frame is not None and frame.f_code.co_name != _ENGINE:
        module = str(frame.f_globals.get("__name__"))
        if module == _CHECKPOINT:
            return False
        in_python = in_python or not module.startswith("actoffload.")
        frame = frame.f_back  # type: ignore[assignment]  # the thread's first frame has none
    task = torch._C._current_graph_task_id()
    arguments = () if frame is None else frame.f_locals.get("args", ())
    # Remembered by the backward's number: a later save of the same backward may come from a node written in Python.
    if (len(arguments) > _CREATE_GRAPH and arguments[_CREATE_GRAPH]) or not in_python:
        _backward.building = task
    return _backward.building == task


class Exclusions:
    """The storages that never move under one offloader.

    Attributes:
        static: parameters, buffers and inputs: the program holds them anyway, so they are no activations.
        sharded: the modules with a sharded parameter that has not yet been found gathered.
    """

    def __init__(self) -> None:
        self.static = StorageSet()
        self._learned = 0
        # Weakly: the offloader may outlive a model, and must not keep its parameters.
        self._owners: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._managed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._sharded: weakref.WeakKeyDictionary[nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()
        self._gathered: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
        # The inner dict, as `len` of the weak one is a Python function, and each saved tensor queries it.
        self.sharded: dict[Any, Any] = self._sharded.data  # type: ignore[attr-defined]

    def learn(self, models: Iterable[nn.Module]) -> None:
        """Note the present parameters and buffers of the models; without models, of every live module."""
        self._learned += 1
        models = list(models)
        for model in models:
            self._add_owners(modules_of(model))
        if not models and (self._learned <= 2 or self._learned % RELEARN_EVERY == 0):
            self._add_owners(live_modules())
        any_managed = len(self._managed) > 0
        for module in list(self._owners):  # at each step, as ``.to()`` and resharding replace storages
            managed = any_managed and module in self._managed
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.static.add(parameter, "parameter")
                    dimensions = _mesh_dimensions(parameter) if managed else 0
                    if dimensions and name not in self._gathered.get(module, ()):
                        self._sharded.setdefault(module, {})[name] = dimensions
            for buffer in module._buffers.values():
                if buffer is not None:
                    self.static.add(buffer, "buffer")

    def _add_owners(self, modules: Iterable[nn.Module]) -> None:
        fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
        for module in modules:
            if module._parameters or module._buffers:
                self._owners.add(module)
            if isinstance(module, fsdp) and module not in self._managed:
                self._managed.update(module.modules())

    def _note_gathered(self) -> bool:
        """Note the parameters that ``fully_shard`` has gathered for the first time; return whether there were any.

        A gathered parameter has a storage of its own, which appears in the middle of a forward. FSDP frees and fills it
        again for the rest of training, and saved views of it must show that. So it must never move.
        """
        found = False
        for module, meshes in list(self._sharded.items()):  # a copy, as entries are removed below
            for name, dimensions in list(meshes.items()):
                parameter = module._parameters.get(name)
                if parameter is not None and _mesh_dimensions(parameter) < dimensions:
                    self.static.add(parameter, "parameter")
                    self._gathered.setdefault(module, set()).add(name)
                    meshes.pop(name, None)  # another thread may have popped it
                    found = True
            if not meshes:
                self._sharded.pop(module, None)
        return found

    def why_static(self, tensor: Tensor, storage: torch.UntypedStorage) -> KeepReason | None:
        """Return why this saved tensor is no activation, or None."""
        number = storage._cdata
        if is_parameter(tensor):
            if number not in self.static.by_number:
                self.static.add(tensor, "parameter")
            return KeepReason.PARAMETER
        known = self.static.by_number.get(number)
        if known is None and self.sharded and self._note_gathered():
            known = self.static.by_number.get(number)
        return None if known is None else _REASONS[known[1]]

    def is_of_module(self, tensor: Tensor) -> bool:
        """Return whether a tensor of any layout is known to be a parameter or a buffer, or a view of one."""
        noted = (self.static.by_number.get(storage._cdata) for storage in storages(tensor))
        return any(known is not None and known[1] in ("parameter", "buffer") for known in noted)

    def why_stays(self, tensor: Tensor, storage: torch.UntypedStorage) -> KeepReason | None:
        """Return why this saved tensor stays, or None."""
        # First: a static tensor counts as no activation, even if it is marked or saved in a recomputation.
        reason = self.why_static(tensor, storage)
        if reason is not None:
            return reason
        if storage._cdata in MARKED.by_number:
            return KeepReason.MARKED
        if THREAD.regions:
            return KeepReason.REGION
        if torch._C._current_graph_task_id() != -1 and not _builds_graph():
            return KeepReason.IN_BACKWARD  # a recomputation: its own backward follows at once
        return None


def _mesh_dimensions(parameter: Tensor) -> int:
    """Return the number of mesh dimensions that a parameter is laid out over; gathering removes FSDP's dimensions."""
    mesh = getattr(parameter, "device_mesh", None)
    return int(mesh.ndim) if mesh is not None else 0


class no_offload(ContextDecorator):
    """A region that the library leaves alone, for this thread. A context manager and a decorator.

    Tensors that autograd saves inside stay, and neither `Statistics` nor ``device_budget`` counts them. The library's
    hooks are off autograd's stack, so ``torch.func.grad`` and other functions that refuse hooks work inside, and the
    program's own hooks around the context apply.

    >>> with no_offload():
    ...     pass
    """

    @untraced
    def __enter__(self) -> None:
        # Counted for longer than the thread is in the region: an entry makes the compiled hooks leave the check to us.
        OPEN_REGIONS.append(None)
        enter_region()

    @untraced
    def __exit__(self, *exc: object) -> None:
        if not THREAD.regions:
            raise StateError("no_offload() was left in a thread that did not enter it: use one in each thread")
        leave_region()
        OPEN_REGIONS.pop()


@untraced
def keep(tensor: Tensor) -> Tensor:
    """Keep a tensor and every view of it on its device from now on. Bytes that moved before do not come back early.

    Args:
        tensor: any tensor.

    Returns:
        The same tensor.
    """
    if not isinstance(tensor, Tensor):
        raise ConfigError("tensor", tensor, "keep() takes a tensor")
    MARKED.add(tensor, "marked")
    return tensor
