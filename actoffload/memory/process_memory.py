"""The process and its memory: limits, free memory, and how glibc gives memory back. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import resource
import sys
from pathlib import Path

import psutil

_M_MMAP_THRESHOLD = -3
_HUGE_PAGE = 2 << 20
MMAP_THRESHOLD_BYTES = 1 << 20


def fix_mmap_threshold() -> bool:
    """Have glibc give every block of 1 MiB or more back to the system when it is freed.

    By default glibc moves that threshold up to 32 MiB as blocks are freed, and then keeps freed activations: the same
    run peaked at 1.7 GB instead of 0.9 GB (``benchmarks/LOG.md``, 2026-11-21). Process-wide; returns False where the C
    library has no ``mallopt``.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES))


def map_private(nbytes: int) -> mmap.mmap:
    """Private memory, in huge pages where there is room for one: a direct transfer takes each page as a piece."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def cgroup_limit_bytes() -> int | None:
    """The memory limit of this process's cgroup (v2 or v1), or None when there is none."""
    return min((limit for _, limit in _cgroup_limits()), default=None)


def available_bytes() -> int:
    """Memory this process may still take: the available memory of the machine, within the cgroup's limit."""
    available, own = int(psutil.virtual_memory().available), int(psutil.Process().memory_info().rss)
    for file, limit in _cgroup_limits():  # of which the other processes in the group have taken a part
        available = min(available, max(0, limit - max(own, _cgroup_used_bytes(file))))
    return available


def memory_bytes() -> int:
    """Memory of the machine, or of this process's cgroup where that is less."""
    return min([int(psutil.virtual_memory().total), *(limit for _, limit in _cgroup_limits())])


def _cgroup_limits() -> list[tuple[Path, int]]:
    """The limits of the cgroups that this process is in, each with its file."""
    candidates = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers in ("", "memory"):
                base, name = ("", "memory.max") if not controllers else ("memory", "memory.limit_in_bytes")
                candidates.append(Path("/sys/fs/cgroup") / base / group.lstrip("/") / name)
    except OSError:
        pass
    limits = []
    for candidate in candidates:
        try:
            text = candidate.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            limits.append((candidate, int(text)))
    return limits


def _cgroup_used_bytes(limit_file: Path) -> int:
    """The bytes that all processes of a cgroup use, less the file cache that the kernel frees first; 0: unknown."""
    used_name, cache_name = (
        ("memory.current", "inactive_file")
        if limit_file.name == "memory.max"
        else ("memory.usage_in_bytes", "total_inactive_file")
    )
    try:
        used = int(limit_file.with_name(used_name).read_text())
        lines = limit_file.with_name("memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return 0
    cache = dict(line.split(maxsplit=1) for line in lines if " " in line).get(cache_name, "0")
    return max(0, used - int(cache))


def peak_rss_bytes() -> int:
    """The most resident memory of this process so far, in bytes.

    ``VmHWM`` where there is one: it begins at zero with each program, while ``ru_maxrss`` is inherited from the
    program that started this one.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def rss_bytes() -> int:
    """Resident memory of this process now, in bytes."""
    with contextlib.suppress(OSError), open("/proc/self/statm", "rb") as file:  # a quarter of psutil's time
        return int(file.read().split()[1]) * mmap.PAGESIZE
    return int(psutil.Process().memory_info().rss)
