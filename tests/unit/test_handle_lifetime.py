"""The graph owns its saved tensors: however a graph ends, all is released, and nothing is released too early."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import OffloadConfig, Offloader
from actoffload.events import EventKind, TraceEvent
from actoffload.testing.faults import GateEngine
from tests.harness import (
    ON_EACH_DEVICE,
    WAIT_S,
    Chain,
    MakeOffloader,
    accounts_of,
    assert_empty,
    assert_same_gradients,
    batch,
    descriptors,
    is_locked,
    no_garbage_collection,
    only_engine,
    pool_bytes,
    records_of,
    resident_set_bytes,
    run_in_threads,
    spool_statistics,
    states_of,
    train_step,
    wait_until,
)
from tests.programs import run_program

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    """Only reference counts free anything."""
    with no_garbage_collection():
        yield


class _ForwardFailedError(Exception):
    pass


def _fail_in_forward(offloader: Offloader, model: Chain, x: Tensor) -> None:
    def fail_late() -> None:
        with offloader:
            y = model(x)
            assert y.requires_grad
            raise _ForwardFailedError

    with pytest.raises(_ForwardFailedError):
        fail_late()


def _drop_after_forward(offloader: Offloader, model: Chain, x: Tensor, step: int) -> None:
    with offloader:
        loss = model(x).sum()
    if step % 2:  # of the steps that drop their graph, every other one waits until all is written
        offloader.synchronize()
    del loss


def _return_the_branch_that_runs(offloader: Offloader, model: Chain, x: Tensor) -> None:
    with offloader:
        unused, used = model(x), model(x)
    used.sum().backward()
    del unused


def test_three_hundred_steps_of_which_most_never_run_backward_leave_nothing(make_offloader: MakeOffloader) -> None:
    model, x = Chain(depth=2), batch(512)
    expected = train_step(model, x)
    offloader = make_offloader()
    resident: list[int] = []
    open_files: list[int] = []
    for step in range(300):
        if step % 3 == 0:
            assert_same_gradients(train_step(model, x, offloader), expected)
        elif step % 6 == 1:
            _fail_in_forward(offloader, model, x)
        elif step % 12 == 2:
            _return_the_branch_that_runs(offloader, model, x)
            model.zero_grad(set_to_none=True)
        else:
            _drop_after_forward(offloader, model, x, step)
        if step % 10 == 9:
            assert_empty(offloader)
            open_files.append(descriptors())
            resident.append(resident_set_bytes())
    statistics = offloader.statistics()
    assert statistics.steps == 300
    assert statistics.nvme_written_bytes > 50 * MIB // 2, "of 50 dropped graphs all was written"
    assert statistics.degraded == {}
    assert len(set(open_files)) == 1
    # A step saves about 1 MiB: a leak of one step in ten would show.
    assert max(resident[-10:]) - max(resident[:10]) < 12 * MIB


@pytest.mark.parametrize("min_bytes", [0, 10 * MIB])
@pytest.mark.parametrize("end", ["the graph is dropped", "backward frees it"])
def test_nothing_needs_the_garbage_collector(make_offloader: MakeOffloader, min_bytes: int, end: str) -> None:
    offloader = make_offloader(min_bytes=min_bytes)
    model, x = Chain(), batch()
    with offloader:
        loss = model(x).exp().sum()  # exp saves its own output: the classic cycle
    assert offloader.statistics().packed_tensors >= 12
    assert accounts_of(offloader).baseline_bytes > 0
    if end == "the graph is dropped":
        del loss
    else:
        loss.backward()
    assert_empty(offloader)


def test_handles_dropped_in_other_threads(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    model, x = Chain(), batch()

    def drop_all(graphs: list[Tensor]) -> None:
        while graphs:
            graphs.pop()

    for _ in range(10):
        graphs: list[Tensor] = []
        with offloader:
            for _ in range(4):
                graphs.append(model(x).sum())
        half = [graphs[:2], graphs[2:]]
        graphs.clear()
        meanwhile = partial(train_step, model, x, offloader)  # packs and unpacks
        run_in_threads(*(partial(drop_all, part) for part in half), meanwhile)
    assert_empty(offloader)


def test_the_last_tensor_may_die_in_another_thread(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    x = torch.randn(300, 300, requires_grad=True)
    with offloader:
        y = x.exp()
    offloader.synchronize()
    node = y.grad_fn
    del y
    box = [node._saved_result.detach()]  # type: ignore[union-attr]
    del node
    assert offloader.statistics().live_records == 0
    assert pool_bytes(offloader) > 0
    run_in_threads(box.clear)
    assert pool_bytes(offloader) == 0


def test_an_error_in_a_policy_leaves_no_record(make_offloader: MakeOffloader) -> None:
    class Failing:
        def decide(self, facts: Any) -> Any:
            raise _ForwardFailedError

    offloader = make_offloader(policy=Failing())
    x = torch.randn(64, 64, requires_grad=True)
    y = x * 2
    for _ in range(2):
        with pytest.raises(_ForwardFailedError), offloader:
            y.exp()
        assert_empty(offloader)


def test_each_round_of_backward_holds_a_reloaded_storage_until_its_last_unpack(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy="all", engine="memory")
    with offloader:
        y = torch.ones(300, 300, requires_grad=True) * 2
        graphs: list[Any] = [y.sin(), y.cos()]
        del y
    offloader.synchronize()
    for _ in range(3):
        for graph, state in zip(graphs, ("resident", "spilled"), strict=True):
            assert bool((graph.grad_fn._saved_self == 2).all())
            assert states_of(offloader) == [state]


def test_a_deep_graph_is_freed_without_recursion(tmp_path: Path) -> None:
    """Once Python has seen a graph's nodes, each frees the next inside itself: at this depth the process ended."""
    script = """
import sys, torch, torch.distributed as dist, torch.distributed.tensor
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # where DTensors may be
from actoffload import OffloadConfig, Offloader
offloader = Offloader(OffloadConfig(target="nvme", path=sys.argv[1], policy="all"))
h = x = torch.zeros(8, requires_grad=True)
with offloader:
    for _ in range(60_000):
        h = h.sin()
h.sum().backward()
del h
offloader.close()
print("alive")
"""
    done = run_program(script, str(tmp_path))
    assert "alive" in done.stdout, (done.returncode, done.stderr[-2000:])


