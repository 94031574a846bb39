"""For tests of the offloader: bit-exact comparison, a program that saves much, counts that return to zero."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from actoffload import OffloadConfig, Offloader, Profile
from actoffload.runtime.profiler import Profiler
from actoffload.storage.spool import Spool, SpoolStatistics
from actoffload.testing.simulated_device import DEVICES, NAME, SimulatedAccelerator, SimulatedDevice
from actoffload.tiers.copy_streams import Batch, CopyStreams
from actoffload.tiers.tier import Tier

WAIT_S = 60.0
"""How long a test waits for another thread before it calls that a hang."""
MakeOffloader = Callable[..., Offloader]


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements, in order: equal if and only if the tensors are, NaN and -0.0 included."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = torch.empty(plain.numel(), dtype=plain.dtype, device=plain.device)
    return flat.copy_(plain.reshape(-1)).view(torch.uint8)


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors (or two missing ones) are equal bit for bit: dtype, shape, layout, NaN and -0.0 included."""
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return False
    parts = _parts(one), _parts(other)
    if parts[0] is None or parts[1] is None:
        return parts == (None, None) and torch.equal(bits(one), bits(other))
    return len(parts[0]) == len(parts[1]) and all(map(same_bits, parts[0], parts[1]))


def _parts(tensor: Tensor) -> list[Tensor] | None:
    """The plain strided tensors that a sparse tensor or a wrapper subclass is made of; None for a plain one."""
    tensor = tensor.detach()
    if is_traceable_wrapper_subclass(tensor):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return None


def assert_same_bits(mine: Sequence[Tensor | None], reference: Sequence[Tensor | None], what: str = "tensor") -> None:
    """Every tensor has the bits of its counterpart."""
    assert len(mine) == len(reference)
    for index, (one, other) in enumerate(zip(mine, reference, strict=True)):
        if same_bits(one, other):
            continue
        if one is None or other is None or one.shape != other.shape or one.layout is not torch.strided:
            raise AssertionError(f"{what} {index} differs: {one!r} instead of {other!r}")
        worst = (one.detach() - other.detach()).abs().max().item()
        raise AssertionError(f"{what} {index} {tuple(one.shape)} differs by up to {worst}")


class Chain(nn.Module):
    """A stack of linear layers and activations: saves inputs, outputs and transposed weights."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.sigmoid(x)
        return x


def batch(rows: int = 128, width: int = 64, seed: int = 1) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's gradients, which are cleared."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Fails and names the first gradient that differs in a bit."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert same_bits(found[name], gradient), f"the gradient of {name} differs"


def train_step(
    model: nn.Module,
    x: Tensor,
    offloader: Offloader | None = None,
    *,
    between: Callable[[], object] | None = None,
    inside: bool = False,
) -> dict[str, Tensor]:
    """One forward and backward; returns the gradients.

    Args:
        model: what to run.
        x: its input.
        offloader: its context surrounds the forward; None for plain PyTorch.
        between: called between forward and backward.
        inside: run backward inside the context as well.
    """
    with offloader if offloader is not None else contextlib.nullcontext():
        loss = model(x).square().sum()
        if inside:
            if between is not None:
                between()
            loss.backward()
    if not inside:
        if between is not None:
            between()
        loss.backward()
    return gradients(model)


# -- the inside of an offloader that tests read, each part in one place ------------------------------------------------


def accounts_of(offloader: Offloader) -> Any:
    """The running counts: `resident_bytes` and `baseline_bytes` now, and peaks that a test may start over."""
    return offloader.store.shared.accounts


def lock_of(offloader: Offloader) -> Any:
    """The lock that guards all of an offloader's state."""
    return offloader.store.shared.lock


def is_locked(offloader: Offloader) -> bool:
    """Whether any thread holds that lock."""
    lock = lock_of(offloader)
    if lock.owned() or not lock.acquire(blocking=False):
        return True
    lock.release()
    return False


def pending_bytes(offloader: Offloader) -> int:
    """Bytes of tensors that are being offloaded and whose memory is still held."""
    found: int = offloader.store.shared.pending_bytes
    return found


def spool_of(offloader: Offloader) -> Spool:
    """The files on disk."""
    spool = offloader.store.tiers.spool
    assert spool is not None
    return spool


def pools_of(offloader: Offloader) -> list[Any]:
    """The pools of host memory."""
    return list(offloader.store.tiers.pools)


def tier_of(offloader: Offloader) -> Any:
    """The tier that moves the records of the offloader's only device."""
    (tier,) = offloader.store.tiers.by_device.values()
    return tier


def recorder_of(offloader: Offloader) -> Profiler:
    return offloader.store.profiler


