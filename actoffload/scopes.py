"""What hangs on a module's forward: which module is running, by name, and the inputs of a model, which live anyway.

Installed only where asked for. ``torch.compile`` never traces these hooks: run by PyTorch before and after a compiled
module they work as ever; inside a compiled graph, where there are no modules, they are left out.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from .identity import StorageSet

F = TypeVar("F", bound=Callable[..., Any])
_LOANS = 1000

UNTRACED_REASON = (
    "actoffload's contexts, attachments and marks act on real tensors and cannot be part of a compiled graph: enter "
    "them outside of what is compiled, and attach to what is compiled or to something around it"
)


def untraced(function: F) -> F:
    """Keep ``torch.compile`` out of our own frames; inside a compiled function they are a graph break."""
    disabled: F = torch.compiler.disable(function, reason=UNTRACED_REASON)  # type: ignore[no-untyped-call]
    return disabled


def untraced_hook(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `untraced`, for what only autograd calls, for each tensor: nearly free where nothing is being compiled."""
    disabled: Callable[..., Any] = untraced(function)
    # Private names, in the modules that `torch.compiler.disable` has just used: without them it is only slower.
    compiling = getattr(sys.modules.get("torch._C._dynamo.eval_frame"), "get_eval_frame_callback", None)
    skip_code = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if compiling is None or skip_code is None or not _owned(compiling):
        return disabled

    def direct(*args: Any) -> Any:
        return function(*args) if compiling() is None else disabled(*args)

    skip_code(direct.__code__)
    direct._torchdynamo_disable = True  # type: ignore[attr-defined]
    return direct


def _owned(function: Callable[[], object]) -> bool:
    """Whether the None that a C function returns is the caller's own; one that is only lent would be worn out."""
    before = sys.getrefcount(None)
    for _ in range(_LOANS):
        function()
    return abs(sys.getrefcount(None) - before) < _LOANS // 2


def untraced_frame(function: F) -> F:
    """Keep ``torch.compile`` out of this frame of ours, but not out of what it calls."""
    disabled: F = torch.compiler.disable(  # type: ignore[no-untyped-call]
        function, recursive=False, reason=UNTRACED_REASON
    )
    return disabled


class Hooking:
    """Something that a module's hooks hold: a copy of the module shares it, a pickled module leaves it behind."""

    def __deepcopy__(self, memo: object) -> Hooking:
        return self

    def __reduce__(self) -> Any:
        return _Gone, ()


class _Gone:
    """What the hooks of an unpickled module hold: does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*args: object, **kwargs: object) -> None:
    return None


class _Running(threading.local):
    """The names of the modules that are running in one thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[str] = []


class ModuleScopes(Hooking):
    """The stack of the names of the modules that are running, in each thread.

    What a compiled graph saves has the name of the module that was compiled.
    """

    def __init__(self) -> None:
        self._local = _Running()
        self._hooks: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()
        self.watched: dict[Any, Any] = self._hooks.data  # type: ignore[attr-defined]
        """The modules whose names are known: empty while there are none."""

    def innermost(self) -> str | None:
        """The qualified name of the innermost module that is running in this thread."""
        stack = self._local.stack
        return stack[-1] if stack else None

    def watch(self, model: nn.Module) -> None:
        """Know the modules of a model by their qualified names; called again, also those that were compiled meanwhile.

        What lies inside a compiled module gets no hooks: the compiler would make a graph for each block that differs
        in nothing but its hooks, and soon give up.
        """
        inside: tuple[str, ...] = ()
        for name, module in model.named_modules():
            shown = ".".join(part for part in name.split(".") if part != "_orig_mod")
            if inside and name.startswith(inside):
                for handle in self._hooks.pop(module, []):
                    handle.remove()
            elif shown and module not in self._hooks:
                self._hooks[module] = [
                    module.register_forward_pre_hook(functools.partial(_enter, self, shown), prepend=True),
                    module.register_forward_hook(functools.partial(_leave, self, shown), always_call=True),
                ]
            if module._compiled_call_impl is not None or name.endswith("_orig_mod"):
                inside += (f"{name}." if name else "",)

    def forget(self, model: nn.Module) -> None:
        """Take the hooks away from the modules of one model."""
        for module in model.modules():
            for handle in self._hooks.pop(module, []):
                handle.remove()

    def remove(self) -> None:
        """Take every hook away again."""
        for handles in self._hooks.values():
            for handle in handles:
                handle.remove()
        self._hooks.clear()

    def push(self, name: str) -> None:
        """A module begins to run."""
        self._local.stack.append(name)

    def pop(self, name: str) -> None:
        """A module has run."""
        stack = self._local.stack
        if stack and stack[-1] == name:
            stack.pop()


class ModelInputs(Hooking):
    """Notes the tensors that are handed to a model: the caller holds them, so moving them would free nothing."""

    def __init__(self, notes: StorageSet) -> None:
        self._notes = notes
        self._hooks: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()

    def watch(self, model: nn.Module) -> None:
        """Note the inputs of every call of a model from now on."""
        if model not in self._hooks:
            hook = functools.partial(_note, self)
            self._hooks[model] = model.register_forward_pre_hook(hook, with_kwargs=True)

    def forget(self, model: nn.Module) -> None:
        """Take the hook away from one model."""
        handle = self._hooks.pop(model, None)
        if handle is not None:
            handle.remove()

    def remove(self) -> None:
        """Take every hook away again."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model was called with these arguments."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.grad_fn is None:
                self._notes.add(leaf, "input")


@untraced
def _enter(scopes: ModuleScopes, name: str, module: nn.Module, args: object) -> None:
    scopes.push(name)


@untraced
def _leave(scopes: ModuleScopes, name: str, module: nn.Module, args: object, output: object) -> None:
    scopes.pop(name)


@untraced
def _note(inputs: ModelInputs, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    inputs.note(args, kwargs)


for _hook in (_enter, _leave, _note):
    torch.compiler.substitute_in_graph(_hook, skip_signature_check=True)(_nothing)
