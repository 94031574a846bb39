"""The tiers that a configuration asks for: spool, host pools, and a mover for each type of device."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import cached_property, partial
from typing import Any

from . import cpu_allocator, numa
from .cpu_tier import CpuMover
from .device import Accelerator, accelerator_for, default_device_types
from .device_tier import DeviceMover
from .errors import ConfigError
from .hostpool import NOT_PAGE_LOCKED, HostPool
from .memory import available_bytes, fix_mmap_threshold
from .ranks import processes_here
from .row_tier import RowMover
from .spool import Spool
from .stopwatch import DeviceStopwatch, HostStopwatch, Stopwatch
from .tiers import Core, Mover
from .transfer import Transfers

STAGING_BYTES = 4 << 30
CPU_SLAB_BYTES = 16 << 20
PINNED_SLAB_BYTES = 256 << 20


class Tiers:
    """What an offloader opens when it is made and closes when it ends.

    Args:
        core: shared with the movers.
        accelerator: a device to drive instead of those the configuration names.

    Attributes:
        movers: by device type; tensors of other types stay.
    """

    def __init__(self, core: Core, accelerator: Accelerator | None = None) -> None:
        self.core = core
        self.spool: Spool | None = None
        self.pools: list[HostPool] = []
        self.movers: dict[str, Mover] = {}
        self._memory_note = self._numa_note = ""
        self._cpu_memory: cpu_allocator.Use | None = None
        self._open(accelerator)

    def counts(self) -> dict[str, int]:
        """What pools, copies and engines count themselves, by the names of `Statistics`."""
        for pool in self.pools:
            pool.settle()
        spool = self.spool.statistics() if self.spool is not None else None
        copies = [m.transfers for m in self.movers.values() if isinstance(m, DeviceMover)]
        return {
            "host_written_bytes": sum(t.written_bytes for t in copies),
            "host_read_bytes": sum(t.read_bytes for t in copies),
            "nvme_written_bytes": spool.written_bytes if spool else 0,
            "nvme_read_bytes": spool.read_bytes if spool else 0,
            "host_peak_bytes": sum(pool.peak_bytes for pool in self.pools),
            "nvme_peak_bytes": spool.peak_allocated_bytes if spool else 0,
        }

    @property
    def notes(self) -> list[str]:
        """What a person may want to know of how this was opened."""
        found = []
        if self.spool is not None:
            name, reason = self.spool.engine_name, self.spool.engine_reason
            remarks = dict.fromkeys(engine.remark for engine in self.spool.engines)
            found = [f"{name} engine: {text}" for text in (reason, *(text for text in remarks if text not in reason))]
        if any(pool.pin_failed for pool in self.pools):
            found.append(NOT_PAGE_LOCKED)
        return found + [note for note in (self._memory_note, self._numa_note) if note]

    def rates(self, *, full: bool = False) -> dict[tuple[str, str], float | None]:
        """Bytes per second of each link and direction, as seen since the last call; None where nothing went.

        Args:
            full: only of links that were full; the rate of another one is only a lower bound.
        """
        found: dict[tuple[str, str], float | None] = {}
        meters = {("disk", kind.value): meter for kind, meter in self.spool.meters.items()} if self.spool else {}
        for key, meter in meters.items():
            found[key] = meter.full_bytes_per_s if full else meter.bytes_per_s
            meter.restart()
        for mover in self.movers.values():
            if isinstance(mover, DeviceMover) and mover.transfers.stopwatch is not None:
                found.update({("host", way): mover.transfers.stopwatch.rate(way) for way in ("write", "read")})
        return found

    def stopwatch(self) -> Stopwatch:
        """What tells the compute time of a step here."""
        devices = [mover for mover in self.movers.values() if isinstance(mover, DeviceMover)]
        if not devices:
            return HostStopwatch(self.core.accounts)
        stopwatch = DeviceStopwatch(devices[0].transfers.device)
        devices[0].transfers.stopwatch = stopwatch
        return stopwatch

    def begin_step(self) -> None:
        """A forward begins: CPU memory that was idle for long goes back to the system."""
        cpu_allocator.next_epoch()
        self.count_waits()

    @property
    def capturing(self) -> bool:
        """Whether a stream is being captured into a graph: no device may be asked anything then."""
        return any(mover.capturing() for mover in self.movers.values())

    def count_waits(self) -> None:
        """Count what compute streams have waited for."""
        for mover in self.movers.values():
            mover.count_waits()

    def close(self, *, wait: bool) -> None:
        """Close the spool, unpin host memory, give idle memory back; without ``wait`` what is queued is cancelled."""
        with ExitStack() as last_first:  # each of them, whatever comes
            if self._cpu_memory is not None:
                last_first.callback(self._cpu_memory.end)
            for pool in self.pools:
                last_first.callback(pool.close, wait=wait)
            if self.spool is not None:
                last_first.callback(self.spool.close if wait else self.spool.abort)

    def after_fork_in_child(self) -> None:
        """Give up what belongs to the parent."""
        for pool in self.pools:
            pool.after_fork_in_child()
        for mover in self.movers.values():
            mover.after_fork_in_child()
        if self.spool is not None:
            self.spool.after_fork_in_child()

    def _open(self, accelerator: Accelerator | None) -> None:
        types = [accelerator.type] if accelerator else list(self.core.config.devices or default_device_types())
        for device_type in types:
            device = accelerator or accelerator_for(device_type)
            if device is not None:
                self.movers[device_type] = self._device_mover(device)
            elif device_type != "cpu":
                raise ConfigError("devices", device_type, "no such device here; leave it out to take what there is")
            elif self.core.config.target != "host":
                self.movers[device_type] = self._cpu_mover()
        if self.core.config.tune_malloc and isinstance(self.movers.get("cpu"), CpuMover):
            self._tune_malloc()  # last: nobody would end its use if something above failed

    def _open_spool(self) -> Spool:
        if self.spool is None:
            config = self.core.config
            self.spool = Spool(
                config.paths,
                engine=config.engine,
                capacity_bytes=None if config.nvme_budget is None else config.size("nvme_budget", 0),
                processes=1 if config.nvme_budget is not None else self._processes,
                threads=config.io_threads,
                verify=config.verify,
                poison=config.debug,
                allow_any_filesystem=config.allow_any_filesystem,
            )
        return self.spool

    def _cpu_mover(self) -> Mover:
        spool = self._open_spool()
        pool = self._pool(spool, self._host_budget(staging=False), slab_bytes=CPU_SLAB_BYTES)
        in_rows = spool.vectored and self.core.device_budget is None and not self.core.config.verify
        return (RowMover if in_rows else CpuMover)(self.core, spool, pool)

    def _tune_malloc(self) -> None:
        refused = cpu_allocator.install()
        self._cpu_memory = cpu_allocator.Use()
        if refused:
            fix_mmap_threshold()  # for want of better: what is freed goes back at once, and is paid for page by page
            self._memory_note = f"freed CPU memory goes back to the system block by block, which costs time: {refused}"

    def _device_mover(self, device: Accelerator) -> Mover:
        target = self.core.config.target
        spool: Spool | None = None
        if target in ("nvme", "tiered"):
            spool = self._open_spool()
        elif target == "auto":
            with suppress(OSError):  # no usable path: host memory only
                spool = self._open_spool()

        pool = self._pool(
            spool,
            self._host_budget(staging=target == "nvme"),
            slab_bytes=PINNED_SLAB_BYTES,
            pin=device.pin,
            unpin=device.unpin,
            place=partial(self._near, device) if numa.several_nodes() else None,
            is_done=device.done,
            wait_for=device.synchronize,
        )
        spill = {"host": "never", "nvme": "always"}.get(target, "overflow")
        pending = self.core.config.pending_bytes
        window = None if pending is None else self.core.config.size("pending_bytes", 0)
        return DeviceMover(self.core, spool, pool, Transfers(device), spill, window)

    def _pool(self, spool: Spool | None, capacity_bytes: int, **options: Any) -> HostPool:
        """A pool whose memory the engines know of."""
        engines = spool.engines if spool is not None else ()

        def mapped(address: int, nbytes: int) -> None:
            for engine in engines:
                engine.register_memory(address, nbytes)

        def unmapping(address: int, nbytes: int) -> None:
            for engine in engines:
                engine.unregister_memory(address, nbytes)

        debug = self.core.config.debug
        pool = HostPool(capacity_bytes, mapped=mapped, unmapping=unmapping, poison=debug, **options)
        self.pools.append(pool)
        return pool

    def _near(self, device: Accelerator, address: int, nbytes: int) -> AbstractContextManager[None]:
        """Have a slab, and the I/O threads with it, on the NUMA node of the device that computes now."""
        with suppress(Exception):  # where memory lies is never a reason to fail
            index = device.current_index()
            node = numa.node_of(device.pci_address(index))
            if node is None:
                return nullcontext()
            processors = numa.processors_of(node)
            engines = self.spool.engines if self.spool is not None else ()
            sent = sum(numa.send(engine.thread_numbers, processors) for engine in engines)
            refused = numa.prefer(address, nbytes, node)
            how = (
                f"touched first from there, as it could not be asked for ({refused})" if refused else "asked for there"
            )
            self._numa_note = (
                f"{device.type}:{index} is at NUMA node {node}: {sent} I/O threads there, host memory {how}"
            )
            return numa.running_on(processors) if refused else nullcontext()
        return nullcontext()

    def _host_budget(self, *, staging: bool) -> int:
        if self.core.config.host_budget is not None:
            return self.core.config.size("host_budget", 0)
        default = available_bytes() // 2 // self._processes
        return min(STAGING_BYTES, default) if staging else default

    @cached_property
    def _processes(self) -> int:
        return processes_here()  # asked only where a budget was left out: it may wait for the others
