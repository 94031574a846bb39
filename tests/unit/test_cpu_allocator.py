"""The allocator of large CPU tensors: no two share a byte, memory is used again, and idle memory goes back.

A process installs it once and for all, so each test runs programs in processes of their own.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.programs import run_program

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("c++") is None, reason="Linux and a C++ compiler"
)

_HEAD = """
import os, random, sys, threading, warnings
import torch
from actoffload.memory import cpu_allocator
MIB = 1 << 20
def rss(): return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def full(nbytes, value=1): return torch.full((nbytes,), value, dtype=torch.uint8)
assert cpu_allocator.facts() is None
old = full(3 * MIB, 7)
assert cpu_allocator.install() == "", cpu_allocator.install()
assert cpu_allocator.install() == ""
def blocks(): return cpu_allocator.facts()["blocks"]
def live(): return cpu_allocator.facts()["live_bytes"]
def resident(): return cpu_allocator.facts()["resident_bytes"]
def fork():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()
assert blocks() == 0
"""


def run(body: str, **environment: str) -> None:
    """Run a program that has the allocator."""
    done = run_program(_HEAD + body, errors=("Warning",), environment=environment)
    assert done.returncode == 0, done.stderr


def test_large_tensors_come_from_it_and_go_back() -> None:
    run("""
small = full(cpu_allocator.SMALLEST_BYTES - 1)
assert blocks() == 0
large = full(cpu_allocator.SMALLEST_BYTES)
assert blocks() == 1 and live() == cpu_allocator.SMALLEST_BYTES, cpu_allocator.facts()
view = large[10:]
del large
assert blocks() == 1 and int(view.sum()) == view.numel()
storage = view.untyped_storage()
storage.resize_(MIB)
assert blocks() == 1 and live() == MIB and int(view.sum()) == view.numel()
storage.resize_(0)
assert blocks() == 0
assert int(old.sum()) == 7 * old.numel()
del old, small
assert full(5 * MIB + 1).data_ptr() % 4096 == 0 and blocks() == 0
array = full(MIB).numpy()
assert blocks() == 1 and int(array.sum(dtype="int64")) == MIB
del array
assert blocks() == 0
moved = full(MIB).share_memory_()  # another storage
assert blocks() == 0
""")


def test_freed_neighbours_become_one_and_are_used_again() -> None:
    run("""
row = [full(MIB) for _ in range(8)]
places = [t.data_ptr() for t in row]
assert places == sorted(places)
guard = full(MIB)
for order in ((3, 4), (4, 3), (2, 4, 3), (3, 2, 4)):
    for index in order:
        row[index] = None
    first, n = min(order), len(order)
    joined = torch.empty(n * MIB, dtype=torch.uint8)
    assert joined.data_ptr() == places[first], order
    del joined
    for index in sorted(order):
        row[index] = full(MIB)
    assert [t.data_ptr() for t in row] == places
row[1] = row[5] = row[6] = None
assert full(MIB).data_ptr() == places[1]  # where it fits best, not what is larger
both = full(MIB), full(MIB)
assert [t.data_ptr() for t in both] == [places[1], places[5]]
top = guard.data_ptr()
del both, guard
assert full(3 * MIB).data_ptr() == top  # what lies at the end is no hole
""")


def test_no_two_tensors_share_a_byte_whatever_the_threads_do() -> None:
    run("""
errors = []
def churn(seed):
    own = random.Random(seed)
    held = []
    for turn in range(300):
        if held and own.random() < 0.5:
            value, tensor = held.pop(own.randrange(len(held)))
            if not bool((tensor == value).all()):
                errors.append((seed, turn))
        else:
            value = own.randrange(256)
            held.append((value, full(own.randrange(200 << 10, MIB), value)))
    for value, tensor in held:
        if not bool((tensor == value).all()):
            errors.append((seed, "end"))
def steps():
    while not done.wait(0.002):
        cpu_allocator.next_epoch() if random.random() < 0.7 else cpu_allocator.give_back()
