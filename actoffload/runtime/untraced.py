"""Keeps ``torch.compile`` out of our frames, and lets modules that carry our hooks be copied and pickled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

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


def skipped(function: F) -> F:
    """Keep ``torch.compile`` from beginning at this frame of ours. What it calls is compiled; an export reads it."""
    skip_code = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if skip_code is not None:
        skip_code(function.__code__)
    return function


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
