"""Exceptions from outside: a signal's handler, or another thread, raises them at any place in our code.

Such an exception may have any class. So whatever is not known to come from a place that expects it may have left our
state half changed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial, wraps
from types import CodeType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from .errors import ActOffloadError

P = ParamSpec("P")
T = TypeVar("T")


def expected(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call a function that may raise anything, at a place where that leaves nothing half changed: one of the user's."""
    return function(*args, **options)


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception may have come from outside, in the middle of a change.

    It has not where it is one of our errors, says that a device has no memory, or was raised in a call by `expected`.
    One that the handler of a signal raised has, whatever it is and wherever that was.
    """
    if not isinstance(error, Exception):
        return True
    codes = set(_codes(error))
    if not codes.isdisjoint(_handlers()):
        return True
    return expected.__code__ not in codes and not isinstance(error, (ActOffloadError, torch.OutOfMemoryError))


def aborts_when_interrupted(method: Callable[Concatenate[Any, P], T]) -> Callable[..., T]:
    """Abort an `ActivationStore` when its method was interrupted; see there. A device takes the call for one hook."""

    @wraps(method)
    def guarded(store: Any, *args: P.args, **options: P.kwargs) -> T:
        try:
            with store.tiers.hook:
                return method(store, *args, **options)
        except BaseException as error:
            store.abort_if_interrupted(error)
            raise

    return guarded


def _codes(error: BaseException) -> Iterator[CodeType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code
        trace = trace.tb_next


def _handlers() -> Iterator[CodeType]:
    """The code of the functions that handle signals in this process."""
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        while isinstance(handler, partial):
            handler = handler.func
        called = getattr(type(handler), "__call__", None)  # noqa: B004 - its code is looked at
        for function in (getattr(handler, "__func__", handler), called):
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType):
                yield code