done = threading.Event()
others = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
clock = threading.Thread(target=steps)
clock.start()
for thread in others: thread.start()
for thread in others: thread.join()
done.set(); clock.join()
assert not errors, errors[:5]
assert blocks() == 0 and live() == 0, cpu_allocator.facts()
""")


def test_idle_memory_goes_back_and_used_memory_stays() -> None:
    run("""
N = cpu_allocator.IDLE_EPOCHS
kept = full(16 * MIB, 3)
large = full(128 * MIB)
end = full(16 * MIB, 5)
before = rss()
del large
assert resident() >= 160 * MIB
for _ in range(2 * N):  # used in each step: it stays
    again = full(128 * MIB)
    del again
    cpu_allocator.next_epoch()
assert resident() >= 160 * MIB and rss() > before - 16 * MIB
for _ in range(N - 1):
    cpu_allocator.next_epoch()
assert resident() >= 160 * MIB, "too early"
for _ in range(2):
    cpu_allocator.next_epoch()
assert resident() <= 40 * MIB and rss() < before - 112 * MIB, (cpu_allocator.facts(), rss(), before)
assert int(kept.sum()) == 3 * kept.numel() and int(end.sum()) == 5 * end.numel()
high = full(64 * MIB)
del high
assert resident() >= 96 * MIB
cpu_allocator.give_back()
assert resident() <= 40 * MIB
assert int(kept.sum()) == 3 * kept.numel() and int(end.sum()) == 5 * end.numel()
part = full(MIB)  # uses a part of a large hole: the rest of it is idle all the same
for _ in range(2 * N):
    del part
    part = full(MIB)
    cpu_allocator.next_epoch()
assert resident() <= 44 * MIB
""")


def test_a_tensor_that_does_not_fit_comes_from_pytorch() -> None:
    run("""
import psutil
total = psutil.virtual_memory().total
held = torch.empty(total - 64 * MIB, dtype=torch.uint8)  # addresses only: nothing is written
assert blocks() == 1
other = full(80 * MIB, 9)
assert blocks() == 1 and int(other.sum()) == 9 * other.numel()
del other, held
assert blocks() == 0
""")


def test_a_forked_child_has_its_own() -> None:
    run("""
held = full(8 * MIB, 4)
stop = threading.Event()
def churn():  # takes the lock most of the time, without the interpreter's
    while not stop.is_set():
        cpu_allocator.facts()