# -- handles that die while the lock is held ---------------------------------------------------------------------------
#
# A trace sink or a policy that stops inside the lock holds it as long as the test wants. The test then looks at the
# rest without the offloader's methods, which would empty the mailbox.


NUMEL = 256 << 10
RECORD_BYTES = 4 * NUMEL


class StopAt:
    """A sink that stops once, under the offloader's lock, at the first event of this kind with this many bytes."""

    def __init__(self, kind: EventKind, nbytes: int, detail: str) -> None:
        self._what = kind, nbytes, detail
        self._reached, self._go = threading.Event(), threading.Event()

    def __call__(self, event: TraceEvent) -> None:
        if (event.kind, event.nbytes, event.detail) == self._what and not self._reached.is_set():
            self._reached.set()
            assert self._go.wait(WAIT_S)

    @contextlib.contextmanager
    def reached(self) -> Iterator[None]:
        """Inside this context the thread stands still."""
        try:
            assert self._reached.wait(WAIT_S), "no event reached the place to stop at"
            yield
        finally:
            self._go.set()


def _saved_once(where: str = "cpu") -> Tensor:
    return (torch.linspace(-1, 1, NUMEL, device=where).requires_grad_() * 1.0).sin().sum()


def _assert_released(offloader: Offloader) -> None:
    """No record lives and nothing is held. This check does not empty the mailbox itself."""
    accounts = accounts_of(offloader)
    wait_until(lambda: accounts.live_records == 0, "records are left")
    assert (accounts.baseline_bytes, accounts.resident_bytes) == (0, 0)
    assert records_of(offloader) == []
    wait_until(lambda: spool_statistics(offloader).allocated_bytes == 0, "room on disk is left")
    wait_until(lambda: pool_bytes(offloader) == 0, "host memory is left")


@ON_EACH_DEVICE
def test_a_handle_that_dies_while_a_write_ends_is_released_at_once(make_offloader: MakeOffloader, where: str) -> None:
    stop = StopAt(EventKind.WRITE, RECORD_BYTES, "" if where == "cpu" else "to disk")
    offloader = make_offloader(engine=GateEngine, trace=stop)
    with offloader:
        loss = _saved_once(where)
    waiting = threading.Thread(target=offloader.synchronize, daemon=True)  # begins the write
    waiting.start()
    only_engine(offloader).open()
    with stop.reached():
        del loss
        assert is_locked(offloader)
        assert accounts_of(offloader).live_records == 1
    _assert_released(offloader)
    waiting.join(WAIT_S)
    assert not waiting.is_alive()


def test_a_handle_that_dies_in_the_thread_that_holds_the_lock_is_too(make_offloader: MakeOffloader) -> None:
    """A finalizer may run inside an engine's completion."""
    graph: list[Tensor] = []
    done = threading.Event()

    def sink(event: TraceEvent) -> None:
        if event.kind is EventKind.WRITE:
            graph.clear()
            done.set()

    offloader = make_offloader(engine=GateEngine, trace=sink)
    with offloader:
        graph.append(_saved_once())
    only_engine(offloader).open()
    assert done.wait(WAIT_S)
    _assert_released(offloader)


def test_a_failed_forward_is_not_counted_amid_a_change(make_offloader: MakeOffloader) -> None:
    """The collector may close a generator in the thread that holds the lock; the lock's release counts the dead."""
    offloader = make_offloader()

    def forward() -> Iterator[Tensor]:
        with offloader:
            yield _saved_once()

    generator = forward()
    loss = next(generator)
    with offloader.store.shared.lock:
        del loss
        generator.close()  # type: ignore[attr-defined]
        assert accounts_of(offloader).live_records == 1
    _assert_released(offloader)


def test_statistics_of_a_closed_offloader_shut_it_if_they_count_the_last_death(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector may free the last graph in a thread that reads the counts. Nothing is noted after that."""
    before = set(threading.enumerate())
    offloader = make_offloader()
    with offloader:
        graph = [_saved_once()]
    offloader.close()
    count = offloader.store._count_dropped

    def collect_and_count() -> None:
        graph.clear()
        count()

    monkeypatch.setattr(offloader.store, "_count_dropped", collect_and_count)
    assert offloader.statistics().live_records == 0
    assert offloader.store.shared.stopped
    wait_until(lambda: set(threading.enumerate()) <= before, "threads are left")


def test_regions_abort_their_store_and_do_not_keep_it_alive(tmp_path: Path) -> None:
    for interrupted in (True, False):
        offloader = Offloader(OffloadConfig(path=str(tmp_path), announce="none"))
        regions, store = offloader.store.regions, weakref.ref(offloader.store)
        if interrupted:
            regions.abort_if_interrupted(KeyboardInterrupt())
            assert offloader.store.shared.interrupted
        offloader.abort()
        del offloader
        assert store() is None
        regions.abort_if_interrupted(KeyboardInterrupt())
