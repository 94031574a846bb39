"""The two ways in: a context for a step, and an attachment for any training loop."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import fields
from types import TracebackType
from typing import Any

from torch import nn

from .autograd.offloader import Offloader
from .config import make_config
from .errors import ConfigError
from .runtime.untraced import Hooking, untraced, untraced_frame

_offloaders: dict[Any, Offloader] = {}
_lock = threading.Lock()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # the other one may be held by a thread that this process does not have


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


@untraced
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
        self._model: weakref.ref[nn.Module] | None = None
        if model is not None:
            self.offloader.use(model)
            self._model = weakref.ref(model)

    def __enter__(self) -> Offloader:
        model = None if self._model is None else self._model()
        if model is not None:
            self.offloader.use(model)  # it may have been forgotten since
        return self.offloader.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.offloader.__exit__(kind, error, trace)


class Attachment(Hooking):
    """A module whose forward runs inside an offloading context; made by `attach`.

    A module with a ``training_step``, as Lightning's have, runs that inside it too: it is what the trainer calls.
    A copy of the module (``copy.deepcopy``) shares the attachment; a pickled one comes back without.
    """

    def __init__(self, module: nn.Module, offloader: Offloader) -> None:
        self.module = module
        self.offloader = offloader
        self._handles = [
            module.register_forward_pre_hook(self._enter, prepend=True),
            module.register_forward_hook(self._exit, always_call=True),
        ]
        self._depth = threading.local()
        self._step: _Step | None = None
        inner = getattr(module, "_orig_mod", module)  # of what torch.compile made
        if callable(getattr(inner, STEP, None)):
            self._step = _Step(self, inner, inner.__dict__.get(STEP))
            setattr(inner, STEP, self._step)

    def detach(self) -> None:
        """Leave the module as it was. What was saved so far stays usable. Idempotent."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.offloader.forget(self.module)
        if self._step is not None:
            self._step.remove()
            self._step = None

    @untraced
    def _enter(self, module: nn.Module, args: object) -> None:
        self._depth.value = getattr(self._depth, "value", 0) + 1
        if self._depth.value == 1:
            self._depth.outer = sys.exc_info()[1]  # of an `except` block that the forward runs in: not its own
            try:
                self.offloader.use(self.module)  # another attachment to it may have been taken away
                self.offloader.__enter__()
            except BaseException:
                self._depth.value = 0
                raise

    @untraced
    def _exit(self, module: nn.Module, args: object, output: object) -> None:
        depth = getattr(self._depth, "value", 0)
        if depth == 0:
            return  # the forward failed before it was entered
        self._depth.value = depth - 1
        if depth == 1:
            kind, error, trace = sys.exc_info()  # an exception of the forward, if it failed
            failed = error is not None and error is not self._depth.outer
            self._depth.outer = None
            self.offloader.__exit__(*((kind, error, trace) if failed else (None, None, None)))


STEP = "training_step"


class _Step:
    """Stands for the ``training_step`` of a module and runs it inside an attachment."""

    def __init__(self, attachment: Attachment, module: nn.Module, own: Callable[..., Any] | None) -> None:
        self._attachment: Attachment | None = attachment
        self._module = module
        self._own = own
        """What the module had under this name beside its class's method: another attachment's, or a compiled one."""

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        method: Callable[..., Any] = self._own or getattr(type(self._module), STEP).__get__(self._module)
        return method

    @untraced_frame
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attachment = self._attachment
        if attachment is None:
            return self.__wrapped__(*args, **kwargs)
        attachment._enter(self._module, args)
        try:
            attachment.offloader.note_inputs(args, kwargs)
            return self.__wrapped__(*args, **kwargs)
        finally:
            attachment._exit(self._module, args, None)

    def remove(self) -> None:
        """Step aside; where another one was put on top, from now on only hand the call on."""
        self._attachment = None
        if self._module.__dict__.get(STEP) is self:
            delattr(self._module, STEP)
            if self._own is not None:
                setattr(self._module, STEP, self._own)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo.get(id(self._module), self._module)
        own = copy.deepcopy(self._own, memo)
        return self.__wrapped__ if self._attachment is None else _Step(self._attachment, module, own)

    def __reduce__(self) -> Any:
        return functools.partial, (getattr(type(self._module), STEP), self._module)


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
