"""What stays wherever it is saved: parameters, buffers, inputs, and what the user marks with ``keep()`` or a region."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from contextlib import ContextDecorator

import torch
from torch import Tensor, nn

from ..errors import ConfigError, StateError
from ..policy import STATIC, KeepReason
from ..runtime.identity import ModuleOwners, StorageSet, is_parameter, live_modules
from ..runtime.untraced import untraced
from .hook_stack import THREAD, enter_region, leave_region

MARKED = StorageSet()
"""Storages that the user marked with ``keep()``."""

RELEARN_EVERY = 100
"""Without ``model=``, the live modules are looked through at the first entries and then every so many."""

_REASONS = {note: KeepReason(note) for note in STATIC}


FILLED_LATER = frozenset({"rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_"})
"""Operators that save a tensor and fill it afterwards, without a bump of its version: what is copied at once is wrong.

Found by a search of PyTorch's operator tests (tests/parity/test_opinfo.py looks for more).
"""


def is_filled_later(tensor: Tensor) -> bool:
    """Whether a tensor that is about to be saved may be filled only later; see `FILLED_LATER`.

    Autograd does not say which operator saves, so the name is looked for in the code that called into PyTorch.
    """
    if tensor.requires_grad:
        return False
    frame = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back  # type: ignore[assignment]  # the thread's first frame has none
    return frame is not None and not FILLED_LATER.isdisjoint(frame.f_code.co_names)


_BETWEEN = ("actoffload.", "torch._ops", "torch._dynamo.eval_frame", "torch.utils._device", "torch.overrides")
"""Modules whose frames lie between the code that calls an operator and ours."""


OPEN_REGIONS: list[None] = []
"""As many as all threads are in. One operation on a list changes it, which no other thread can split."""


_ENGINE, _CHECKPOINT = "_engine_run_backward", "torch.utils.checkpoint"
_CREATE_GRAPH = 2
"""Its place among the arguments of PyTorch's `_engine_run_backward` that follow the outputs."""


class _Backward(threading.local):
    """The last backward of this thread, by its number, that was seen to build a graph."""

    building = -1


_backward = _Backward()


def _builds_graph() -> bool:
    """Whether the backward that runs builds a graph (``create_graph=True``), of which a tensor is saved now.

    Else a block runs again, by PyTorch's checkpoint or another. The thread that called backward shows what it was
    called with. A thread of autograd's does not: there a node that saves without a frame of Python shows that gradients
    are wanted, as nothing but ``create_graph`` lets such a node save.
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
    if (len(arguments) > _CREATE_GRAPH and arguments[_CREATE_GRAPH]) or not in_python:
        _backward.building = task
    return _backward.building == task


class Exclusions:
    """The storages that never move, as an offloader knows them.

    Attributes:
        static: parameters, buffers and inputs: they live anyway and are no activations.
        owners: the modules that own them.
    """

    def __init__(self) -> None:
        self.static = StorageSet()
        self.owners = ModuleOwners()
        self._learned = 0

    def learn(self, models: Iterable[nn.Module]) -> None:
        """Know the parameters and buffers of the models as they are now; without models, of every live module."""
        self._learned += 1
        models = list(models)
        for model in models:
            self.owners.add(model.modules())
        if not models and (self._learned <= 2 or self._learned % RELEARN_EVERY == 0):
            self.owners.add(live_modules())
        self.owners.note_storages(self.static)

    def why_static(self, tensor: Tensor, storage: torch.UntypedStorage) -> KeepReason | None:
        """Return why a tensor that is about to be saved is no activation, or None."""
        number = storage._cdata
        if is_parameter(tensor):
            if number not in self.static.by_number:
                self.static.add(tensor, "parameter")
            return KeepReason.PARAMETER
        known = self.static.by_number.get(number)
        if known is None and self.owners.sharded and self.owners.note_gathered(self.static):
            known = self.static.by_number.get(number)
        return None if known is None else _REASONS[known[1]]

    def why_stays(self, tensor: Tensor, storage: torch.UntypedStorage) -> KeepReason | None:
        """Return why a tensor that is about to be saved stays, or None."""
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


class no_offload(ContextDecorator):
    """A region that is left alone, for this thread. A context manager and a decorator.

    What autograd saves inside of it stays and is not seen: neither `Statistics` nor ``device_budget`` counts it. Our
    hooks are off autograd's stack, so that ``torch.func.grad`` and whatever else refuses hooks works inside of it, and
    hooks of the program's own around the context apply.

    >>> with no_offload():
    ...     pass
    """

    @untraced
    def __enter__(self) -> None:
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
    """Have a tensor stay, with every view of it, from now on; what was moved before is not brought back.

    Args:
        tensor: any tensor.

    Returns:
        The same tensor.
    """
    if not isinstance(tensor, Tensor):
        raise ConfigError("tensor", tensor, "keep() takes a tensor")
    MARKED.add(tensor, "marked")
    return tensor
