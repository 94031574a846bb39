"""Keeps ``torch.compile`` out of our frames, and lets modules that carry our hooks be copied and pickled.

Nothing here imports the compiler: that takes seconds, and most programs do not use it.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType
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
    """Whether the None that a C function returns is the caller's own; one that is only lent would be worn out."""
    before = sys.getrefcount(None)
    for _ in range(_LOANS):
        function()
    return abs(sys.getrefcount(None) - before) < _LOANS // 2


# Private names of PyTorch's own. Without them, what is below is only slower, and imports the compiler.
_frames: Any = sys.modules.get("torch._C._dynamo.eval_frame")
_NEEDED = ("get_eval_frame_callback", "set_eval_frame", "set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
_at_hand = all(hasattr(_frames, name) for name in _NEEDED) and _owned(_frames.get_eval_frame_callback)


def _skip(code: CodeType) -> None:
    """Have the compiler leave frames of this code as they are; what they call is compiled."""
    if _at_hand:
        action = _frames._FrameAction
        _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(action.SKIP, action.DEFAULT))
    else:
        torch._dynamo.eval_frame.skip_code(code)


def _mark(function: Callable[..., Any]) -> None:
    """Have the compiler break its graph at a call of this function, and say why."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = UNTRACED_REASON  # type: ignore[attr-defined]


class _Thread(threading.local):
    """Whether this thread is in a frame of ours that was kept out of ``torch.compile``, which is at work around it."""

    compiled = False


_thread = _Thread()


def inside_compiled() -> bool:
    """Return whether ``torch.compile`` is at work around this `untraced` frame, or may be."""
    return _thread.compiled or not _at_hand


def untraced(function: F) -> F:
    """Keep ``torch.compile`` out of our own frames; inside a compiled function they are a graph break.

    Nearly free where nothing is being compiled, as autograd calls some of them for each tensor.
    """
    if not _at_hand:
        disabled: F = torch.compiler.disable(function, reason=UNTRACED_REASON)  # type: ignore[no-untyped-call]
        return disabled
    compiling, set_compiling = _frames.get_eval_frame_callback, _frames.set_eval_frame

    def direct(*args: Any, **kwargs: Any) -> Any:
        if compiling() is None:
            return function(*args, **kwargs)
        before, outer = set_compiling(None), _thread.compiled
        _thread.compiled = True
        try:
            return function(*args, **kwargs)
        finally:
            _thread.compiled = outer
            set_compiling(before)

    _skip(direct.__code__)
    _mark(direct)
    return functools.wraps(function)(direct)  # type: ignore[return-value]


def untraced_frame(function: F) -> F:
    """Keep ``torch.compile`` out of this frame of ours, but not out of what it calls."""
    _mark(skipped(function))
    return function


def skipped(function: F) -> F:
    """Keep ``torch.compile`` from beginning at this frame of ours. What it calls is compiled; an export reads it."""
    _skip(function.__code__)
    return function


class Hooking:
    """Something that modules' hooks hold: a copy of such a module shares it, a pickled module leaves it behind."""

    def __init__(self) -> None:
        self._hooks: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()

    def forget(self, module: nn.Module) -> None:
        """Take the hooks away that are noted for a module."""
        for handle in self._hooks.pop(module, ()):
            handle.remove()

    def remove(self) -> None:
        """Take every hook away again."""
        for module in list(self._hooks):
            self.forget(module)

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
