"""What a review of the core found wrong, one test each."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actoffload import OffloadConfig, Offloader
from actoffload.cpu_tier import CpuMover
from actoffload.device_tier import DeviceMover
from actoffload.extent_io import Transfer
from actoffload.identity import StorageRef
from actoffload.policy import KeepReason
from actoffload.record import Record
from actoffload.testing.fakedevice import FakeDevice, FakeStream
from tests.harness import WAIT_S, MakeOffloader, descriptors, same_bits, save_in_python

SIZE = 64
RECORD_BYTES = SIZE * SIZE * 4


def _config(path: Path, **options: Any) -> OffloadConfig:
    fields: dict[str, Any] = {"target": "nvme", "path": str(path), "min_bytes": 0, "keep_last_bytes": 0}
    return OffloadConfig(**(fields | options))


def _scope(offloader: Offloader | None) -> contextlib.AbstractContextManager[object]:
    return offloader if offloader is not None else contextlib.nullcontext()


def _weight(rows: int = SIZE) -> Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(3)).requires_grad_()


def _gradient(tensor: Tensor) -> Tensor:
    """A copy of the gradient, which is cleared."""
    assert tensor.grad is not None
    found, tensor.grad = tensor.grad.clone(), None
    return found


def _forward(h: Tensor) -> Tensor:
    for _ in range(8):
        h = (h * 1.01).sin()
    return h.sum()


def _background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_equal_versions_of_two_counters_do_not_share_a_record_after_a_change(make_offloader: MakeOffloader) -> None:
    """A record whose own counter had moved on was taken for `.data`, which counts anew from the same number."""

    def run(offloader: Offloader | None) -> Tensor:
        x, v = _weight().detach(), torch.ones(SIZE, SIZE, requires_grad=True)
        with _scope(offloader):
            h = x * 2 * torch.ones(SIZE, SIZE, requires_grad=True)
            alive = h.sin()  # saves h at version 0; its graph stays alive and never runs
            if offloader is not None:
                offloader.synchronize()
            with torch.no_grad():
                h.add_(1)
            y = h.data  # the same storage, a counter of its own: version 0 again
            loss = (y * v).sum()
        if offloader is not None:
            offloader.synchronize()
        loss.backward()
        assert alive.requires_grad
        return _gradient(v)

    offloader = make_offloader()
    assert same_bits(run(offloader), run(None))
    assert offloader.statistics().nvme_read_bytes >= RECORD_BYTES


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_the_result_of_a_collective_is_waited_for_before_it_is_saved(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective writes raw memory when it ends: what was moved before that held the bytes from before it."""
    import torch.distributed._functional_collectives as collectives

    def run(offloader: Offloader | None) -> Tensor:
        w, received, wire = _weight(), torch.zeros(512, SIZE), _weight(512).detach()

        def wait(tensor: Tensor) -> Tensor:  # as NCCL's output: no version changes
            ctypes.memmove(received.data_ptr(), wire.data_ptr(), wire.nbytes)
            return tensor

        monkeypatch.setattr(collectives, "wait_tensor", wait)
        with _scope(offloader):
            loss = torch.mm(collectives.AsyncCollectiveTensor(received), w).sum()
        loss.backward()
        return _gradient(w)

    offloader = make_offloader()
    admit = offloader.admit

    def admit_and_write(*saved: Any) -> Record:  # the disk is faster than the wire
        record = admit(*saved)
        offloader.synchronize()
        return record

    monkeypatch.setattr(offloader, "admit", admit_and_write)
    save_in_python(offloader)
    assert same_bits(run(offloader), run(None))
    assert offloader.statistics().nvme_read_bytes > 0


