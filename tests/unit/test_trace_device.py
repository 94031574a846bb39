"""The trace of a run on an accelerator: the device's own times, and the uses of its memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actoffload import OffloadConfig, Offloader
from actoffload.testing.gpt import GPT, GPTConfig
from actoffload.testing.simulated_device import NAME, SimulatedDevice
from actoffload.tools.trace_file import TraceFile, load
from tests.harness import run_in_threads

pytestmark = pytest.mark.simulated

MEASURED = 0.02
"""The sum of all uses of memory differs from the allocator's count by at most this share."""


def _traced(device: SimulatedDevice, path: Path, **options: object) -> TraceFile:
    device.model()
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=128, seq=64)).to(NAME)
    optimizer = torch.optim.AdamW(model.parameters())
    fields = {"path": path, "min_bytes": "16KiB", "announce": "none", "engine": "memory", **options}
    offloader = Offloader(OffloadConfig(trace=path / "run.json", **fields)).use(model)  # type: ignore[arg-type]
    for _ in range(3):
        tokens = torch.randint(0, 255, (4, 65)).to(NAME)
        with offloader:
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    offloader.close()
    return load(path / "run.json")


@pytest.mark.parametrize("target", ["host", "nvme"])
def test_copies_have_times_and_bytes_and_the_device_has_phases_of_its_own(
    device: SimulatedDevice, tmp_path: Path, target: str
) -> None:
    trace = _traced(device, tmp_path, target=target, policy="all", device_budget=1024)
    statistics = trace.metadata["statistics"]
    for link, name in (("host", "host"), ("disk", "nvme")):
        for way, done in (("write", "written"), ("read", "read")):
            moved = [one for one in trace.transfers if one.link == f"{link} {way}"]
            assert sum(one.nbytes for one in moved) == statistics[f"{name}_{done}_bytes"]
            assert bool(moved) is (link == "host" or target == "nvme")
            assert all(one.nbytes >= sum(nbytes for _, nbytes in one.tensors) > 0 for one in moved)
    copies = [one for one in trace.transfers if one.link.startswith("host ")]
    assert all(one.duration_s > 0 for one in copies)
    waits = [wait for wait in trace.waits if wait.on_device]
    # Which of them are waited for is a matter of the host's time, which is real.
    assert {"room"} < {wait.reason for wait in waits} <= {"data", "room"}
    assert {"stack.blocks.0.up", "stack.blocks.1.up"} & {wait.module for wait in waits}
    assert trace.metadata["virtual_device_time"] is True
    names = [(phase.name, phase.microbatch) for phase in trace.phases if phase.on_device]
    assert names == [(name, number) for number in (1, 2, 3) for name in ("forward", "backward", "optimizer")]


def test_an_optimizer_on_the_host_takes_no_time_of_the_device(device: SimulatedDevice, tmp_path: Path) -> None:
    device.model()
    model = torch.nn.Linear(64, 64).to(NAME)
    optimizer = torch.optim.SGD([torch.zeros(8, requires_grad=True)])
    offloader = Offloader(OffloadConfig(trace=tmp_path / "run.json", target="host", announce="none")).use(model)
    for _ in range(2):
        with offloader:
            loss = model(torch.ones(64, 64, device=NAME)).exp().sum()
        loss.backward()
        optimizer.step(lambda: model(torch.ones(64, 64, device=NAME)).sum())
    offloader.close()
    on_device = [phase for phase in load(tmp_path / "run.json").phases if phase.on_device]
    assert [(phase.name, phase.duration_s > 0) for phase in on_device if phase.name != "backward"] == [
        *[("forward", True), ("optimizer", False)] * 2
    ]


def test_all_memory_has_a_use(device: SimulatedDevice, tmp_path: Path) -> None:
    """With nothing moved, all memory at the end of a forward has a name, except memory that other tests have left."""
    left = torch.accelerator.memory_allocated()
    trace = _traced(device, tmp_path, target="host", policy="keep")
    total, memory = trace.counters["memory total"].series["bytes"], trace.counters["memory"].series
    for place, measured in enumerate(total):
        named = sum(values[place] for values in memory.values())
        assert abs(named - measured) <= MEASURED * measured
    forwards = [phase.end_s for phase in trace.phases if phase.name == "forward" and not phase.on_device]
    looks = [trace.counters["memory"].at(end_s) for end_s in forwards]
    assert all(used["other"] - left <= MEASURED * sum(used.values()) for used in looks)
    # The sampling thread may be at work as a forward ends: then that forward has an earlier sample.
    saved = [(used["saved by stack.blocks.0"], used["saved by stack.blocks.1"]) for used in looks]
    assert any(first == second > 0 for first, second in saved)


def test_forwards_of_several_threads_take_each_ended_time_once(device: SimulatedDevice, tmp_path: Path) -> None:
    """Two threads may look for ended times at the same moment."""
    device.model()
    offloader = Offloader(OffloadConfig(trace=tmp_path / "run.json", target="host", min_bytes=0, announce="none"))

    def steps() -> None:
        x = torch.ones(64, device=NAME, requires_grad=True)
        for _ in range(100):
            with offloader:
                loss = (x * 2.0).sin().sum()
            loss.backward()

    run_in_threads(*[steps] * 4)
    offloader.close()
    forwards = [phase for phase in load(tmp_path / "run.json").phases if phase.on_device and phase.name == "forward"]
    assert len(forwards) == 400
