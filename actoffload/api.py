"""The two entry points: a context for a step, and an attachment for any training loop. And all public names."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import threading
import weakref
from collections.abc import Callable
from dataclasses import fields
from types import TracebackType
from typing import Any, Unpack

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from . import errors, schedules
from .autograd.checkpoints import checkpoint
from .autograd.exclusions import keep, no_offload
from .autograd.foreign_hooks import next_node
from .autograd.hook_stack import enabled
from .autograd.offloader import Offloader
from .autograd.selective import create_selective_checkpoint_contexts
from .autograd.tensor_names import name
from .config import OffloadConfig, Options, Target, identity_of, make_config
from .errors import ConfigError
from .locks import renewed_in_child
from .planning.plan import Plan
from .planning.profile import Profile
from .policy import Decision, Policy, TensorFacts
from .runtime.untraced import Hooking, skipped, untraced, untraced_frame
from .storage.engines.base import StorageEngine
from .tiers.statistics import Statistics
from .version import __version__

__all__ = [
    "Attachment",
    "Decision",
    "OffloadConfig",
    "Offloader",
    "Plan",
    "Policy",
    "Profile",
    "Statistics",
    "StorageEngine",
    "TensorFacts",
    "__version__",
    "attach",
    "checkpoint",
    "create_selective_checkpoint_contexts",
    "errors",
    "keep",
    "name",
    "no_offload",
    "offload_activations",
    "schedules",
]

_offloaders: dict[Any, Offloader] = {}
# Weak, as a cached offloader must not keep its model alive.
_of_models: weakref.WeakKeyDictionary[nn.Module, dict[Any, Offloader]] = weakref.WeakKeyDictionary()
_lock = renewed_in_child(threading.Lock())
_config = untraced(make_config)


@untraced
def shared_offloader(config: OffloadConfig, model: nn.Module | None = None) -> Offloader:
    """Return the `Offloader` for these options and this model (or none); a new one if the last one was closed."""
    with _lock:  # two threads that enter their first context together must get one offloader, with one budget
        found = _offloaders if model is None else _of_models.setdefault(model, {})
        # Paths too: their default depends on an environment variable, which may have changed since.
        key = (config.paths, *(identity_of(getattr(config, field.name)) for field in fields(config)))
        offloader = found.get(key)
        # A forked child has none of its parent's threads, so it needs an offloader of its own.
        if offloader is None or offloader.closed or offloader.forked:
            offloader = found[key] = Offloader(config)
        return offloader


class offload_activations(contextlib.ContextDecorator):
    """Inside this context the tensors that autograd saves for backward leave the device. Also a decorator.

    Entering it in each step is cheap: contexts with the same options and the same model share one `Offloader`, with one
    plan, one set of counts and one budget. Contexts without ``model`` share one by their options alone. A policy, an
    engine factory or a trace callable is the same option only if it is the same object, so make it once.

    Args:
        target: ``"host"``, ``"nvme"``, ``"tiered"`` or ``"auto"``.
        model: optional. With it, modules have names, and the library knows parameters, buffers and inputs early.
        options: the other fields of `OffloadConfig`: ``path``, ``device_budget``, ``host_budget``, ``min_bytes``,
            ``policy``, ``engine``, ``trace``, ...

    Raises:
        ConfigError: an option does not exist or cannot work; the message names it, its value and the remedy.
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
        config = _config({"target": target, **options})
        if model is not None and not isinstance(model, nn.Module):
            raise ConfigError("model", model, "give an nn.Module, or leave it out")
        self.offloader = shared_offloader(config, model)
        self._model: weakref.ref[nn.Module] | None = None
        if model is not None:
            self.offloader.use(model)
            self._model = weakref.ref(model)

    def __enter__(self) -> Offloader:
        model = None if self._model is None else self._model()
        if model is not None:
            self.offloader.use(model)  # again, as `Offloader.forget` may have removed its hooks
        return self.offloader.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.offloader.__exit__(kind, error, trace)


