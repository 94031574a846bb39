"""Storages that a plan keeps without a record: each has a place on the tape, and its handles hold its memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..tiers.accounts import MANY_DEFERRED
from ..tiers.record import Hold, Place, Record
from .store import ActivationStore
from .tape import Tape


def may_keep(store: ActivationStore, number: int, nbytes: int, tape: Tape[Record]) -> bool:
    """Return whether `keep` may take ``nbytes`` of the storage with this number. The lock is not needed."""
    index, planned = len(tape.records), tape.planned  # only this thread appends to the tape
    return (index < len(planned) and planned[index] == nbytes) or number in store.identities.places


def keep(
    store: ActivationStore,
    handle: Any,
    tensor: Tensor,
    span: tuple[int, int],
    storage: torch.UntypedStorage,
    tape: Tape[Record],
    module: str | None,
) -> Hold | None:
    """Count a tensor that stays without a record, by the plan; return its hold, or None if `admit` has to decide.

    Args:
        store: counts it.
        handle: what autograd gets; its ``alias`` holds the storage.
        tensor: the tensor being saved.
        span: as for `ActivationStore.admit`, and so are ``storage`` and ``tape``.
        module: the name of the module that runs, if known.
    """
    shared, deferred, nbytes = store.shared, store.shared.accounts.deferred, span[1] - span[0]
    store.speak()
    with shared.lock:
        known = store.identities.find(storage, tensor, span)
        if known is not None:
            if isinstance(known, Record):
                return None
            deferred.append(("", nbytes, False))
            return Hold.of(handle, known, store.died.append)
        index, planned = len(tape.records), tape.planned
        if index >= len(planned) or planned[index] != nbytes:
            return None
        if store.profiler.running or shared.stopped or store.closed:
            return None
        reason = store.decision.why_planned
        deferred.append((reason._value_, nbytes, True))
        if len(deferred) >= MANY_DEFERRED:
            store.count_deferred()
        shared.accounts.live_records += 1
        place = Place(storage.data_ptr(), *span, nbytes, "cpu" if tensor.is_cpu else tensor.device.type)
        place.tape, place.index, place.module = tape, tape.append(None, nbytes), module
        store.identities.add(place, storage._cdata, tensor)
        hold = Hold.of(handle, place, store.died.append)
        tape.decisions.append((nbytes, reason, module))
        store.saved_by_node(tape, nbytes)
        shared.events += 1
        if shared.largest_moved_bytes:  # other storages move under this plan, and this save is a position for them
            tier = store.tiers.by_device[place.kind]
            with tier.watched():
                tier.notice_resized()
                tier.poll()
                store.prefetch.during_forward(tape)
                tier.release_due()
    return hold