def test_a_record_hosted_again_keeps_its_slot_when_its_write_ends_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that ended after backward had settled its record took the slot away: the second backward failed."""
    arrived, go = threading.Event(), threading.Event()
    written = DeviceMover._written

    def late(self: DeviceMover, record: Record, since_s: float, transfer: Transfer) -> None:
        arrived.set()
        assert go.wait(WAIT_S)
        written(self, record, since_s, transfer)

    monkeypatch.setattr(DeviceMover, "_written", late)
    device = FakeDevice("eager")
    offloader = Offloader(_config(tmp_path, pending_bytes=4096), accelerator=device)
    w = _weight()
    try:
        with device:
            (w * 2.0).sin().sum().backward()
            expected = _gradient(w)
            with offloader:
                loss = (w * 2.0).sin().sum()
            waiter = _background(offloader.synchronize)
            assert arrived.wait(WAIT_S)
            loss.backward(retain_graph=True)
            found = [_gradient(w)]
            go.set()
            waiter.join(WAIT_S)
            loss.backward()
        assert not waiter.is_alive(), "the late write ended"
        assert [same_bits(one, expected) for one in (*found, _gradient(w))] == [True, True]
        assert offloader.statistics().nvme_written_bytes >= RECORD_BYTES
    finally:
        go.set()
        offloader.abort()


def test_the_peaks_do_not_grow_while_nothing_is_admitted(make_offloader: MakeOffloader) -> None:
    """Kept tensors that had died were taken off only when another was admitted: the peaks grew with every step."""
    offloader = make_offloader(min_bytes="1MiB")
    w = torch.ones(1000, requires_grad=True)
    for _ in range(20):
        with offloader:
            loss = (w * 2).exp().sum()  # saves 4000 bytes, too few to move
        loss.backward()
        del loss
    statistics = offloader.statistics()
    assert (statistics.resident_peak_bytes, statistics.baseline_peak_bytes) == (4000, 4000)
    assert statistics.kept_bytes[KeepReason.SMALL.value] == 20 * 4000


class _ReadsTwice(torch.autograd.Function):
    """A linear layer that in backward reads ``ctx.saved_tensors`` once for each tensor in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient @ ctx.saved_tensors[1], gradient.t() @ ctx.saved_tensors[0]


@pytest.mark.parametrize("twice", ["in one node", "by two backwards"])
def test_a_second_unpack_does_not_enlarge_what_is_fetched_ahead(make_offloader: MakeOffloader, twice: str) -> None:
    """Backward starting over forgot what it had ahead, and fetched another window on top of it each time."""
    nbytes = 128 << 10
    offloader = make_offloader(prefetch_bytes=2 * nbytes, policy="all")
    w, x = _weight(), _weight(nbytes // 4 // SIZE)

    def forward(h: Tensor) -> Tensor:
        for _ in range(24):
            h = _ReadsTwice.apply(h, w).tanh() if twice == "in one node" else (h * 1.0001).sin()
        return h.sum()

    forward(x).backward()
    expected = _gradient(x)
    with offloader:
        loss = forward(x)
    offloader.synchronize()
    accounts = offloader.core.accounts
    assert accounts.moved_bytes >= 23 * nbytes
    for round_ in range(2):
        accounts.resident_peak_bytes = 0
        loss.backward(retain_graph=True)
        assert 0 < accounts.resident_peak_bytes <= 4 * nbytes, f"backward {round_}: a window and what is being used"
        assert same_bits(_gradient(x), expected)


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("method", ["close", "synchronize"])
def test_nothing_is_begun_after_abort(tmp_path: Path, simulated: bool, method: str) -> None:
    """`close` and `synchronize` still released windows after `abort`, and wrote to a spool that was gone."""
    device = FakeDevice("lazy") if simulated else None
    offloader = Offloader(_config(tmp_path, pending_bytes="1MiB"), accelerator=device)
    with device or contextlib.nullcontext():
        with offloader:
            _alive = (_weight() * 2.0).sin().sum()
        offloader.abort()
        before = offloader.statistics()
        getattr(offloader, method)()
        assert offloader.statistics() == before


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "actoffload" in thread.name}


def _wait_until_ended(threads: set[threading.Thread], files: int) -> None:
    """Wait until no thread and no open file is left but those from before."""
    deadline_s = time.monotonic() + WAIT_S
    while (_threads() - threads or descriptors() > files) and time.monotonic() < deadline_s:
        gc.collect()
        time.sleep(0.02)
    assert not _threads() - threads
    assert descriptors() <= files


def test_an_offloader_that_is_dropped_without_close_ends(tmp_path: Path) -> None:
    """Its engine's threads and its nameless file stayed until the process ended."""
    threads, files = _threads(), descriptors()
    w = _weight()
    (w * 2.0).sin().sum().backward()
    expected = _gradient(w)
    for _ in range(2):
        offloader = Offloader(_config(tmp_path))
        with offloader:
            loss = (w * 2.0).sin().sum()
        offloader.synchronize()
        assert _threads() - threads
        assert descriptors() > files
        del offloader
        gc.collect()
        loss.backward()  # the graph holds what it needs
        assert same_bits(_gradient(w), expected)
        del loss
    _wait_until_ended(threads, files)


@pytest.mark.parametrize("contended", [False, True])
def test_a_closed_offloader_ends_after_its_last_handle(tmp_path: Path, contended: bool) -> None:
    """When the last handle died while another thread held the lock, nothing ever closed the spool."""
    threads, files = _threads(), descriptors()
    offloader = Offloader(_config(tmp_path))
    with offloader:
        loss = (_weight() * 2.0).sin().sum()
    offloader.close()
    with offloader.core.lock if contended else contextlib.nullcontext():
        del loss
    assert not contended or offloader.statistics().live_records == 0
    _wait_until_ended(threads, files)


