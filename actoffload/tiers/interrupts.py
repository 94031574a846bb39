"""Interrupts: exceptions that a signal's handler, or another thread, raises at any place in our code.

An interrupt may have any class. So every exception counts as one, and may have left our state half changed, unless it
is known to come from a place that expects it.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator
from functools import partial, wraps
from types import CodeType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from ..errors import ActOffloadError

P = ParamSpec("P")
T = TypeVar("T")


def expected(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call a function that may raise anything (a policy, PyTorch), at a place where no state is half changed."""
    # `is_interrupt` looks for this frame in an exception's traceback, so the call must not be inlined.
    return function(*args, **options)


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception may be an interrupt, raised in the middle of a change of state.

    Our own errors, a device's out-of-memory error, and exceptions from a call by `expected` are no interrupts. An
    exception from the handler of a signal always is one.
    """
    if not isinstance(error, Exception):
        return True
    codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    # First, because a signal may arrive inside a call by `expected`, and its handler may raise any error.
    if not codes.isdisjoint(_handlers()):
        return True
    return expected.__code__ not in codes and not isinstance(error, (ActOffloadError, torch.OutOfMemoryError))


def aborts_when_interrupted(method: Callable[Concatenate[Any, P], T]) -> Callable[..., T]:
    """Abort an `ActivationStore` if an interrupt ends its method. For a device the whole call counts as one hook."""

    @wraps(method)
    def guarded(store: Any, *args: P.args, **options: P.kwargs) -> T:
        try:
            with store.tiers.hook:
                return method(store, *args, **options)
        except BaseException as error:
            store.abort_if_interrupted(error)
            raise

    return guarded


def _handlers() -> Iterator[CodeType]:
    """Yield the code of the functions that handle signals in this process."""
    for number in signal.valid_signals():
        handler = signal.getsignal(number)  # queried each time, as the program may install another one
        while isinstance(handler, partial):
            handler = handler.func
        called = getattr(type(handler), "__call__", None)  # noqa: B004 - its code is needed, not a call
        for function in (getattr(handler, "__func__", handler), called):
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType):
                yield code
