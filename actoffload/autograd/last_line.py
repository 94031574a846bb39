"""The line on a whole run, written as its offloader dies or, if it lives that long, as the process ends."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from ..autotune.autopilot import Autopilot
from ..runtime.store import ActivationStore
from ..tell.facts import Facts, facts_of
from ..tell.report import closing_line, say

_called_for: weakref.WeakSet[object] = weakref.WeakSet()
"""The offloaders for which `sum_up_at_end` was called."""


def facts_so_far(store: ActivationStore, pilot: Autopilot | None) -> Facts:
    """Return the facts of an offloader's run."""
    return facts_of(store, None if pilot is None or pilot.plan is None else pilot.facts())


def sum_up(parts: Mapping[str, Any]) -> None:
    """Write the line, where the option ``announce`` directs it; ``parts``: the attributes of an offloader."""
    store: ActivationStore = parts["store"]
    if not store.forked:  # the parent does
        say(parts["config"], closing_line(facts_so_far(store, parts["autopilot"])))


def sum_up_at_end(offloader: object) -> None:
    """Write the line at exit, or as the offloader dies, whichever comes first. Nothing of it lives longer for that.

    The model often goes before the process ends, and the offloader's host memory and files on disk with it. A second
    call adds no line, nor does an offloader whose model never ran: trainers also prepare adapters, for their parameters
    alone.
    """
    if offloader in _called_for:  # two forward steps of Megatron with equal options share an offloader
        return
    _called_for.add(offloader)
    # The finalizer holds the attributes, which never refer to the offloader itself: it would live for ever.
    dying = weakref.finalize(offloader, _sum_up_later, vars(offloader))
    dying.atexit = False  # the registry of finalizers may end after the stores, which have lost their counts by then
    atexit.register(_sum_up_if_alive, dying)


def _sum_up_later(parts: Mapping[str, Any]) -> None:
    # On a thread, because the line needs locks, which a finalizer must not take. The process waits for it to end.
    with contextlib.suppress(RuntimeError):  # the system starts no more threads
        threading.Thread(target=_sum_up_if_it_ran, args=(parts,), name="actoffload-last-line").start()


def _sum_up_if_alive(dying: weakref.finalize[Any, Any]) -> None:
    alive = dying.detach()
    if alive is not None:
        _sum_up_if_it_ran(*alive[2])


def _sum_up_if_it_ran(parts: Mapping[str, Any]) -> None:
    if parts["store"].shared.accounts.steps:
        sum_up(parts)
