"""Which module is running, by name; and the inputs of a model, which live anyway. Installed only where asked for."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from .identity import StorageSet


class ModuleScopes:
    """The stack of the names of the modules that are running, in each thread."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []

    @property
    def current(self) -> str | None:
        """The qualified name of the innermost module that is running in this thread."""
        stack: list[str] = getattr(self._local, "stack", [])
        return stack[-1] if stack else None

    def watch(self, model: nn.Module) -> None:
        """Know the modules of a model by their qualified names from now on."""
        if model in self._known:
            return
        self._known.add(model)
        for name, module in model.named_modules():
            if name:
                self._handles.append(module.register_forward_pre_hook(self._entering(name), prepend=True))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        """Take every hook away again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: object) -> None:
            if not hasattr(self._local, "stack"):
                self._local.stack = []
            self._local.stack.append(name)

        return enter

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        stack: list[str] = getattr(self._local, "stack", [])
        if stack:
            stack.pop()


class ModelInputs:
    """Notes the tensors that are handed to a model: the caller holds them, so moving them would free nothing."""

    def __init__(self, notes: StorageSet) -> None:
        self._notes = notes
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []

    def watch(self, model: nn.Module) -> None:
        """Note the inputs of every call of a model from now on."""
        if model not in self._known:
            self._known.add(model)
            self._handles.append(model.register_forward_pre_hook(self._note, with_kwargs=True))

    def remove(self) -> None:
        """Take every hook away again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.grad_fn is None:
                self._notes.add(leaf, "input")