class Attachment(Hooking):
    """A module whose forward runs inside an offloading context; made by `attach`.

    A ``training_step`` of the module runs inside the context as well, because Lightning's trainer calls that method.
    A copy of the module shares the attachment. A pickled module loses it.
    """

    def __init__(self, module: nn.Module, offloader: Offloader) -> None:
        self.module = module
        self.offloader = offloader
        self._entered = threading.local()
        self._step: _Step | None = None
        _attach(module, self)  # before any other change of the module, as this may refuse it
        inner = getattr(module, "_orig_mod", module)  # the module that torch.compile wrapped
        if callable(getattr(inner, STEP, None)):
            self._step = _Step(self, inner, inner.__dict__.get(STEP))
            setattr(inner, STEP, self._step)

    @staticmethod
    def of(module: nn.Module) -> Attachment | None:
        """Return the attachment of a module, or None. A copy of an attached module has none of its own."""
        there: Attachment | None = module.__dict__.get(ATTACHMENT)
        return there if there is not None and there.module is module else None

    def report(self) -> str:
        """Return the run's counts and their reasons as text, as `Offloader.report` does."""
        return self.offloader.report()

    def detach(self) -> None:
        """Restore the module from its next call on. Tensors saved before stay usable. Idempotent."""
        module = self.module
        if module.__dict__.get(ATTACHMENT) is not self:
            return
        del module.__dict__[ATTACHMENT]
        # `fully_shard` may have made a subclass of the attached class since. Setting the old class would undo that.
        if BEFORE in type(module).__dict__:
            object.__setattr__(module, "__class__", getattr(type(module), BEFORE))
        self.offloader.forget(module)
        if self._step is not None:
            self._step.remove()
            self._step = None

    @untraced
    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.offloader.use(self.module)  # again, as the end of another attachment may have removed the hooks
        self.offloader.note_inputs(args, kwargs)

    @untraced_frame
    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the module, or a method of it, inside the context, and leave the context however the call ends."""
        # Nested calls (the module calls itself, or its training step does) share the outer context. Where
        # `torch.func.grad` or a similar transform refuses hooks, there is no context to enter.
        if getattr(self._entered, "value", False) or not enabled():
            return function(*args, **kwargs)
        self._entered.value = True  # by thread: another thread's call of the module has a context of its own
        try:
            self._prepare(args, kwargs)
            first = next_node()
            with self.offloader:
                output = function(*args, **kwargs)
                self.offloader.search_for_hooks(output, first)
            return output
        finally:
            self._entered.value = False


ATTACHMENT = "_actoffload_attachment"
"""The attribute with a module's attachment. A copy has it too, and a later attachment replaces it there."""
BEFORE = "_actoffload_class"
"""The attribute of an attached module's class with its former class."""


