"""The tiers of a configuration: spool, host pools, and a tier for each type of device."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import cached_property, partial
from typing import Any

from ..config import PATH_VARIABLE, OffloadConfig, identity_of
from ..errors import ConfigError, SpoolPathError
from ..locks import renewed_in_child
from ..memory import cpu_allocator
from ..memory.host_pool import HostBudget, HostPool
from ..memory.process_memory import available_bytes, fix_mmap_threshold, memory_bytes, peak_rss_bytes, rss_bytes
from ..memory.slab import Device
from ..storage.engines import BEHIND_A_DEVICE
from ..storage.spool import Disk, Spool
from .accelerator import Accelerator, Event, accelerator_for, default_device_types
from .copy_streams import CopyStreams
from .cpu_tier import CpuTier
from .device_tier import DeviceTier
from .direct_tier import DirectTier
from .processes import processes_here
from .shared import Shared
from .tier import Tier
from .timers import Stopwatch, Timeline, WaitFor

CPU_SLAB_BYTES = 16 << 20
NOT_PAGE_LOCKED = (
    "host memory could not be page-locked, so copies go through pageable memory and block the host: lower host_budget. "
    "NVIDIA's driver does not look at `ulimit -l`; under WSL 2 it locks a small part of memory alone"
)
NO_THREAD = "can't start new thread"
"""Python's message when the system starts no more threads."""
NOTHING_WITHOUT_THREADS = "nothing moves: the system starts no more threads for this user or container (`ulimit -u`)"
NO_DEFAULT_PATH = (
    f"nothing moves, as the system's temporary directory cannot hold a spool: pass path=, or set {PATH_VARIABLE}, to a "
    "directory on a local disk"
)


_lock = renewed_in_child(threading.Lock())
_disks: weakref.WeakValueDictionary[Any, Disk] = weakref.WeakValueDictionary()
_budgets: weakref.WeakValueDictionary[Any, HostBudget] = weakref.WeakValueDictionary()
"""Disks and budgets that stores of this process share while one uses them, by the options that they depend on."""
if hasattr(os, "register_at_fork"):  # a child has its own
    os.register_at_fork(after_in_child=_disks.clear)
    os.register_at_fork(after_in_child=_budgets.clear)

DISK_OPTIONS = ("paths", "engine", "nvme_budget", "io_threads", "allow_any_filesystem", "verify", "debug")


def _key(config: OffloadConfig, names: tuple[str, ...], *more: object) -> Any:
    return (*more, *(identity_of(getattr(config, name)) for name in names))


