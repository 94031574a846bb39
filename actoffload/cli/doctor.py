"""``actoffload doctor``: the device, the link and the disk; what is there and what offloading would use."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import cpu_allocator, native_hooks
from ..config import default_path, format_size
from ..errors import ActOffloadError
from ..spool import Extent, Spool
from . import probes

BLOCK_BYTES = 16 << 20
BLOCKS = 8
"""The disk is tried with this many blocks at once: long enough to see its speed, short enough to wait for."""


def examine(paths: Sequence[str] | None) -> dict[str, Any]:
    """Everything that `doctor` finds, ready for JSON. Sizes in bytes, rates in bytes a second."""
    return {
        "device": probes.device(),
        "memory": probes.memory(),
        "cpu_allocator": _cpu_allocator(),
        "native_hooks": _native_hooks(),
        "io_uring": probes.io_uring(),
        "gds": probes.gpu_direct_storage(),
        "paths": [examine_path(path) for path in paths or [default_path()]],
    }


def _cpu_allocator() -> dict[str, Any]:
    refused = cpu_allocator.refusal()
    return {"available": not refused, "reason": refused or "memory of large CPU tensors is kept and used again"}


def _native_hooks() -> dict[str, Any]:
    refused = native_hooks.refusal()
    return {"available": not refused, "reason": refused or "what stays is packed in C"}


def healthy(findings: dict[str, Any]) -> bool:
    """Whether a spool works on every path."""
    return all("problem" not in path for path in findings["paths"])


def examine_path(path: str) -> dict[str, Any]:
    """One directory: its file system, and a spool in it, really written and read and compared."""
    facts: dict[str, Any] = {"path": path, "file_system": probes.file_system(path)}
    try:
        spool = Spool([path], capacity_bytes=BLOCKS * BLOCK_BYTES, grow_bytes=BLOCKS * BLOCK_BYTES)
    except ActOffloadError as error:
        return facts | {"problem": str(error)}
    try:
        facts |= {
            "engine": spool.engine_name,
            "engine_reason": spool.engine_reason,
            "direct": spool.direct,
            "alignment": spool.alignment,
        }
        return facts | _speed(spool)
    except ActOffloadError as error:
        return facts | {"problem": str(error)}
    finally:
        spool.close()


def _speed(spool: Spool) -> dict[str, Any]:
    """Write and read all blocks at once, each way timed, and compare what comes back."""
    extents = [spool.allocate(BLOCK_BYTES) for _ in range(BLOCKS)]
    pattern = os.urandom(BLOCK_BYTES)
    with mmap.mmap(-1, BLOCKS * BLOCK_BYTES) as memory:
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(view)
        for block in range(BLOCKS):
            memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = pattern
        write = _rate(spool.write, extents, address)
        memory[:] = bytes(BLOCKS * BLOCK_BYTES)
        read = _rate(spool.read, extents, address)
        equal = all(memory[b * BLOCK_BYTES : (b + 1) * BLOCK_BYTES] == pattern for b in range(BLOCKS))
        del view  # the map cannot close while a view of it lives
    for extent in extents:
        spool.free(extent)
    facts: dict[str, Any] = {"write_bytes_per_s": write, "read_bytes_per_s": read}
    return facts if equal else facts | {"problem": "what was read back is not what was written"}


def _rate(transfer: Callable[..., Any], extents: Sequence[Extent], address: int) -> float:
    begin = time.perf_counter()
    running = [transfer(extent, address + i * BLOCK_BYTES, BLOCK_BYTES) for i, extent in enumerate(extents)]
    for one in running:
        one.wait()
        if one.error is not None:
            raise one.error
    return BLOCKS * BLOCK_BYTES / (time.perf_counter() - begin)


def show(findings: dict[str, Any]) -> None:
    """Print what was found, one table for the machine and one for each path."""
    console = Console()
    table = Table(title="machine", show_header=False, title_justify="left")
    for name, text in _machine_rows(findings):
        table.add_row(name, escape(text))
    console.print(table)
    for path in findings["paths"]:
        table = Table(title=escape(path["path"]), show_header=False, title_justify="left")
        for name, text in _path_rows(path):
            table.add_row(name, escape(text))
        console.print(table)


def _machine_rows(findings: dict[str, Any]) -> list[tuple[str, str]]:
    device, memory = findings["device"], findings["memory"]
    rows = [
        ("device", f"{device['name']} ({device['type']}), torch {device['torch']}, Python {device['python']}"),
        ("pinned memory", _pinned(device)),
    ]
    for way in ("host_to_device", "device_to_host"):
        if f"{way}_bytes_per_s" in device:
            rows.append((way.replace("_", " "), _per_second(device[f"{way}_bytes_per_s"])))
    if "problem" in device:
        rows.append(("problem", device["problem"]))
    rows += [
        ("memory", f"{format_size(memory['available_bytes'])} available of {format_size(memory['total_bytes'])}"),
        ("memlock limit", _limit(memory["memlock_limit_bytes"])),
        ("cgroup limit", _limit(memory["cgroup_limit_bytes"])),
    ]
    names = {
        "cpu_allocator": "CPU allocator",
        "native_hooks": "hooks in C",
        "io_uring": "io_uring",
        "gds": "GPUDirect Storage",
    }
    for key, name in names.items():
        rows.append((name, f"{'yes' if findings[key]['available'] else 'no'}: {findings[key]['reason']}"))
    return rows


def _path_rows(path: dict[str, Any]) -> list[tuple[str, str]]:
    system = path["file_system"]
    rows = [
        ("file system", f"{system['type']}, {format_size(system['free_bytes'])} free"),
    ]
    if "engine" in path:
        rows.append(("direct I/O", f"yes, alignment {path['alignment']} B" if path["direct"] else "no: buffered"))
        rows.append(("engine", path["engine_reason"]))
    for way in ("write", "read"):
        if f"{way}_bytes_per_s" in path:
            rows.append((way, _per_second(path[f"{way}_bytes_per_s"])))
    if "problem" in path:
        rows.append(("problem", path["problem"]))
    return rows


def _pinned(device: dict[str, Any]) -> str:
    if device["pinned_memory"]:
        return "works"
    return "not needed: there is no accelerator" if device["type"] == "cpu" else "failed"


def _per_second(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"


def _limit(nbytes: int | None) -> str:
    return "none" if nbytes is None else format_size(nbytes)
