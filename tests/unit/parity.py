"""A program of saves, unpacks, drops and changes, run with the hooks in C and in Python: what is seen from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from actoffload import Offloader
from actoffload.errors import SavedTensorModifiedError
from actoffload.record import State
from actoffload.row_tier import RowMover
from tests.harness import WAIT_S, same_bits
from tests.unit.keeping import activation
from tests.unit.natively import in_python

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "shaped": lambda x: x.view(2, -1),
    "half": lambda x: x[: len(x) // 2],
    "piece": lambda x: x[130:140],
    "turned": lambda x: x.view(2, -1).t(),
    "detached": lambda x: x.detach(),
    "other counter": lambda x: x.data,
    "conjugate": lambda x: x.view(torch.complex64).conj(),
    "negative": lambda x: x.view(torch.complex64).conj().imag,
}
numbers = st.integers(0, 2)
commands = st.one_of(
    st.tuples(st.just("save"), numbers, st.sampled_from(sorted(VIEWS))),
    st.tuples(st.just("save"), numbers, st.just("whole")),
    st.tuples(st.just("unpack"), st.integers(0, 5)),
    st.tuples(st.just("unpack"), st.integers(0, 5)),
    st.tuples(st.just("drop"), st.integers(0, 5)),
    st.tuples(st.just("change"), numbers),
    st.tuples(st.just("renew"), numbers),
    st.tuples(st.just("next"), st.just(0)),
)


def follow(offloader: Offloader, elements: list[int], program: list[tuple[Any, ...]]) -> list[Any]:
    """All that can be told from outside of what was saved, in the order of the program."""
    tensors = [activation(number, size) for number, size in enumerate(elements)]
    handles: list[Any] = []
    seen: list[Any] = []
    context = offloader
    context.__enter__()
    pack, unpack = offloader._stack()[-1].hooks.pack_hook, offloader._stack()[-1].hooks.unpack_hook
    for name, number, *view in program:
        said: Any = None
        if name != "save":  # what is saved together goes into one row
            come_to_rest(offloader)
        elif offloader.config.pending_bytes is not None:  # else what is refused depends on time
            wait_for_what_was_begun(offloader)
        if name == "save":
            with torch.no_grad():
                seen_as = VIEWS[view[0]](tensors[number])
            handles.append((pack(seen_as), seen_as.detach().clone()))
        elif name == "unpack" and number < len(handles):
            handle, expected = handles[number]
            try:
                back = unpack(handle)
            except SavedTensorModifiedError as error:
                said = str(error)
            else:
                said = (same_bits(back, expected), back.shape, back.stride(), back.requires_grad, type(back))
                assert said[0], "other bits"
        elif name == "drop" and number < len(handles):
            del handles[number]
        elif name == "change":
            with torch.no_grad():
                tensors[number].add_(0)
        elif name == "renew":
            tensors[number] = activation(number, elements[number])
        elif name == "next":
            context.__exit__(None, None, None)
            context.__enter__()
            hooks = offloader._stack()[-1].hooks
            pack, unpack = hooks.pack_hook, hooks.unpack_hook
        said = said, [tensor._version for tensor in tensors]
        if name == "save":
            seen.append((name, said))
            continue
        come_to_rest(offloader)
        seen.append((name, said, *state(offloader)))
    context.__exit__(None, None, None)
    come_to_rest(offloader)
    handles.clear()
    come_to_rest(offloader)
    seen.append(("end", *state(offloader), len(offloader._identities)))
    orders = offloader._prefetch.orders._orders
    seen.append(sorted(orders.values()))
    return seen


def come_to_rest(offloader: Offloader) -> None:
    """Wait until all that moves has moved, both ways: what is counted then does not depend on time."""
    offloader.synchronize()
    entries = list(offloader._identities.entries.values())
    deadline_s = time.monotonic() + WAIT_S
    while any(entry.record.state is State.FETCHING for found in entries for entry in found):
        assert time.monotonic() < deadline_s
        time.sleep(0.0005)


def wait_for_what_was_begun(offloader: Offloader) -> None:
    """Wait until nothing is on its way out but what waits for its row to be full."""
    mover = offloader.tiers.movers["cpu"]
    deadline_s = time.monotonic() + WAIT_S
    while offloader.core.pending_bytes > (mover._open.nbytes if isinstance(mover, RowMover) else 0):
        assert time.monotonic() < deadline_s
        time.sleep(0.0005)


def state(offloader: Offloader) -> tuple[Any, ...]:
    statistics = offloader.statistics()
    accounts = offloader.core.accounts
    tape = offloader._stack()[-1].tape if offloader._stack() else None
    counts = (
        statistics.packed_tensors, statistics.packed_bytes, statistics.deduplicated_bytes,
        dict(sorted(statistics.kept_bytes.items())), statistics.live_records, statistics.baseline_peak_bytes,
        statistics.nvme_written_bytes > 0, accounts.resident_bytes, accounts.baseline_bytes, len(offloader._identities),
    )  # fmt: skip
    decisions = [(entry.nbytes, entry.action, entry.reason) for entry in offloader.plan.entries]
    walk = None
    if tape is not None:
        records = [None if r is None else (r.handles, r.waiting, r.round, r.stays, r.nbytes) for r in tape.records]
        walk = (records, tape.live, tape.total_bytes, tape.in_backward, tape.exhausted, tape.left_bytes, tape.order)
    return counts, decisions, walk


def both(make: Callable[[], Offloader], elements: list[int], program: list[tuple[Any, ...]]) -> list[list[Any]]:
    found = []
    model = torch.nn.Identity()  # else the live modules are looked through each time
    for how in (nullcontext, in_python):
        with how():
            offloader = make().use(model)
            try:
                found.append(follow(offloader, elements, program))
            finally:
                offloader.close()
    return found