class Tiers:
    """The resources of a store: it opens them when it is made and closes them when it ends.

    Args:
        shared: see `Shared`.
        accelerator: a device to drive instead of the configured ones.

    Attributes:
        by_device: the tier of each type of device; tensors of other types stay.
        spool: the disk, where one is used.
        pools: the host memory.
        hook: entered by every entry point of autograd or the user; see `accelerator.Hook`.
    """

    def __init__(self, shared: Shared, accelerator: Accelerator | None = None) -> None:
        self.shared = shared
        self.spool: Spool | None = None
        self.pools: list[HostPool] = []
        self.by_device: dict[str, Tier] = {}
        self.hook: AbstractContextManager[None] = nullcontext()
        self._memory_remark = ""
        self._peak_bytes = 0
        """The highest peak of the device that was begun anew since."""
        self._cpu_memory: cpu_allocator.Use | None = None
        self._open(accelerator)
        self._copies = next((tier.copies for tier in self.by_device.values() if tier.copies is not None), None)
        """Of the accelerator whose tensors move: there is one at most."""
        shared.flush_tiers = weakref.WeakMethod(self.flush)

    def counts(self) -> dict[str, int]:
        """Return the counts of pools, copies and engines, by the names of `Statistics`."""
        if not self.capturing:
            for pool in self.pools:
                pool.reclaim()
        spool = self.spool.statistics() if self.spool is not None else None
        return {
            "host_written_bytes": self._copies.written_bytes if self._copies else 0,
            "host_read_bytes": self._copies.read_bytes if self._copies else 0,
            "nvme_written_bytes": spool.written_bytes if spool else 0,
            "nvme_read_bytes": spool.read_bytes if spool else 0,
            "host_peak_bytes": sum(pool.slots.peak_bytes for pool in self.pools),
            "nvme_peak_bytes": spool.peak_allocated_bytes if spool else 0,
            "process_peak_bytes": peak_rss_bytes(),
            "device_peak_bytes": max(self._peak_bytes, (self.allocated_bytes or (0, 0))[1]),
        }

    def memory(self) -> tuple[int, int]:
        """Bytes in use, now and at most: of the accelerator, if its tensors move, else of this process."""
        return self.allocated_bytes or (rss_bytes(), peak_rss_bytes())

    def usable_bytes(self) -> int | None:
        """The bytes that the accelerator may still allocate, see `Accelerator.usable_bytes`; None without one."""
        return None if self._copies is None else self._copies.usable_bytes()

    def total_bytes(self) -> int | None:
        """How much memory there is: on the accelerator whose tensors move, else for this process; None: unknown."""
        if self._copies is None:
            return memory_bytes()
        device, index = self._here()
        memory = None if device is None else device.memory_info(index)
        return None if memory is None else memory[1]

    def in_use(self) -> tuple[int, int] | None:
        """Return bytes in use on the device and the most there were; None where nobody counts them, or has to.

        On the CPU it is the process's memory, which is read from the system: only for ``device_memory``. Without what
        we hold for tensors to come, as they take just that.
        """
        if self._copies is not None or self.shared.config.device_memory is None:
            return self.allocated_bytes
        held = self.unneeded_bytes()
        return rss_bytes() - held, peak_rss_bytes()

    def reset_peak(self) -> None:
        """Have the device's allocator begin its highest peak anew, so that a lower one of a step is seen."""
        (device, index), memory = self._here(), self.allocated_bytes
        if device is not None and memory is not None:
            self._peak_bytes = max(self._peak_bytes, memory[1])
            device.reset_peak(index)

    def allocator_count(self, name: str) -> int:
        """A count of PyTorch's allocator, by its name, for the accelerator whose tensors move.

        ``"num_ooms"``: how often it had no memory; an error in backward is seen by nothing else.
        ``"num_alloc_retries"``: how often it has given its cache back to find some, for which the device idles.
        """
        device, index = self._here()
        counts = None if device is None else device.allocator_counts(index, name)
        return 0 if counts is None else counts[0]

    def unneeded_bytes(self) -> int:
        """Resident memory of this process that a run without moving would not have now.

        It is the memory that we keep for later tensors, less the peak of temporaries since the last call: a look at
        the process sees neither.
        """
        facts = cpu_allocator.facts()
        held = 0 if facts is None else facts["resident_bytes"] - facts["recent_peak_bytes"]
        return held + sum(pool.idle_bytes() for pool in self.pools)

    @property
    def remarks(self) -> list[str]:
        """Remarks for the report on how the resources were opened."""
        found = []
        if self.spool is not None:
            refused = self.spool.disk.engine_reason.partition("; not ")[2]
            remarks = dict.fromkeys([f"not {refused}" if refused else "", *(e.remark for e in self.spool.engines)])
            found = [f"{self.spool.capabilities.name} engine: {text}" for text in remarks if text]
        return [*found, self._memory_remark] if self._memory_remark else found

    def rates(self) -> dict[tuple[str, str], tuple[float, bool]]:
        """Return bytes per second of each link and direction that was used since the last call, and if it was full.

        The rate of a link that was not full is only a lower bound.
        """
        found: dict[tuple[str, str], tuple[float, bool]] = {}
        meters = {("disk", kind.value): meter for kind, meter in self.spool.meters.items()} if self.spool else {}
        for key, meter in meters.items():
            rate = meter.bytes_per_s
            if rate is not None:
                found[key] = rate, meter.full_bytes_per_s is not None
            meter.restart()
        for way in ("write", "read"):
            rate = None if self._copies is None else self._copies.stopwatch.rate(way)
            if rate is not None:
                found["host", way] = rate, True
        return found

    def stopwatch(self) -> Stopwatch:
        """Return a clock for the compute time of a step here."""
        return Stopwatch(self.shared.accounts) if self._copies is None else self._copies.stopwatch

    def moment(self) -> Event | None:
        """A moment of the stream on which the calling thread computes; None on the CPU, or before a device is known."""
        device, index = self._here()
        if device is None or device.capturing(index):
            return None
        return device.timestamp(device.current_stream(index))

    def seconds_between(self, begin: Event, end: Event) -> float | None:
        """Time from one `moment` to a later one of the same device; None while the device has not come to it.

        It is 0 between devices, and at least 0 between streams.
        """
        assert self._copies is not None, "a device has made the moments"
        device = self._copies.device
        if begin.index != end.index:
            return 0.0
        return max(0.0, device.seconds_between(begin, end)) if device.done(begin) and device.done(end) else None

    def start_timeline(self) -> Timeline | None:
        """Note the work of the device and its times from now on; None without a device."""
        copies = self._copies
        if copies is None:
            return None
        copies.timeline = Timeline(copies.device, copies.current_index, copies.capturing)
        return copies.timeline

    def begin_step(self) -> None:
        """Give memory that was idle for long back to the system, and count the waits of streams."""
        cpu_allocator.next_epoch()
        if not self.capturing:
            for pool in self.pools:
                pool.trim()
        self.count_waits()

    @property
    def capturing(self) -> bool:
        """Whether a stream is being captured into a graph: then no device may be queried."""
        return any(tier.capturing() for tier in self.by_device.values())

    def count_alive(self) -> None:
        """Count originals that have moved and that the program still holds. The lock is held."""
        for tier in self.by_device.values():
            tier.count_alive()

    def count_waits(self) -> None:
        """Count the waits of compute streams since the last call: the host does not see them as they happen."""
        if self._copies is None or self.capturing:
            return
        with self.shared.lock:
            waited = self._copies.waits.take()
            self.shared.accounts.pack_wait_s += waited[WaitFor.ROOM]
            self.shared.accounts.unpack_wait_s += waited[WaitFor.DATA]
            self.shared.late_s += waited[WaitFor.DATA]

    @property
    def lost(self) -> bool:
        """Whether the disk went with another store on it, which an interrupt has ended."""
        return self.spool is not None and self.spool.disk.closed and not self.shared.stopped

    def flush(self) -> None:
        """Begin everything that waits for a later moment."""
        if not self.shared.stopped:
            for tier in self.by_device.values():
                tier.flush()

    def abandon(self) -> None:
        """Forget every record after an interrupt, so that memory which only we hold is freed."""
        for tier in self.by_device.values():
            tier.abandon()

    def close(self, *, wait: bool) -> None:
        """Close the spool, unpin host memory, give idle memory back; without ``wait`` cancel queued transfers."""
        with ExitStack() as last_first:  # each of them, even if another raises
            if self._cpu_memory is not None:
                last_first.callback(self._cpu_memory.end)
            for pool in self.pools:
                last_first.callback(pool.close, wait=wait)
            if self.spool is not None:
                abort = partial(self.spool.abort, all_users=self.shared.interrupted)
                last_first.callback(self.spool.close if wait else abort)
            for tier in self.by_device.values():
                last_first.callback(tier.close)

    def after_fork_in_child(self) -> None:
        """Drop all resources of the parent."""
        for pool in self.pools:
            pool.after_fork_in_child()
        if self._copies is not None:
            self._copies.after_fork_in_child()
        if self.spool is not None:
            self.spool.after_fork_in_child()

    @property
    def allocated_bytes(self) -> tuple[int, int] | None:
        """The bytes that the allocator of the accelerator has in use, now and at most; None without one."""
        copies = self._copies
        return None if copies is None or copies.inert else copies.device.allocated_bytes(copies.current_index())

    def _here(self) -> tuple[Accelerator | None, int]:
        """The accelerator, and the device on which this thread computes; None before one is known, or in a fork."""
        index = None if self._copies is None or self._copies.inert else self._copies.current_index()
        return (None, 0) if self._copies is None or index is None else (self._copies.device, index)

    # -- opening ------------------------------------------------------------------------------------------------------

    def _open(self, accelerator: Accelerator | None) -> None:
        config = self.shared.config
        types = [accelerator.type] if accelerator else list(config.devices or default_device_types())
        for device_type in types:
            device = accelerator or accelerator_for(device_type)
            try:
                if device is not None:
                    self.by_device[device_type] = self._device_tier(device)
                elif device_type != "cpu":
                    raise ConfigError("devices", device_type, "no such device here; leave it out to take what there is")
                elif config.target != "host":
                    self.by_device[device_type] = self._cpu_tier()
            except SpoolPathError as error:
                if config.target != "auto" or config.path is not None or os.environ.get(PATH_VARIABLE):
                    raise
                self.shared.reporter.advise("path", f"{NO_DEFAULT_PATH} ({error})")
            except RuntimeError as error:
                if str(error) != NO_THREAD:
                    raise
                self.shared.reporter.advise("threads", NOTHING_WITHOUT_THREADS)
        if config.tune_malloc and config.policy != "keep" and isinstance(self.by_device.get("cpu"), CpuTier):
            self._tune_malloc()  # last: its use would not end if something above failed

    def _open_spool(self, auto: str | tuple[str, ...] = "auto") -> Spool:
        if self.spool is None:
            config = self.shared.config
            with _lock:
                key = _key(config, DISK_OPTIONS, auto)
                disk = _disks.get(key)
                self.spool = Spool(
                    config.paths,
                    engine=auto if config.engine == "auto" else config.engine,
                    capacity_bytes=None if config.nvme_budget is None else config.size("nvme_budget", 0),
                    processes=1 if config.nvme_budget is not None else self._processes,
                    threads=config.io_threads,
                    verify=config.verify,
                    poison=config.debug,
                    allow_any_filesystem=config.allow_any_filesystem,
                    disk=None if disk is None or disk.closed else disk,
                )
                _disks[key] = self.spool.disk
        return self.spool

    def _cpu_tier(self) -> Tier:
        spool = self._open_spool()
        pool = HostPool(self._host_budget("cpu"), slab_bytes=CPU_SLAB_BYTES, poison=self.shared.config.debug)
        self.pools.append(pool)
        return CpuTier(self.shared, spool, pool)

    def _tune_malloc(self) -> None:
        refused = cpu_allocator.install()
        self._cpu_memory = cpu_allocator.Use()
        if refused:
            fix_mmap_threshold()  # second best: freed memory goes back at once, and new memory costs page faults
            self._memory_remark = (
                f"freed CPU memory goes back to the system block by block, which costs time: {refused}"
            )

    def _device_tier(self, device: Accelerator) -> Tier:
        config = self.shared.config
        spool: Spool | None = None
        if config.target in ("nvme", "tiered"):
            spool = self._open_spool(BEHIND_A_DEVICE)
        elif config.target == "auto":
            with suppress(OSError):  # no usable path: host memory only
                spool = self._open_spool(BEHIND_A_DEVICE)
        copies = CopyStreams(device)
        copies.waits.samples = self.shared.config.policy != "auto"  # which plans from them
        self.hook = device.hook
        if config.target == "nvme" and spool is not None and spool.capabilities.device_memory and not config.verify:
            return DirectTier(self.shared, spool, copies)
        pool = HostPool(
            self._host_budget(device.type),
            device=Device(
                pin=device.pin,
                unpin=device.unpin,
                is_done=copies.done,
                wait_for=copies.synchronize,
                bind=lambda work: device.bind(work, copies.current_index() or 0),
                stay_near=device.stay_near,
            ),
            on_growth=self._pool_grew,
            poison=config.debug,
        )
        self.pools.append(pool)
        return DeviceTier(self.shared, spool, pool, copies)

    def _pool_grew(self) -> None:
        """More host memory is there, or none is to be had: on the thread that page-locks it."""
        with self.shared.lock:
            if any(pool.pin_failed for pool in self.pools):
                self.shared.reporter.advise("page-locking", NOT_PAGE_LOCKED)
            self.shared.changed.notify_all()

    def _host_budget(self, device: str) -> HostBudget:
        config = self.shared.config
        with _lock:
            key = _key(config, ("host_budget",), device)
            budget = _budgets.get(key)
            if budget is None:
                default = available_bytes() // 2 // self._processes if config.host_budget is None else 0
                budget = _budgets[key] = HostBudget(config.size("host_budget", default))
            return budget

    @cached_property
    def _processes(self) -> int:
        return processes_here()  # only if a budget was left out: it may wait for other processes
