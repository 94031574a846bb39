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


def sum_up(parts: Mapping[str, Any], *, if_it_ran: bool = False) -> None:
    """Write the line, where the option ``announce`` directs it.

    Args:
        parts: the attributes of an offloader.
        if_it_ran: write none for an offloader whose model never ran.
    """
    store: ActivationStore = parts["store"]
    if not store.forked and (store.shared.accounts.steps or not if_it_ran):  # of a fork the parent writes it
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
        name = "actoffload-last-line"
        threading.Thread(target=sum_up, args=(parts,), kwargs={"if_it_ran": True}, name=name).start()


def _sum_up_if_alive(dying: weakref.finalize[Any, Any]) -> None:
    alive = dying.detach()
    if alive is not None:
        sum_up(*alive[2], if_it_ran=True)