def profile_of(offloader: Offloader) -> Profile:
    """The step that the profiler has recorded."""
    profile = recorder_of(offloader).profile()
    assert profile is not None
    return profile


def following(offloader: Offloader, *once: int) -> Offloader:
    """An offloader that lets these checkpointed regions run once, by their places in the forward; returns it."""
    offloader.store.regions.follow(frozenset(once))
    return offloader


def budget_of(offloader: Offloader) -> Any:
    """The bytes that may be on a device: `limit_bytes`, and those of them that are kept free."""
    return offloader.store.shared.budget


def window_bytes(offloader: Offloader) -> int:
    """How far ahead backward reads."""
    return offloader.store.prefetch.window.nbytes


def autopilot_of(offloader: Offloader) -> Any:
    """The autopilot, which plans and corrects under ``policy="auto"``."""
    return offloader.autopilot


def plan_with(offloader: Offloader, planner: Any) -> Any:
    """Have another planner make the plans of ``policy="auto"``; returns the autopilot that calls it."""
    pilot = autopilot_of(offloader)
    pilot.making.planner = planner
    return pilot


def after_fork_in_child(offloader: Offloader) -> None:
    """Run the hook for the child of a fork, in this process."""
    offloader.store.after_fork_in_child()


def records_of(offloader: Offloader) -> list[Any]:
    """The records that are alive, in the order in which they were saved."""
    records = offloader.store.identities.records.values()
    return sorted((known.record for found in records for known in found), key=lambda record: record.saved.number)


def tape_records(offloader: Offloader) -> list[Any]:
    """The records of the forward that runs in this thread; only inside the context."""
    return list(offloader._forwards.stack[-1].tape.records)


def note_rooms(patch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each room that any tier is asked to make from now on."""
    asked: list[int] = []
    make_room = Tier.make_room

    def noted(tier: Tier, nbytes: int) -> float:
        asked.append(nbytes)
        return make_room(tier, nbytes)

    patch.setattr(Tier, "make_room", noted)
    return asked


def note_region_saves(patch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each tensor that a recorded region would save, and that may move, from now on."""
    noted: list[int] = []
    region_saved = Profiler.region_saved

    def note(profiler: Profiler, region: Any, nbytes: int, kept: str, outside: Any) -> None:
        noted.extend([] if kept else [nbytes])
        region_saved(profiler, region, nbytes, kept, outside)

    patch.setattr(Profiler, "region_saved", note)
    return noted


def use_clock(now: Callable[[], float], patch: pytest.MonkeyPatch) -> None:
    """Have this be the library's clock, in seconds."""
    for name, module in list(sys.modules.items()):
        if name.startswith("actoffload") and getattr(module, "now", None) is not None:
            patch.setattr(module, "now", now)


# -- derived from it ---------------------------------------------------------------------------------------------------


def states_of(offloader: Offloader) -> list[str]:
    """The state of each living record, in the order in which they were saved."""
    return [record.state.value for record in records_of(offloader)]


def wait_until(holds: Callable[[], object], what: str = "it did not come to pass") -> None:
    """Wait until a condition holds; fail after `WAIT_S`."""
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.001)


def run_in_threads(*works: Callable[[], object]) -> None:
    """Run each in a thread of its own, all at once; fail if a thread hangs, and raise the first exception of any."""
    raised: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a thread hangs"
    if raised:
        raise raised[0]


def spool_statistics(offloader: Offloader) -> SpoolStatistics:
    return spool_of(offloader).statistics()


def acquire_slot(pool: Any, nbytes: int, **options: Any) -> Any:
    """A slot of host memory, after all that is being page-locked, if need be; None where there is none."""
    while (slot := pool.acquire(nbytes, **options)) is None and pool.growing:
        time.sleep(0.001)
    return slot


def pool_bytes(offloader: Offloader) -> int:
    """Host memory that is in use."""
    for pool in pools_of(offloader):
        pool.reclaim()
    return sum(pool.slots.allocated_bytes for pool in pools_of(offloader))