busy = threading.Thread(target=churn)
busy.start()
for turn in range(4):
    child = fork()
    if child == 0:
        new = full(4 * MIB, turn)
        held.fill_(turn)
        cpu_allocator.give_back()
        os._exit(0 if bool((new == turn).all()) and bool((held == turn).all()) else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.set(); busy.join()
assert bool((held == 4).all())
""")


def test_training_with_it_installs_it_and_gives_all_back_at_the_end(tmp_path: Path) -> None:
    run(
        """
import actoffload
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
x = torch.randn(1024, 512)
def step(path=None):
    for p in model.parameters(): p.grad = None
    if path is None: model(x).square().mean().backward()
    else:
        options = {"policy": "all", "min_bytes": 0, "keep_last_bytes": 0}
        with actoffload.offload_activations(target="nvme", path=path, model=model, **options) as offloader:
            loss = model(x).square().mean()
            offloader.synchronize()  # else backward may come before the writes, and take the tensors as they are
            loss.backward()
        assert offloader.statistics().moved_bytes > 4 << 20
        offloader.close()
    return [p.grad.clone() for p in model.parameters()]
plain = step()
assert all(map(torch.equal, plain, step(os.environ["SPOOL"])))
found = cpu_allocator.facts()
assert found["peak_bytes"] > 4 * MIB
assert found["resident_bytes"] <= found["live_bytes"] + 8 * MIB * (found["blocks"] + 1)
""",
        SPOOL=str(tmp_path),
    )


def test_no_memory_is_kept_without_an_offloader() -> None:
    run("""
one, other = cpu_allocator.Use(), cpu_allocator.Use()
kept = full(8 * MIB, 2)
one.end(); one.end()
freed = full(64 * MIB); del freed
assert resident() >= 64 * MIB
other.end()
assert resident() <= 12 * MIB
freed = full(64 * MIB); del freed  # also what is freed from now on
assert resident() <= 12 * MIB
again = cpu_allocator.Use()
freed = full(64 * MIB); del freed
assert resident() >= 64 * MIB
child = fork()
if child == 0:
    freed = torch.empty(32 * MIB, dtype=torch.uint8); freed.zero_(); del freed
    cpu_allocator.give_back()
    freed = torch.empty(32 * MIB, dtype=torch.uint8); del freed
    os._exit(0 if resident() <= 12 * MIB and bool((kept == 2).all()) else 1)
assert os.waitpid(child, 0)[1] == 0
again.end()
assert bool((kept == 2).all())
""")


def test_a_block_that_is_held_is_not_used_again_though_it_is_freed() -> None:
    run("""
block = full(4 * MIB, 5)
address = block.data_ptr()
one, other = cpu_allocator.HeldBlock(address), cpu_allocator.HeldBlock(address)
del block
assert blocks() == 1
taken = [full(4 * MIB, 9) for _ in range(4)]
assert address not in [t.data_ptr() for t in taken]
del one
assert blocks() == 5
del other
assert blocks() == 4
assert full(4 * MIB).data_ptr() == address
cpu_allocator.HeldBlock(12345)  # no block of ours
""")


def test_a_storage_that_is_freed_and_filled_again_while_it_is_written() -> None:
    """FSDP1 and Megatron do so: 30 rounds, in each of which other tensors take memory meanwhile."""
    run("""
import tempfile, actoffload
from actoffload.testing.faults import GateEngine
gates = []
def engine(file):
    gates.append(GateEngine(file))
    return gates[-1]
with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
    offloader = actoffload.Offloader(actoffload.OffloadConfig(
        target="nvme", path=folder, policy="all", min_bytes=0, engine=engine, allow_any_filesystem=True))
    for round in range(30):
        x = torch.ones(MIB // 4, requires_grad=True)
        saved = torch.full((MIB // 4,), float(round))
        contents, storage, nbytes = saved.clone(), saved.untyped_storage(), saved.nbytes
        with offloader:
            loss = (x * saved).sum()
        address = saved.data_ptr()
        storage.resize_(0)
        others = [full(nbytes, 255) for _ in range(2)]
        assert address not in [t.data_ptr() for t in others], "it is held while it is to be written"
        gates[0].open(); offloader.synchronize(); gates[0].shut()
        del others
        storage.resize_(nbytes)
        saved.data.copy_(contents)
        gates[0].open()
        loss.backward()
        gates[0].shut()
        assert torch.equal(x.grad, contents), round
    gates[0].open()
    offloader.close()
""")


def test_only_memory_to_be_written_lies_in_huge_pages_and_no_page_is_resident_before_it_is_touched() -> None:
    """TRL computes the logits of a few tokens at a time into a large buffer."""
    run("""
import re
def huge(): return 1024 * sum(int(n) for n in re.findall(r"AnonHugePages: *(\\d+) kB", open("/proc/self/smaps").read()))
before = rss()
sparse = torch.empty(2000, 32768)  # 250 MiB
sparse[:, :512] = 1.0
assert rss() - before < 24 * MIB, (rss() - before) / MIB
dense = full(33 * MIB, 7)
assert huge() < 2 * MIB
before = rss()
held = cpu_allocator.HeldBlock(dense.data_ptr())
assert rss() - before < MIB and int(dense.sum()) == 7 * dense.numel()
if tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 1):
    assert huge() >= 28 * MIB, huge()
del held, dense
cpu_allocator.give_back()
again = full(33 * MIB, 8)
assert huge() < 2 * MIB  # new pages are small until they are written, too
""")
