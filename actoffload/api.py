"""The two ways in: a context for a step, and an attachment for any training loop."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import weakref
from collections.abc import Callable
from dataclasses import fields
from types import TracebackType
from typing import Any, Unpack

import torch
from torch import nn

from .autograd.offloader import Offloader
from .config import OffloadConfig, Options, Target, make_config
from .errors import ConfigError
from .locks import renewed_in_child
from .runtime.untraced import Hooking, skipped, untraced, untraced_frame

_offloaders: dict[Any, Offloader] = {}
_lock = renewed_in_child(threading.Lock())


@untraced
def shared_offloader(config: OffloadConfig) -> Offloader:
    """The process-wide `Offloader` for these options; a new one where the old one was closed."""
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

    def __init__(self, target: Target = "auto", *, model: nn.Module | None = None, **options: Unpack[Options]) -> None:
        self.offloader = shared_offloader(make_config({"target": target, **options}))
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
        self._entered = threading.local()
        inner = getattr(module, "_orig_mod", module)  # of what torch.compile made
        self._methods = [_Method(self, module, "forward")]
        if callable(getattr(inner, STEP, None)):
            self._methods.append(_Method(self, inner, STEP))
        _attachments[module] = weakref.ref(self)

    def detach(self) -> None:
        """Leave the module as it was, from its next call on. What was saved so far stays usable. Idempotent."""
        if _attached(self.module) is self:
            del _attachments[self.module]
        for method in self._methods:
            method.remove()
        if self._methods:
            self.offloader.forget(self.module)
        self._methods = []

    @untraced
    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.offloader.use(self.module)  # another attachment to it may have been taken away
        self.offloader.note_inputs(args, kwargs)

    @untraced_frame
    def run(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the module inside the context, which it leaves however it ends."""
        if getattr(self._entered, "value", False):  # the module calls itself, or its training step calls it
            return method(*args, **kwargs)
        self._entered.value = True
        try:
            self._prepare(args, kwargs)
            with self.offloader:
                return method(*args, **kwargs)
        finally:
            self._entered.value = False


STEP = "training_step"
_OF_FUNCTIONS = ("__closure__", "__code__", "__defaults__", "__globals__", "__kwdefaults__", "__name__", "__qualname__")
"""What torch.export reads of a module's forward: as of the method itself."""


class _Method:
    """Stands for a method of a module and runs it inside an attachment.

    Not hooks: PyTorch runs a module's hooks after an `Exception` alone, and Ctrl-C in a forward is none.
    """

    def __init__(self, attachment: Attachment, module: nn.Module, name: str) -> None:
        self._attachment: Attachment | None = attachment
        self._module = module
        self._name = name
        self._own: Callable[..., Any] | None = module.__dict__.get(name)
        """What the module had under this name beside its class's method: another attachment's, or a compiled one."""
        setattr(module, name, self)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        method: Callable[..., Any] = self._own or getattr(type(self._module), self._name).__get__(self._module)
        return method

    def __getattr__(self, name: str) -> Any:
        if name == "__globals__" and not torch.compiler.is_exporting():  # then torch.jit.script reads it
            raise ConfigError("module", type(self._module).__name__, "detach() it before torch.jit.script compiles it")
        if name in _OF_FUNCTIONS:
            return getattr(self.__wrapped__, name)
        raise AttributeError(name)

    @skipped
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self._module:  # Accelerate binds what it unwraps to the module once more
            args = args[1:]
        attachment = self._attachment
        if attachment is None or torch.compiler.is_exporting():
            return self.__wrapped__(*args, **kwargs)
        return attachment.run(self.__wrapped__, args, kwargs)

    def remove(self) -> None:
        """Step aside; where another one was put on top, from now on only hand the call on."""
        self._attachment = None
        if self._module.__dict__.get(self._name) is self:
            delattr(self._module, self._name)
            if self._own is not None:
                setattr(self._module, self._name, self._own)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = copy.copy(self)
        copied._module = memo.get(id(self._module), self._module)
        copied._own = copy.deepcopy(self._own, memo)
        return copied.__wrapped__ if self._attachment is None else copied

    def __copy__(self) -> _Method:
        copied = object.__new__(_Method)
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce__(self) -> Any:
        return functools.partial, (getattr(type(self._module), self._name), self._module)


_attachments: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Attachment]] = weakref.WeakKeyDictionary()
"""By module, which holds its attachment itself."""


def _attached(module: nn.Module) -> Attachment | None:
    found = _attachments.get(module)
    return None if found is None else found()


def attach(module: nn.Module, *, target: Target = "auto", **options: Unpack[Options]) -> Attachment:
    """Run every forward of a module inside an offloading context: the one line for any training loop.

    Called again with equal options it returns the attachment that is there.

    Args:
        module: the model, or any part of it.
        target: ``"host"``, ``"nvme"``, ``"tiered"`` or ``"auto"``.
        options: the other fields of `OffloadConfig`.

    Raises:
        ConfigError: ``module`` is no module, or is attached with other options; or an option cannot work.

    >>> import torch
    >>> model = torch.nn.Linear(4, 4)
    >>> attachment = attach(model, target="nvme")
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> attachment.detach()
    """
    if not isinstance(module, nn.Module):
        raise ConfigError("module", module, "attach() takes an nn.Module")
    config = make_config({"target": target, **options})
    there = _attached(module)
    if there is not None and (there.offloader.closed or there.offloader.forked):
        there.detach()
    elif there is not None:
        for field in fields(config):
            value, before = getattr(config, field.name), getattr(there.offloader.config, field.name)
            if _identity(value) != _identity(before):
                raise ConfigError(field.name, value, f"this module is attached with {before!r}: first detach()")
        return there
    return Attachment(module, shared_offloader(config).use(module))