def assert_empty(offloader: Offloader) -> None:
    """An offloader holds nothing any more: no records, resident bytes, extents, transfers, slots or names."""
    offloader.synchronize()
    # Autograd's thread of a device may still hold a graph whose backward has raised, as the caller gets the error.
    wait_until(lambda: offloader.statistics().live_records == 0, "records are alive")
    accounts = accounts_of(offloader)

    def nothing_is_counted() -> bool:
        offloader.statistics()  # counts the tensors that are alive
        return (accounts.resident_bytes, accounts.baseline_bytes) == (0, 0)

    # The thread of a write lets go of the memory after it has notified; a recomputation may have used that memory.
    wait_until(nothing_is_counted, "bytes are still counted")
    assert records_of(offloader) == []
    # A transfer that had begun when its record was dropped ends by itself, and then its thread lets go of the memory.
    wait_until(
        lambda: not spool_statistics(offloader).busy_extents and not pool_bytes(offloader), "memory is still lent"
    )
    spool = spool_statistics(offloader)
    assert (spool.allocated_bytes, spool.busy_extents) == (0, 0)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def files_in(folder: Path) -> int:
    """How many files of a folder this process has open; those of a spool have no name there."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.path.lexists(link) and os.readlink(link).startswith(str(folder)) for link in links)


def hook_count(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def resident_set_bytes() -> int:
    """The process's memory now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Only reference counts free anything in here: a cycle shows as a leak."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def only_engine(offloader: Offloader) -> Any:
    """The one storage engine of an offloader, typed loosely: tests call methods that only their fault engine has."""
    (engine,) = spool_of(offloader).engines
    return engine


ON_EACH_DEVICE = pytest.mark.parametrize("where", ["cpu", pytest.param(NAME, marks=pytest.mark.simulated)])
"""Where a test has its tensors: an offloader of the default devices takes those of the process's accelerator."""

Adversary = Literal["late copies", "late kernels", "all late", "random"]
ADVERSARIES: tuple[Adversary, ...] = ("late copies", "late kernels", "all late", "random")


def hinder(device: SimulatedDevice, accelerator: SimulatedAccelerator, adversary: Adversary, seed: int = 0) -> None:
    """Delay copies, kernels or both until a wait needs them; or all of them at random, from a seed."""
    if adversary == "random":
        device.delay(0.001, seed)
        return
    for index in range(DEVICES):
        if adversary != "late kernels":
            device.lazy(accelerator.side_stream(index, "out"), accelerator.side_stream(index, "in"))
        if adversary != "late copies":
            device.lazy(torch.accelerator.current_stream(torch.device(NAME, index)))


@contextlib.contextmanager
def on_stream(stream: torch.Stream, *, ordered: bool = True) -> Iterator[None]:
    """Make a stream current; if ordered, it and its device's current stream wait for each other at both ends."""
    with torch.accelerator.device_index(stream.device_index):
        before = torch.accelerator.current_stream()
        if ordered:
            stream.wait_stream(before)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            if ordered:
                before.wait_stream(stream)


@contextlib.contextmanager
def simulated(accelerator: SimulatedAccelerator | None = None, **options: Any) -> Iterator[Offloader]:
    """An offloader of the simulated device that moves all that it can; it is aborted at the end."""
    fields: dict[str, Any] = {"target": "host", "min_bytes": 0, "keep_last_bytes": 0, "policy": "all"}
    offloader = Offloader(OffloadConfig(**(fields | options)), accelerator=accelerator or SimulatedAccelerator())
    try:
        yield offloader
    finally:
        offloader.abort()


def copy_out(copies: CopyStreams, source: Tensor, host: Tensor) -> Batch:
    batch = copies.gather("out", 0, None)
    batch.add("source", host, source, [])
    copies.begin_out(batch)
    return batch


def copy_in(copies: CopyStreams, host: Tensor, after: Batch | None = None) -> tuple[Batch, Tensor]:
    """Begin one copy to the device; returns the memory that it fills as well."""
    batch = copies.gather("in", 0, None)
    filled = copies.device.empty(host.nbytes, 0)
    batch.add("host", filled, host, [] if after is None else [after])
    copies.begin_in(batch)
    return batch, filled


def fill_device(piece_bytes: int = 1 << 20) -> list[Tensor]:
    """Take the memory that a limit leaves on the simulated device; it is free again when the result dies."""
    taken: list[Tensor] = []
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            taken.append(torch.empty(piece_bytes, dtype=torch.uint8, device=NAME))
    return taken


def forget_failed_backward() -> None:
    """Free a graph whose backward raised.

    The error's traceback holds it, and autograd's queue keeps the nodes that backward did not reach until the next
    backward.
    """
    gc.collect()
    flush_autograd()


def flush_autograd() -> None:
    """Empty autograd's queues of the nodes that a failed backward did not reach: this thread's, and the device's."""
    torch.zeros(1, requires_grad=True).sum().backward()
    if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
        # Each thread numbers its nodes, and the highest number goes first: nodes of a new thread go last.
        run_in_threads(lambda: torch.zeros(1, device=device, requires_grad=True).sum().backward())


def until_recorded(offloader: Offloader, step: Callable[[], None]) -> None:
    """Take steps until one was recorded and planned from, for which the planner waits longer on a busy machine."""
    for _ in range(100):
        step()
        offloader.synchronize()
        if offloader.profile is not None:
            return
    raise AssertionError("no step was recorded")