@functools.lru_cache(maxsize=256)
def _attached_class(kind: Any) -> Any:
    """Return the subclass of ``kind`` for attached modules: one for each, because compilers guard on the class.

    Forward hooks do not suffice: after Ctrl-C, which is no `Exception`, PyTorch runs none. Nor does a ``forward`` on
    the instance: copies of a module (`torch.nn.DataParallel` makes some) would call the original's.
    """

    def inside(name: str) -> Callable[..., Any]:
        @skipped
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            call = functools.partial(getattr(kind, name), self)
            attachment = self.__dict__.get(ATTACHMENT)
            if attachment is None or torch.compiler.is_exporting():
                return call(*args, **kwargs)
            return attachment.run(call, *args, **kwargs)

        return method

    plain = not any(vars(one).get("__slots__") for one in kind.__mro__)

    class Attached(nn.Module if plain else kind, metaclass=type(kind)):  # type: ignore[misc, metaclass]
        __call__ = inside("__call__")
        # `torch.compile(module)` may have bound the former `__call__` before the attachment. It calls this method.
        _call_impl = inside("_call_impl")

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Pickle the module as one of its former class, without the attachment."""
            function, args, *rest = super().__reduce_ex__(protocol)
            args = tuple(kind if each is type(self) else each for each in args)
            function = {copyreg.__newobj__: _new, type(self): kind}.get(function, function)  # type: ignore[attr-defined]
            if rest and isinstance(rest[0], dict):  # the attachment has locks and threads, which no pickle can hold
                rest[0] = {name: value for name, value in rest[0].items() if name != ATTACHMENT}
            return (function, args, *rest)

        # Copies bypass the method above, because a copy of an attached module keeps the attachment.
        def __copy__(self) -> Any:
            return copy._reconstruct(self, None, *super().__reduce_ex__(4))  # type: ignore[attr-defined]

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            own = getattr(super(), "__deepcopy__", None)
            if own is not None:
                return own(memo)
            return copy._reconstruct(self, memo, *super().__reduce_ex__(4))  # type: ignore[attr-defined]

        def __prepare_scriptable__(self) -> Any:
            raise ConfigError("module", kind.__name__, "detach() it before torch.jit.script compiles it")

    if plain:
        Attached.__bases__ = (kind,)  # set late, so that an ``__init_subclass__`` of ``kind`` does not run for it
    setattr(Attached, BEFORE, kind)
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(Attached, attribute, getattr(kind, attribute))
    return Attached


def _new(kind: Any, *args: Any) -> Any:
    return kind.__new__(kind, *args)


def _attach(module: nn.Module, attachment: Attachment) -> None:
    if isinstance(module, torch.fx.GraphModule):
        remedy = "torch.fx writes its class anew: attach() to a module around it, as nn.Sequential(module)"
        raise ConfigError("module", type(module).__name__, remedy)
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise ConfigError("module", type(module).__name__, "it becomes another class: run one forward, then attach()")
    if not hasattr(type(module), BEFORE):
        kind: Any = type(module)
        # Past the `__setattr__` of the module's class, which may do anything.
        object.__setattr__(module, "__class__", _attached_class(kind))
    module.__dict__[ATTACHMENT] = attachment


STEP = "training_step"


class _Step:
    """Replaces the ``training_step`` of a module, and runs the original inside an attachment."""

    def __init__(self, attachment: Attachment, module: nn.Module, own: Callable[..., Any] | None) -> None:
        self._attachment: Attachment | None = attachment
        self._module = module
        self._own = own
        """The instance's own attribute of this name, if any: another attachment's step, or a compiled one."""

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        method: Callable[..., Any] = self._own or getattr(type(self._module), STEP).__get__(self._module)
        return method

    @skipped
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attachment = self._attachment
        if attachment is None:
            return self.__wrapped__(*args, **kwargs)
        return attachment.run(self.__wrapped__, *args, **kwargs)

    def remove(self) -> None:
        """Restore the attribute. If another wrapper has replaced this one, only pass calls on from now on."""
        self._attachment = None
        if self._module.__dict__.get(STEP) is self:
            delattr(self._module, STEP)
            if self._own is not None:
                setattr(self._module, STEP, self._own)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The step of a copied module has to call the copy, which `memo` has by the original's `id`.
        module = memo.get(id(self._module), self._module)
        own = copy.deepcopy(self._own, memo)
        return self.__wrapped__ if self._attachment is None else _Step(self._attachment, module, own)

    def __reduce__(self) -> Any:
        return functools.partial, (getattr(type(self._module), STEP), self._module)


def attach(
    module: nn.Module, *, offloader: Offloader | None = None, target: Target = "auto", **options: Unpack[Options]
) -> Attachment:
    """Run every forward of a module inside an offloading context: one line for any training loop.

    Each attachment has an `Offloader` of its own: plan, counts, peak and ``device_budget`` belong to this module. All
    offloaders of a process share disk and host memory, so ``nvme_budget`` and ``host_budget`` hold for the sum.
    Another call with equal options returns the existing attachment.

    Args:
        module: the model, or any part of it.
        offloader: one for several modules that are planned together, such as the stages of a pipeline in this process.
            It has its own options, so pass no others beside it.
        target: ``"host"``, ``"nvme"``, ``"tiered"`` or ``"auto"``.
        options: the other fields of `OffloadConfig`.

    Raises:
        ConfigError: ``module`` is no module or is attached with other options, or an option cannot work.

    >>> import torch
    >>> model = torch.nn.Linear(4, 4)
    >>> attachment = attach(model, target="nvme")
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> attachment.detach()
    """
    if not isinstance(module, nn.Module):
        raise ConfigError("module", module, "attach() takes an nn.Module")
    if offloader is not None and (options or target != "auto"):
        raise ConfigError("offloader", offloader, "it has its options already: give no others beside it")
    config = _config({"target": target, **options}) if offloader is None else offloader.config
    there = Attachment.of(module)
    # An attachment with a dead offloader (closed, or a fork's) would offload nothing: a new one replaces it.
    if there is not None and (there.offloader.closed or there.offloader.forked):
        there.detach()
    elif there is not None:
        for field in fields(config):
            value, before = getattr(config, field.name), getattr(there.offloader.config, field.name)
            if identity_of(value) != identity_of(before):
                raise ConfigError(field.name, value, f"this module is attached with {before!r}: first detach()")
        if offloader is not None and there.offloader is not offloader:
            raise ConfigError("offloader", offloader, "this module is attached with another one: first detach()")
        return there
    return Attachment(module, (offloader or Offloader(config)).use(module))
