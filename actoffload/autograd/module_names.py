"""Hooks on modules' forwards: they note the name of the running module, and the inputs of a model.

They are installed only if a feature needs them. Around a compiled module they work as usual. Inside a compiled graph,
which has no modules, they do nothing.
"""

from __future__ import annotations

import difflib
import functools
import threading
import weakref
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..config import OffloadConfig
from ..errors import ConfigError
from ..policy import module_patterns
from ..runtime.decision import InputShapes
from ..runtime.untraced import Hooking, skipped, untraced
from .hook_stack import enabled
from .owners import StorageSet


class _Running(threading.local):
    """The names of the modules that are running in one thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[str] = []


class ModuleScopes(Hooking):
    """The names of the running modules, as one stack in each thread.

    A tensor that a compiled graph saves has the name of the compiled module.
    """

    def __init__(self) -> None:
        super().__init__()
        self._local = _Running()
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

    def innermost(self) -> str | None:
        """Return the qualified name of the innermost module that runs in this thread, or None."""
        stack = self._local.stack
        return stack[-1] if stack else None

    def name_of(self, module: nn.Module) -> str | None:
        """Return the qualified name of a module, or None if it is not watched."""
        return self._names.get(module)

    def watch(self, model: nn.Module, only: Container[nn.Module] | None = None) -> None:
        """Hook the modules of a model, to know their qualified names. Another call unhooks newly compiled modules.

        Modules inside a compiled module get no hooks: the compiler would make a graph for each block that differs in
        nothing but its hooks, and soon give up.

        Args:
            model: has the modules.
            only: the modules to hook; None for all.
        """
        for shown, module, compiled in _eager_modules(model):
            if compiled:
                super().forget(module)
            elif shown and module not in self._hooks and (only is None or module in only):
                self._names[module] = shown
                # `prepend`, as tensors that other pre-hooks save belong to this module. `always_call`, as an exception
                # must not leave the name on the stack.
                self._hooks[module] = [
                    module.register_forward_pre_hook(functools.partial(self.enter, shown), prepend=True),
                    module.register_forward_hook(functools.partial(self.leave, shown), always_call=True),
                ]

    def forget(self, model: nn.Module) -> None:
        """Remove the hooks from the modules of one model."""
        for module in model.modules():
            super().forget(module)

    @skipped
    def enter(self, name: str, module: nn.Module, args: object) -> None:
        """Note that a module begins to run."""
        if not torch.compiler.is_compiling():
            self._push(name)

    @skipped
    def leave(self, name: str, module: nn.Module, args: object, output: object) -> None:
        """Note that a module has run."""
        if not torch.compiler.is_compiling():
            self._pop(name)

    @untraced
    def _push(self, name: str) -> None:
        self._local.stack.append(name)

    @untraced
    def _pop(self, name: str) -> None:
        stack = self._local.stack
        if stack and stack[-1] == name:
            stack.pop()


def _eager_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield each module of a model with its qualified name, and whether it lies inside a compiled module."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        yield _shown(name), module, bool(inside) and name.startswith(inside)
        if module._compiled_call_impl is not None or name.endswith("_orig_mod"):
            inside += (f"{name}." if name else "",)


def _shown(name: str) -> str:
    """Return a qualified name without the parts that ``torch.compile`` adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


PATTERNS = ("include", "exclude", "fp8")
"""The options that take patterns over modules."""


def check_patterns(config: OffloadConfig, models: Sequence[nn.Module]) -> None:
    """Check that each pattern over modules matches a module.

    Raises:
        ConfigError: a pattern matches none; names the pattern and a module that exists.
    """
    names = [_shown(name) for model in models for name, _ in model.named_modules()]
    for field in PATTERNS:
        for pattern in module_patterns(getattr(config, field)):
            if not any(fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, filter(None, names), 1, cutoff=0.0)
                there = f"it has {near[0]!r}, for example" if near else "it has no modules inside"
                raise ConfigError(field, getattr(config, field), f"{pattern!r} matches no module of the model; {there}")


ModelBegins = Callable[[], Callable[[InputShapes, Callable[[], Hashable]], None] | None]


class ModelInputs(Hooking):
    """Notes the tensors that the program passes to a model: its caller holds them, so moving them would free nothing.

    Args:
        notes: the set that receives them.
        called: returns the callback for a model's forward with gradients, or None. The callback takes the shapes of
            the inputs and a function that computes the forward's signature. Forwards with equal signatures save the
            same tensors, as far as the module and its arguments show.
    """

    def __init__(self, notes: StorageSet, called: ModelBegins | None) -> None:
        super().__init__()
        self._notes = notes
        self._called = called

    def watch(self, model: nn.Module) -> None:
        """Note the inputs of every call of a model from now on."""
        if model not in self._hooks:
            self._hooks[model] = [model.register_forward_pre_hook(self.begins, with_kwargs=True)]

    @untraced
    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the arguments of a model's call, except during an export, when they are no real tensors."""
        if torch.compiler.is_exporting():
            return
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.grad_fn is None:
                self._notes.add(leaf, "input")

    @skipped
    def begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Act on the begin of a model's forward with these arguments."""
        if not torch.compiler.is_compiling():
            self._begin(module, args, kwargs)

    @untraced
    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not enabled():
            return  # `torch.func.grad` or a similar transform: the library leaves this forward alone
        self.note(args, kwargs)
        called = self._called() if self._called is not None and torch.is_grad_enabled() else None
        leaves = tree_leaves((args, kwargs))
        shapes = tuple(_shape_of(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        if called is not None and shapes:
            called(shapes, functools.partial(_signature, module, leaves))


def _shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's shape; of a nested tensor, whose sizes are no plain numbers, its parts and its elements."""
    return (tensor.size(0), tensor.numel()) if tensor.is_nested else tuple(tensor.shape)


def _signature(module: nn.Module, leaves: Sequence[Any]) -> Hashable:
    """Return a key of the module, its mode, its number of trained parameters, and its arguments."""
    trained = sum(parameter.requires_grad for parameter in module.parameters())
    # A weak reference, because Python may reuse the `id` of a dead module.
    return weakref.ref(module), module.training, trained, *map(_signature_of, leaves)


def _signature_of(argument: Any) -> Hashable:
    if isinstance(argument, Tensor):
        return _shape_of(argument), argument.dtype, argument.requires_grad
    return argument if isinstance(argument, (bool, int, float, str, bytes)) else type(argument).__qualname__
