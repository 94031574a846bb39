"""What `doctor` asks the operating system and the device. Every probe answers with a plain value and never raises."""

from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import os
import platform
import resource
import time
from pathlib import Path
from typing import Any

import psutil

IO_URING_SETUP = 425
"""The system call's number; new system calls have the same one on every architecture."""
LINK_BYTES = 256 << 20


def io_uring() -> dict[str, Any]:
    """Whether the kernel lets this process set up an io_uring (containers often forbid it)."""
    if platform.system() != "Linux":
        return {"available": False, "reason": "io_uring is Linux's"}
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)  # struct io_uring_params, zeroed
    fd = libc.syscall(IO_URING_SETUP, ctypes.c_uint(1), parameters)
    if fd >= 0:
        os.close(fd)
        return {"available": True, "reason": "io_uring_setup works"}
    code = ctypes.get_errno()
    hints = {
        errno.ENOSYS: "the kernel has none, or a sandbox hides it",
        errno.EPERM: "forbidden here: kernel.io_uring_disabled or a container's seccomp profile",
        errno.ENOMEM: "not enough locked memory allowed: raise `ulimit -l`",
    }
    return {"available": False, "reason": f"{errno.errorcode.get(code, code)}: {hints.get(code, os.strerror(code))}"}


def gpu_direct_storage() -> dict[str, Any]:
    """Whether kvikio is installed and would really use GPUDirect Storage.

    kvikio's own compatibility mode tells only whether cuFile loads; cuFile then falls back by itself when the kernel
    module is missing, so that is looked at too, and cuFile is asked.
    """
    try:
        version = importlib.metadata.version("kvikio-cu12")
    except importlib.metadata.PackageNotFoundError:
        return {"available": False, "reason": "kvikio is not installed (pip install actoffload[gds])"}
    if not Path("/proc/driver/nvidia-fs/stats").exists():
        return {"available": False, "reason": f"kvikio {version}, but the kernel module nvidia-fs is not loaded"}
    try:
        import kvikio.cufile_driver
        import kvikio.defaults

        compat = bool(kvikio.defaults.is_compat_mode_preferred())
        driver = kvikio.cufile_driver  # `get` came with version 25.02
        works = driver.get("is_gds_available") if hasattr(driver, "get") else driver.DriverProperties().is_gds_available
    except Exception as error:  # a broken driver stack raises whatever it likes
        return {"available": False, "reason": f"kvikio {version} does not work here: {error}"}
    if compat or not works:
        return {"available": False, "reason": f"kvikio {version} is in compatibility mode: ordinary reads and writes"}
    return {"available": True, "reason": f"kvikio {version}, nvidia-fs loaded"}


def memory() -> dict[str, Any]:
    """Memory that this process may use. Bytes; None means no limit."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    virtual = psutil.virtual_memory()
    return {
        "total_bytes": int(virtual.total),
        "available_bytes": int(virtual.available),
        "memlock_limit_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "cgroup_limit_bytes": cgroup_limit_bytes(),
    }


def cgroup_limit_bytes(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The tightest memory limit of this process's control group and the groups above it (version 1 or 2), or None."""
    try:
        lines = proc.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    limits: list[int] = []
    for line in lines:
        _number, controllers, group = line.split(":", 2)
        if not controllers:
            limits += _limits_upwards(root, group, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits_upwards(root / "memory", group, "memory.limit_in_bytes")
    return min(limits, default=None)


def _limits_upwards(root: Path, group: str, name: str) -> list[int]:
    limits = []
    folder = root / group.lstrip("/")
    while True:
        try:
            text = (folder / name).read_text(encoding="ascii").strip()
        except OSError:
            text = "max"
        # Version 1 writes "no limit" as the largest multiple of a page in 63 bits.
        if text != "max" and int(text) < 1 << 60:
            limits.append(int(text))
        if folder == root or root not in folder.parents:
            return limits
        folder = folder.parent


def file_system(path: str) -> dict[str, Any]:
    """Type of the file system below ``path`` and its space, in bytes."""
    real = os.path.realpath(path)
    best, kind = "", "unknown"
    for partition in psutil.disk_partitions(all=True):
        mount = partition.mountpoint
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, partition.fstype
    usage = psutil.disk_usage(real)
    return {"type": kind, "free_bytes": int(usage.free), "total_bytes": int(usage.total)}


def device() -> dict[str, Any]:
    """The accelerator that torch sees, or the CPU, and whether host memory can be pinned for it."""
    import torch

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu_threads": torch.get_num_threads(),
    }
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return facts | {"type": "cpu", "name": "CPU", "pinned_memory": False}
    facts |= {"type": accelerator.type, "count": torch.accelerator.device_count()}
    module = getattr(torch, accelerator.type)
    facts["name"] = str(module.get_device_name()) if hasattr(module, "get_device_name") else accelerator.type
    try:
        facts["pinned_memory"] = bool(torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True).is_pinned())
        facts |= _link(accelerator.type)
    except RuntimeError as error:
        facts["pinned_memory"] = False
        facts["problem"] = str(error).splitlines()[0]
    return facts


def _link(kind: str) -> dict[str, float]:
    """Bytes a second between pinned host memory and the device, each way, by timing one large copy."""
    import torch

    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=kind)
    rates = {}
    copies = {"host_to_device_bytes_per_s": (there, host), "device_to_host_bytes_per_s": (host, there)}
    for name, (target, source) in copies.items():
        target.copy_(source, non_blocking=True)  # the first one also wakes the link
        torch.accelerator.synchronize()
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()
        rates[name] = LINK_BYTES / (time.perf_counter() - begin)
    return rates
