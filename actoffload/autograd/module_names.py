"""What hangs on a module's forward: which module is running, by name, and the inputs of a model, which live anyway.

Installed only where asked for. Run by PyTorch before and after a compiled module, these hooks work as ever; inside a
compiled graph, where there are no modules, they do nothing.
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
from ..runtime.identity import StorageSet
from ..runtime.untraced import Hooking, skipped, untraced
from .hook_stack import enabled


class _Running(threading.local):
    """The names of the modules that are running in one thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[str] = []


class ModuleScopes(Hooking):
    """The stack of the names of the modules that are running, in each thread.

    What a compiled graph saves has the name of the module that was compiled.
    """

    def __init__(self) -> None:
        super().__init__()
        self._local = _Running()
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

    def innermost(self) -> str | None:
        """The qualified name of the innermost module that is running in this thread."""
        stack = self._local.stack
        return stack[-1] if stack else None

    def name_of(self, module: nn.Module) -> str | None:
        """The qualified name of a module, where it is known."""
        return self._names.get(module)

    def watch(self, model: nn.Module, only: Container[nn.Module] | None = None) -> None:
        """Know the modules of a model by their qualified names; called again, also those that were compiled meanwhile.

        What lies inside a compiled module gets no hooks: the compiler would make a graph for each block that differs
        in nothing but its hooks, and soon give up.

        Args:
            model: has the modules.
            only: modules; the others are left out.
        """
        for shown, module, compiled in eager_modules(model):
            if compiled:
                super().forget(module)
            elif shown and module not in self._hooks and (only is None or module in only):
                self._names[module] = shown
                self._hooks[module] = [
                    module.register_forward_pre_hook(functools.partial(self.enter, shown), prepend=True),
                    module.register_forward_hook(functools.partial(self.leave, shown), always_call=True),
                ]

    def forget(self, model: nn.Module) -> None:
        """Take the hooks away from the modules of one model."""
        for module in model.modules():
            super().forget(module)

    @skipped
    def enter(self, name: str, module: nn.Module, args: object) -> None:
        """A module begins to run."""
        if not torch.compiler.is_compiling():
            self._push(name)

    @skipped
    def leave(self, name: str, module: nn.Module, args: object, output: object) -> None:
        """A module has run."""
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


def eager_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """The modules of a model by their qualified names, and whether each lies inside of a compiled one."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        yield _shown(name), module, bool(inside) and name.startswith(inside)
        if module._compiled_call_impl is not None or name.endswith("_orig_mod"):
            inside += (f"{name}." if name else "",)


def _shown(name: str) -> str:
    """A qualified name as it is without ``torch.compile``."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def check_patterns(config: OffloadConfig, models: Sequence[nn.Module]) -> None:
    """Look for a module for each ``include`` and ``exclude`` pattern.

    Raises:
        ConfigError: a pattern matches none; names the pattern and a module that exists.
    """
    if not (config.include or config.exclude):
        return
    names = [_shown(name) for model in models for name, _ in model.named_modules()]
    for field in ("include", "exclude"):
        for pattern in module_patterns(getattr(config, field)):
            if not any(fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, filter(None, names), 1, cutoff=0.0)
                there = f"it has {near[0]!r}, for example" if near else "it has no modules inside"
                raise ConfigError(field, getattr(config, field), f"{pattern!r} matches no module of the model; {there}")


ModelBegins = Callable[[], Callable[[InputShapes, Callable[[], Hashable]], None] | None]


class ModelInputs(Hooking):
    """Notes the tensors that are handed to a model: the caller holds them, so moving them would free nothing.

    Args:
        notes: takes them.
        called: returns the callback for a model's forward with gradients, or None. The callback takes the shapes of
            the inputs and a function that computes the forward's signature. Forwards with equal signatures save the
            same tensors, as far as the module and its arguments show.
        begins: called with a model whose forward begins.
    """

    def __init__(self, notes: StorageSet, called: ModelBegins | None, begins: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self._notes = notes
        self._called = called
        self._begins = begins

    def watch(self, model: nn.Module) -> None:
        """Note the inputs of every call of a model from now on."""
        if model not in self._hooks:
            self._hooks[model] = [model.register_forward_pre_hook(self.begins, with_kwargs=True)]

    @untraced
    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model was called with these arguments. While it is exported they are no real tensors."""
        if torch.compiler.is_exporting():
            return
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.grad_fn is None:
                self._notes.add(leaf, "input")

    @skipped
    def begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model's forward begins with these arguments."""
        if not torch.compiler.is_compiling():
            self._begin(module, args, kwargs)

    @untraced
    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not enabled():
            return  # `torch.func.grad` or its like, which we leave alone
        self._begins(module)
        self.note(args, kwargs)
        called = self._called() if self._called is not None and torch.is_grad_enabled() else None
        leaves = tree_leaves((args, kwargs))
        shapes = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor))
        if called is not None and shapes:
            called(shapes, functools.partial(_signature, module, leaves))


def _signature(module: nn.Module, leaves: Sequence[Any]) -> Hashable:
    """The module, its mode, its number of trained parameters, and its arguments."""
    trained = sum(parameter.requires_grad for parameter in module.parameters())
    # A weak reference, as the address of a module that died may become another one's.
    return weakref.ref(module), module.training, trained, *map(_signature_of, leaves)


def _signature_of(argument: Any) -> Hashable:
    if isinstance(argument, Tensor):
        return tuple(argument.shape), argument.dtype, argument.requires_grad
    return argument if isinstance(argument, (bool, int, float, str, bytes)) else type(argument).__qualname__