def test_a_parameters_data_may_be_swapped_between_forward_and_backward(make_offloader: MakeOffloader) -> None:
    """A kept parameter was an alias: it held the gathered memory, and backward saw the old contents."""

    def run(offloader: Offloader | None) -> tuple[bool, Tensor]:
        full, x = _weight().detach(), _weight(512)
        p = nn.Parameter(torch.empty(0))
        p.data = full.clone()
        gathered = StorageRef(p.untyped_storage())
        with _scope(offloader):
            loss = _ReadsTwice.apply(x * 1.0, p).sum()
        p.data = torch.empty(0)
        gone = gathered.gone()
        p.data = full * 2
        if offloader is not None:
            offloader.synchronize()
        loss.backward()
        return gone, _gradient(x)

    offloader = make_offloader()
    gone, found = run(offloader)
    assert gone
    assert same_bits(found, run(None)[1])
    assert offloader.statistics().nvme_read_bytes > 0


@pytest.mark.parametrize("target", ["host", "nvme"])
def test_running_out_of_memory_for_what_is_early_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """Device memory that ran out for a fetch ahead failed a backward that had all it needed."""
    device = FakeDevice("eager")
    config = _config(tmp_path, target=target, pending_bytes=RECORD_BYTES, prefetch_bytes="1MiB")
    offloader = Offloader(config, accelerator=device)
    needed, refused = [False], [0]
    fetch_now, empty = Offloader._fetch_now, device.empty

    def fetch_what_is_needed(self: Offloader, *what: Any) -> torch.UntypedStorage:
        needed[0] = True
        storage = fetch_now(self, *what)
        needed[0] = False
        return storage

    def empty_if_needed(nbytes: int, index: int, stream: FakeStream) -> Tensor:
        if not needed[0]:
            refused[0] += 1
            raise torch.OutOfMemoryError("out of memory (simulated)")
        return empty(nbytes, index, stream)

    w = _weight()
    with device:
        _forward(w).backward()
        expected = _gradient(w)
        with offloader:
            loss = _forward(w)
        offloader.synchronize()
        monkeypatch.setattr(Offloader, "_fetch_now", fetch_what_is_needed)
        monkeypatch.setattr(device, "empty", empty_if_needed)
        loss.backward()
    assert same_bits(_gradient(w), expected)
    assert refused[0] > 0
    assert offloader.statistics().host_read_bytes >= 7 * RECORD_BYTES
    offloader.close()


def test_two_threads_save_one_storage_under_a_budget(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that waited for room had no handle yet: another found its record, dropped it, and it was released."""
    inside, go = threading.Event(), threading.Event()

    def make_room(self: CpuMover, nbytes: int) -> float:
        if not inside.is_set():
            inside.set()
            while not go.is_set():  # as the real one: gives the lock back while it waits
                self.core.changed.wait(0.05)
        return 0.0

    monkeypatch.setattr(CpuMover, "make_room", make_room)
    offloader = make_offloader(device_budget="1MiB")
    w = _weight(256)
    h = w * 1.0
    h.sin().sum().backward(retain_graph=True)
    expected = _gradient(w)

    def save_and_run() -> None:
        with offloader:
            loss = h.sin().sum()
        loss.backward(retain_graph=True)

    def save_and_drop() -> None:
        with offloader:
            assert h.cos().sum().requires_grad

    first = _background(save_and_run)
    try:
        assert inside.wait(WAIT_S)
        second = _background(save_and_drop)
        second.join(WAIT_S)
    finally:
        go.set()
    first.join(WAIT_S)
    assert [first.is_alive(), second.is_alive()] == [False, False]
    assert same_bits(_gradient(w), expected)
    assert offloader.statistics().packed_tensors >= 2


def test_a_second_stream_waits_for_a_copy_that_the_first_still_holds(tmp_path: Path) -> None:
    """A copy that only the first stream had waited for was handed to a stream that had not."""
    device = FakeDevice("lazy")
    offloader = Offloader(_config(tmp_path, target="host", pending_bytes=4096, policy="all"), accelerator=device)
    w = _weight()
    with device:
        expected = (w * 2.0).detach()
        with offloader:
            out: Any = (w * 2.0).sin()
    offloader.synchronize()
    device.finish()
    _first = out.grad_fn._saved_self  # its stream will wait for the copy, and has not come to that
    seen: list[bool] = []
    with device.on(FakeStream("second compute")):
        second = out.grad_fn._saved_self
        device.launch(lambda: seen.append(same_bits(second, expected)))
        device.before_kernel()
    assert seen == [True]
    assert offloader.statistics().host_read_bytes >= RECORD_BYTES
    offloader.abort()
