"""Keep ``torch.compile`` out of our frames, and let modules with our hooks be copied and pickled.

Nothing here imports the compiler: that takes seconds, and most programs do not use it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

F = TypeVar("F", bound=Callable[..., Any])
_LOANS = 1000

UNTRACED_REASON = (
    "actoffload's contexts, attachments and marks act on real tensors and cannot be part of a compiled graph: enter "
    "them outside of what is compiled, and attach to what is compiled or to something around it"
)


def _owned(function: Callable[[], object]) -> bool:
    """Return whether a C function returns a new reference to None; a borrowed one would be released too often."""
    before = sys.getrefcount(None)
    for _ in range(_LOANS):
        function()
    return abs(sys.getrefcount(None) - before) < _LOANS // 2


# Private names of PyTorch. Without them, the functions below import the compiler and are slower.
_frames: Any = sys.modules.get("torch._C._dynamo.eval_frame")
_NEEDED = ("get_eval_frame_callback", "set_eval_frame", "set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
_at_hand = all(hasattr(_frames, name) for name in _NEEDED) and _owned(_frames.get_eval_frame_callback)


def skipped(function: F) -> F:
    """Keep ``torch.compile`` from beginning at this frame of ours. Its callees are compiled; an export traces it."""
    if _at_hand:
        action = _frames._FrameAction
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(action.SKIP, action.DEFAULT))
    else:
        torch._dynamo.eval_frame.skip_code(function.__code__)
    return function


def _mark(function: Callable[..., Any]) -> None:
    """Have the compiler break its graph at a call of this function, and show our reason."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = UNTRACED_REASON  # type: ignore[attr-defined]


def untraced(function: F) -> F:
    """Keep ``torch.compile`` out of our own frames; inside a compiled function they are a graph break.

    It costs almost nothing outside of compilation, as autograd calls some of these functions for each tensor.
    """
    if not _at_hand:
        disabled: F = torch.compiler.disable(function, reason=UNTRACED_REASON)  # type: ignore[no-untyped-call]
        return disabled
    compiling, set_compiling = _frames.get_eval_frame_callback, _frames.set_eval_frame

    def direct(*args: Any, **kwargs: Any) -> Any:
        if compiling() is None:
            return function(*args, **kwargs)
        before = set_compiling(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_compiling(before)  # in any case: else the rest of this thread would no longer be compiled

    _mark(skipped(direct))
    return functools.wraps(function)(direct)  # type: ignore[return-value]


def untraced_frame(function: F) -> F:
    """Keep ``torch.compile`` out of this frame of ours, but not out of its callees."""
    _mark(skipped(function))
    return function


class Hooking:
    """Base of objects that modules' hooks hold: a copy of the module shares it, a pickled module leaves it behind."""

    def __init__(self) -> None:
        # Weakly: this object must not keep a model that the program drops.
        self._hooks: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()

    def forget(self, module: nn.Module) -> None:
        """Remove the hooks of a module."""
        for handle in self._hooks.pop(module, ()):
            handle.remove()

    def remove(self) -> None:
        """Remove every hook."""
        for module in list(self._hooks):  # a copy, as `forget` removes entries
            self.forget(module)

    def __deepcopy__(self, memo: object) -> Hooking:
        return self

    def __reduce__(self) -> Any:
        return _Gone, ()


class _Gone:
    """The object in the hooks of an unpickled module: it does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*args: object, **kwargs: object) -> None:
    return None
