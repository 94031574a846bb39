"""Autograd's stack of saved-tensor hooks, one in each thread. Autograd calls the topmost pair and no other.

PyTorch's own contexts pop the topmost pair, whichever it is. This library's contexts find their own pair, because a
context in a generator may end in any order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ..runtime.untraced import untraced

_autograd: Any = torch._C._autograd

Pair = tuple[Callable[..., Any], Callable[..., Any]]

OUR_UNPACKS: set[Callable[..., Any]] = set()
"""The unpack hooks of this library. They distinguish its pairs from the program's own, also on autograd's threads."""
_ON_TOP = 1 << 30


class _Thread(threading.local):
    """The pairs that one thread has taken off its stack.

    Attributes:
        regions: the number of `no_offload()` regions that the thread is in.
        aside: this library's pairs that are open but off the stack, outermost first. Each comes with the number of the
            program's own pairs below it.
    """

    regions = 0

    def __init__(self) -> None:
        self.aside: list[tuple[int, Pair]] = []


THREAD = _Thread()


def top() -> Pair | None:
    """Return the pair that autograd calls at present, or None."""
    found: Pair | None = _autograd._top_saved_tensors_default_hooks(True)
    return found


@untraced
def enabled() -> bool:
    """Return whether PyTorch permits hooks here. Inside `torch.func.grad` and similar transforms it does not."""
    return bool(_autograd._saved_tensors_hooks_is_enabled())


class Hooks:
    """A context with a pair of this library on the stack. In a `no_offload()` region it waits for the region's end."""

    def __init__(self, pack_hook: Callable[..., Any], unpack_hook: Callable[..., Any]) -> None:
        self.pack_hook = pack_hook
        self.unpack_hook = unpack_hook

    def __enter__(self) -> None:
        OUR_UNPACKS.add(self.unpack_hook)  # before the push, after which the pair can be on top
        if THREAD.regions:
            THREAD.aside.append((_ON_TOP, (self.pack_hook, self.unpack_hook)))
        else:
            _autograd._push_saved_tensors_default_hooks(self.pack_hook, self.unpack_hook)

    def __exit__(self, *exc: object) -> None:
        if not self.remove() and top() is not None:
            # A context of the program that ended too early has popped our pair in place of its own, which is left over.
            _autograd._pop_saved_tensors_default_hooks()

    def remove(self) -> bool:
        """Take the pair off the stack, wherever it lies; return whether it was there."""
        above = top()
        # By identity: the pack hooks of two entries may be equal, as bound methods of one `Packer`.
        if above is not None and above[0] is self.pack_hook:
            _autograd._pop_saved_tensors_default_hooks()
            return True
        for place, (_, pair) in enumerate(THREAD.aside):
            if pair[0] is self.pack_hook:
                del THREAD.aside[place]
                return True
        stack = _take_all()
        others = [pair for pair in stack if pair[0] is not self.pack_hook]
        _put(others)
        return len(others) < len(stack)


def enter_region() -> None:
    """Take this library's pairs off this thread's stack; the program's own stay."""
    THREAD.regions += 1
    if THREAD.regions > 1 or top() is None:
        return
    others: list[Pair] = []
    for pair in _take_all():
        if pair[1] in OUR_UNPACKS:
            THREAD.aside.append((len(others), pair))
        else:
            others.append(pair)
    _put(others)


def leave_region() -> None:
    """Put the pairs of open contexts back, each above as many of the program's own pairs as before."""
    THREAD.regions -= 1
    if THREAD.regions or not THREAD.aside:
        return
    stack = _take_all()
    for below, pair in reversed(THREAD.aside):  # the outermost last: each insertion goes below the pairs before it
        stack.insert(min(below, len(stack)), pair)
    THREAD.aside.clear()
    _put(stack)


def _take_all() -> list[Pair]:
    """Pop every pair and return them, the topmost last."""
    taken: list[Pair] = []
    while (pair := top()) is not None:
        taken.append(pair)
        _autograd._pop_saved_tensors_default_hooks()
    taken.reverse()
    return taken


def _put(pairs: list[Pair]) -> None:
    """Push these pairs, the last one on top, even if PyTorch has disabled hooks since they were first pushed."""
    # PyTorch refuses a push while hooks are disabled, and a pair of the program's own must never get lost.
    refusal = _autograd._saved_tensors_hooks_get_disabled_error_message() if pairs else None
    if refusal is not None:
        _autograd._saved_tensors_hooks_enable()
    for pair in pairs:
        _autograd._push_saved_tensors_default_hooks(*pair)
    if refusal is not None:
        _autograd._saved_tensors_hooks_disable(refusal, False)
