"""The two ways in: a context for a step, and an attachment for any training loop."""

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

from .autograd.hook_stack import enabled
from .autograd.offloader import Offloader
from .config import OffloadConfig, Options, Target, identity_of, make_config
from .errors import ConfigError
from .locks import renewed_in_child
from .runtime.untraced import Hooking, skipped, untraced, untraced_frame

_offloaders: dict[Any, Offloader] = {}
_of_models: weakref.WeakKeyDictionary[nn.Module, dict[Any, Offloader]] = weakref.WeakKeyDictionary()
_lock = renewed_in_child(threading.Lock())
_config = untraced(make_config)


@untraced
def shared_offloader(config: OffloadConfig, model: nn.Module | None = None) -> Offloader:
    """The `Offloader` of a model, or of contexts without one, for these options; a new one where it was closed."""
    with _lock:
        found = _offloaders if model is None else _of_models.setdefault(model, {})
        key = (config.paths, *(identity_of(getattr(config, field.name)) for field in fields(config)))
        offloader = found.get(key)
        if offloader is None or offloader.closed or offloader.forked:
            offloader = found[key] = Offloader(config)
        return offloader


class offload_activations(contextlib.ContextDecorator):
    """Inside this context the tensors that autograd saves for backward leave the device. Also a decorator.

    Entering it each step is cheap: contexts with the same options and the same model have one `Offloader`, whose plan,
    counts and budget are those of that model. Without ``model`` it is that of the options. A policy, an engine factory
    or a trace callable is the same option only if it is the same object: make it once.

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
            self.offloader.use(model)  # it may have been forgotten since
        return self.offloader.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.offloader.__exit__(kind, error, trace)


class Attachment(Hooking):
    """A module whose forward runs inside an offloading context; made by `attach`.

    A module with a ``training_step``, as Lightning's have, runs that inside it too: it is what the trainer calls.
    A copy of the module shares the attachment; a pickled one comes back without.
    """

    def __init__(self, module: nn.Module, offloader: Offloader) -> None:
        self.module = module
        self.offloader = offloader
        self._entered = threading.local()
        self._step: _Step | None = None
        _attach(module, self)
        inner = getattr(module, "_orig_mod", module)  # of what torch.compile made
        if callable(getattr(inner, STEP, None)):
            self._step = _Step(self, inner, inner.__dict__.get(STEP))
            setattr(inner, STEP, self._step)

    @staticmethod
    def of(module: nn.Module) -> Attachment | None:
        """Return the attachment of a module, or None; a copy of an attached module has none of its own."""
        there: Attachment | None = module.__dict__.get(ATTACHMENT)
        return there if there is not None and there.module is module else None

    def detach(self) -> None:
        """Leave the module as it was, from its next call on. What was saved so far stays usable. Idempotent."""
        if not _detach(self.module, self):
            return
        self.offloader.forget(self.module)
        if self._step is not None:
            self._step.remove()
            self._step = None

    @untraced
    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.offloader.use(self.module)  # another attachment to it may have been taken away
        self.offloader.note_inputs(args, kwargs)

    @untraced_frame
    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the module, or a method of it, inside the context, which is left however that ends."""
        # The module calls itself, or its training step calls it; or `torch.func.grad` and its like refuse hooks.
        if getattr(self._entered, "value", False) or not enabled():
            return function(*args, **kwargs)
        self._entered.value = True
        try:
            self._prepare(args, kwargs)
            with self.offloader:
                self.offloader.look_inside(self.module)
                return function(*args, **kwargs)
        finally:
            self._entered.value = False


ATTACHMENT = "_actoffload_attachment"
"""Where a module has its attachment. A copy has it too, and another may take its place there."""
BEFORE = "_actoffload_class"
"""Where the class of an attached module has the one that the module had before."""


@functools.lru_cache(maxsize=256)
def _attached_class(kind: Any) -> Any:
    """Return the class of attached modules that are a ``kind`` otherwise: the same each time, as compilers look at it.

    Not hooks, which PyTorch runs after an `Exception` alone, and Ctrl-C in a forward is none; nor another ``forward``
    of the one module, as copies of it (`torch.nn.DataParallel` makes some) would call that one's.
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
        _call_impl = inside("_call_impl")  # where `torch.compile` had bound the other before it was attached

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Pickled, it comes back as it was before."""
            function, args, *rest = super().__reduce_ex__(protocol)
            args = tuple(kind if each is type(self) else each for each in args)
            function = {copyreg.__newobj__: _new, type(self): kind}.get(function, function)  # type: ignore[attr-defined]
            if rest and isinstance(rest[0], dict):
                rest[0] = {name: value for name, value in rest[0].items() if name != ATTACHMENT}
            return (function, args, *rest)

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
        Attached.__bases__ = (kind,)  # afterwards, so that no ``__init_subclass__`` of its sees one more class
    setattr(Attached, BEFORE, kind)
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(Attached, name, getattr(kind, name))
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
        object.__setattr__(module, "__class__", _attached_class(kind))
    module.__dict__[ATTACHMENT] = attachment


def _detach(module: nn.Module, attachment: Attachment) -> bool:
    """Return whether it was attached."""
    if module.__dict__.get(ATTACHMENT) is not attachment:
        return False
    del module.__dict__[ATTACHMENT]
    if BEFORE in type(module).__dict__:  # else `fully_shard` has made another class of it since
        object.__setattr__(module, "__class__", getattr(type(module), BEFORE))
    return True


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

    @skipped
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attachment = self._attachment
        if attachment is None:
            return self.__wrapped__(*args, **kwargs)
        return attachment.run(self.__wrapped__, *args, **kwargs)

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


def attach(
    module: nn.Module, *, offloader: Offloader | None = None, target: Target = "auto", **options: Unpack[Options]
) -> Attachment:
    """Run every forward of a module inside an offloading context: the one line for any training loop.

    Each attachment has an `Offloader` of its own: plan, counts, peak and ``device_budget`` are this module's. Disk and
    host memory are shared with the others in this process, so ``nvme_budget`` and ``host_budget`` hold for the sum.
    Called again with equal options it returns the attachment that is there.

    Args:
        module: the model, or any part of it.
        offloader: one for several modules that are planned together, such as the stages of a pipeline that this process
            runs. Its options are its own: give no others.
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
    if offloader is not None and (options or target != "auto"):
        raise ConfigError("offloader", offloader, "it has its options already: give no others beside it")
    config = _config({"target": target, **options}) if offloader is None else offloader.config
    there = Attachment.of(module)
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
