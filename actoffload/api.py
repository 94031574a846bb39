"""The two ways in: a context for a step, and an attachment for any training loop."""

from __future__ import annotations

import contextlib
import sys
import threading
from dataclasses import fields
from types import TracebackType
from typing import Any

from torch import nn

from .config import make_config
from .errors import ConfigError
from .hooks import Offloader

_offloaders: dict[Any, Offloader] = {}
_lock = threading.Lock()


def shared_offloader(options: dict[str, Any]) -> Offloader:
    """The process-wide `Offloader` for these options; a new one where the old one was closed.

    Raises:
        ConfigError: an option does not exist or cannot work.
    """
    config = make_config(options)
    with _lock:
        key = (config.paths, *(_identity(getattr(config, field.name)) for field in fields(config)))
        offloader = _offloaders.get(key)
        if offloader is None or offloader.closed or offloader.forked:
            offloader = _offloaders[key] = Offloader(config)
        return offloader


def _identity(value: object) -> object:
    """The value of an option, or its identity where it cannot be hashed (a policy that is a dataclass, say)."""
    try:
        hash(value)
    except TypeError:
        return id(value)  # of an object that the offloader's configuration keeps alive
    return value


class offload_activations(contextlib.ContextDecorator):
    """Inside this context the tensors that autograd saves for backward leave the device. Also a decorator.

    Entering it each step is cheap: every context with the same options shares one process-wide `Offloader`. A policy,
    an engine factory or a trace callable is the same option only if it is the same object: make it once.

    Args:
        target: ``"host"``, ``"nvme"``, ``"tiered"`` or ``"auto"``.
        model: optional; names the modules and lets parameters, buffers and inputs be known early.
        options: the other fields of `OffloadConfig`: ``path``, ``device_budget``, ``host_budget``, ``min_bytes``,
            ``policy``, ``engine``, ``strict``, ``trace``, ...

    Raises:
        ConfigError: an option does not exist or cannot work; the message names it, its value and what to do.
        SpoolPathError: no spool can be made at ``path``.

    >>> import torch
    >>> x = torch.ones(3, requires_grad=True)
    >>> with offload_activations(target="nvme") as offloader:
    ...     loss = x.exp().sum()
    >>> loss.backward()
    >>> offloader.statistics().live_records
    0
    """

    def __init__(self, target: str = "auto", *, model: nn.Module | None = None, **options: Any) -> None:
        self.offloader = shared_offloader({"target": target, **options})
        if model is not None:
            self.offloader.use(model)

    def __enter__(self) -> Offloader:
        return self.offloader.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.offloader.__exit__(kind, error, trace)


class Attachment:
    """A module whose forward runs inside an offloading context; made by `attach`."""

    def __init__(self, module: nn.Module, offloader: Offloader) -> None:
        self.module = module
        self.offloader = offloader
        self._handles = [
            module.register_forward_pre_hook(self._enter, prepend=True),
            module.register_forward_hook(self._exit, always_call=True),
        ]
        self._depth = threading.local()

    def detach(self) -> None:
        """Leave the module as it was. What was saved so far stays usable. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, module: nn.Module, args: object) -> None:
        self._depth.value = getattr(self._depth, "value", 0) + 1
        if self._depth.value == 1:
            try:
                self.offloader.__enter__()
            except BaseException:
                self._depth.value = 0
                raise

    def _exit(self, module: nn.Module, args: object, output: object) -> None:
        depth = getattr(self._depth, "value", 0)
        if depth == 0:
            return  # the forward failed before it was entered
        self._depth.value = depth - 1
        if depth == 1:
            self.offloader.__exit__(*sys.exc_info())  # an exception of the forward, if it failed


def attach(module: nn.Module, **options: Any) -> Attachment:
    """Run every forward of a module inside an offloading context: the one line for any training loop.

    Args:
        module: the model, or any part of it.
        options: the fields of `OffloadConfig`.

    Raises:
        ConfigError: ``module`` is no module, or an option cannot work.

    >>> import torch
    >>> model = torch.nn.Linear(4, 4)
    >>> attachment = attach(model, target="nvme")
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> attachment.detach()
    """
    if not isinstance(module, nn.Module):
        raise ConfigError("module", module, "attach() takes an nn.Module")
    return Attachment(module, shared_offloader(options).use(module))
