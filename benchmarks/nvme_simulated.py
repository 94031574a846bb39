"""How much of a disk's bandwidth is used behind the simulated device, while there is something to write or to read.

    python -m benchmarks.nvme_simulated [--rounds N] [--path DIR] [--tiny]

Each tensor is larger than a part that is copied at once, and is there when it is saved. The disk and the link are
slowed down, so that their bandwidths are known: the disk is a tenth of the link.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from actoffload import OffloadConfig, Offloader
from actoffload.testing.faults import SlowEngine
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, install
from benchmarks import harness
from benchmarks.harness import Bound, Sample, middle

TENSORS = 6
DISK_BYTES_PER_S, LINK_BYTES_PER_S = 1e8, 1e9
LEAST_SHARE = 0.95


class TimedEngine(SlowEngine):
    """A disk of a given speed that knows when it was used last."""

    def __init__(self, file: Any) -> None:
        self.last_s: dict[str, float] = {}
        super().__init__(file, bandwidth_bytes_per_s=DISK_BYTES_PER_S)

    def _transfer_once(self, kind: Any, views: list[memoryview], offset: int) -> int:
        moved = super()._transfer_once(kind, views, offset)
        self.last_s[kind.value] = time.monotonic()
        return moved


class SlowLink(SimulatedAccelerator):
    """Copies take as long as `LINK_BYTES_PER_S` says, on a machine that copies ``copied_bytes_per_s`` by itself."""

    def __init__(self, copied_bytes_per_s: float) -> None:
        super().__init__()
        self._more_s_per_byte = max(0.0, 1 / LINK_BYTES_PER_S - 1 / copied_bytes_per_s)

    def copy(self, copies: Iterable[tuple[Tensor, Tensor]], stream: torch.Stream) -> None:
        given = list(copies)
        super().copy(given, stream)
        with stream:
            install().sleep(self._more_s_per_byte * sum(source.nbytes for _, source in given))


def link_bytes_per_s(nbytes: int) -> float:
    """How fast this machine copies from the simulated device."""
    source, host = torch.zeros(nbytes, dtype=torch.uint8, device=NAME), torch.empty(nbytes, dtype=torch.uint8)
    target, seconds = host.pin_memory(), []
    for _ in range(3):
        torch.accelerator.synchronize()
        since_s = time.monotonic()
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()
        seconds.append(time.monotonic() - since_s)
    return nbytes / min(seconds)


def measure(path: str, nbytes: int, staging: int) -> Sample:
    """One forward and backward that saves `TENSORS` tensors of ``nbytes``, with host memory for ``staging`` bytes."""
    copied = link_bytes_per_s(nbytes)
    engines: list[TimedEngine] = []
    saved_s: list[float] = []

    def engine(file: Any) -> TimedEngine:
        engines.append(TimedEngine(file))
        return engines[0]

    def note(event: Any) -> None:
        if event.kind.value == "pack":
            saved_s.append(time.monotonic())

    # two are read ahead beside the one in use, and the next one has its room
    room: dict[str, Any] = {"device_budget": 5 * nbytes, "host_budget": staging, "keep_last_bytes": 0, "min_bytes": 1}
    room |= {"policy": "all", "announce": "none", "allow_any_filesystem": True}
    config = OffloadConfig(target="nvme", engine=engine, path=path, trace=note, **room)
    offloader = Offloader(config, accelerator=SlowLink(copied))
    try:
        w = torch.zeros(nbytes // 4, device=NAME).requires_grad_()
        for _ in range(2):  # the first step also takes host memory
            tensors = [w * 1.01 for _ in range(TENSORS)]
            torch.accelerator.synchronize()
            before = offloader.statistics()
            saved_s.clear()
            with offloader:
                loss = torch.stack([tensor.sin().sum() for tensor in tensors]).sum()
            del tensors
            offloader.synchronize()
            written_s = engines[0].last_s["write"] - saved_s[0]
            since_s = time.monotonic()
            loss.backward()
            torch.accelerator.synchronize()
            read_s = engines[0].last_s["read"] - since_s
            del loss
            w.grad = None
        after = offloader.statistics()
    finally:
        offloader.abort()
    written, read = (getattr(after, name) - getattr(before, name) for name in ("nvme_written_bytes", "nvme_read_bytes"))
    shares = {"write_share": written / DISK_BYTES_PER_S / written_s, "read_share": read / DISK_BYTES_PER_S / read_s}
    return {"copied_bytes_per_s": copied, "written_bytes": written, "read_bytes": read} | shares


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the result file; return 1 where a bound does not hold."""
    options = harness.make_parser(__doc__, rounds=3, tiny=True).parse_args(arguments)
    install()
    nbytes = (4 << 20) if options.tiny else (128 << 20)
    sizes = {"tensor_bytes": nbytes, "tensors": TENSORS, "disk": DISK_BYTES_PER_S, "link": LINK_BYTES_PER_S}
    results = harness.Results("nvme_simulated", arguments, sizes, keep=not options.tiny)
    cases = {"staging of one tensor": nbytes, "staging of two": 2 * nbytes}
    samples: dict[str, list[Sample]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, staging in cases.items():
            samples[name].append(measure(options.path or tempfile.gettempdir(), nbytes, staging))
    rows = {name: found[0] for name, found in samples.items()}
    bounds = [
        Bound(what=f"{name}: {way}", measured=middle(found, f"{way}_share"), bound=LEAST_SHARE, at_most=False)
        for name, found in samples.items()
        for way in ("write", "read")
    ]
    columns = {
        "written, MiB": harness.number("written_bytes", 1 << 20, 0),
        "read, MiB": harness.number("read_bytes", 1 << 20, 0),
        "this machine copies, GB/s": harness.number("copied_bytes_per_s", 1e9, 2),
    }
    return (
        0 if results.finish(harness.table_of("share of the disk used", rows, columns), bounds, samples=samples) else 1
    )


if __name__ == "__main__":
    raise SystemExit(main())
