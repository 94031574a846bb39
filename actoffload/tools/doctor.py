"""``actoffload doctor``: the device, the link and the disk, and the parts of them that offloading would use."""

from __future__ import annotations

import math
import os
import platform
import tempfile
from collections.abc import Sequence
from typing import Any

import psutil
import typer

from ..config import default_paths
from ..errors import ActOffloadError
from ..memory.process_memory import cgroup_limit_bytes
from ..sizes import format_size
from ..storage.engines.gds import why_compat
from ..storage.spool import Spool
from ..storage.spool_files import filesystem_type
from .bench import BLOCK_BYTES, DIRECTIONS, REGION_BYTES, ROUNDS, SECONDS, Rig
from .console import JsonOption, PathOption, check_paths, print_json, print_rows
from .environment import clock_s, find_device

LINK_BYTES = 256 << 20
LINK_WAYS = ("host_to_device", "device_to_host")


def command(path: PathOption = None, as_json: JsonOption = False) -> None:
    """Look at the device, the link and the disk, and say what offloading could use here."""
    # A directory that cannot hold saved tensors is a finding, with its reason; the others are refused here.
    check_paths([each for each in path or () if not os.path.isdir(each)] or None)
    findings = examine(path)
    if as_json:
        print_json(findings)
    else:
        show(findings)
    raise typer.Exit(1 if any("problem" in path for path in findings["paths"]) else 0)


def examine(paths: Sequence[str] | None) -> dict[str, Any]:
    """Return all findings, ready for JSON. Sizes in bytes, rates in bytes a second."""
    from ..autograd import native
    from ..memory import cpu_allocator

    found_device, found_paths = device(), [examine_path(path) for path in paths or default_paths()]
    return {
        "device": found_device,
        "memory": {
            "total_bytes": int(psutil.virtual_memory().total),
            "available_bytes": int(psutil.virtual_memory().available),
            "cgroup_limit_bytes": cgroup_limit_bytes(),
        },
        "cpu_allocator": _unless(cpu_allocator.refusal(), "memory of large CPU tensors is kept and used again"),
        "native_hooks": _unless(native.refusal(), "what stays is packed in C"),
        "io_uring": _unless(_why_engine_fails("uring"), "the engine starts"),
        "gds": gpudirect_storage(),
        "paths": found_paths,
        "verdict": [verdict(found_device, path) for path in found_paths],
    }


def gpudirect_storage() -> dict[str, Any]:
    """Return whether the ``gds`` engine moves bytes past host memory here, or why it does not."""
    refusal = _why_engine_fails("gds")
    if not refusal and (compat := why_compat()):
        refusal = f"only kvikio's compatibility mode: {compat}"
    return _unless(refusal, "the engine reads and writes past host memory")


def _unless(refusal: str, reason: str) -> dict[str, Any]:
    return {"available": not refusal, "reason": refusal or reason}


def _why_engine_fails(engine: str) -> str:
    """Return why a storage engine does not start on this machine; empty when it does."""
    # The engine is in question here, not the file system of the temporary directory.
    size, folder = 1 << 20, tempfile.gettempdir()
    try:
        Spool([folder], engine=engine, capacity_bytes=size, grow_bytes=size, allow_any_filesystem=True).close()
    except ActOffloadError as error:
        return str(error)
    return ""


def examine_path(path: str) -> dict[str, Any]:
    """Look at a directory's file system; measure it as `bench` does, with the engine that offloading would use."""
    usage = psutil.disk_usage(path)
    system = {"type": filesystem_type(os.path.realpath(path)) or "unknown"}
    facts: dict[str, Any] = {
        "path": path,
        "file_system": system | {"free_bytes": int(usage.free), "total_bytes": int(usage.total)},
    }
    try:
        with Rig([path], "auto", None, BLOCK_BYTES, REGION_BYTES) as rig:
            rates = rig.rates(SECONDS, ROUNDS)
            facts |= {
                "engine": rig.spool.capabilities.name,
                "engine_reason": rig.spool.disk.engine_reason,
                "direct": rig.spool.capabilities.direct,
                "alignment": rig.spool.capabilities.alignment,
                **{f"{way}_bytes_per_s": getattr(rates, way) for way in (*DIRECTIONS, "sustained")},
            }
    except ActOffloadError as error:
        facts["problem"] = str(error)
    return facts


def verdict(device: dict[str, Any], path: dict[str, Any]) -> str:
    """Return the bytes that a path hides at the slowest of the disk's rates and the link's, and the next command."""
    where = path["path"]
    if "problem" in path:
        return f"{where} cannot hold saved tensors; next: actoffload doctor --path DIR, on a local disk"
    rate = min(path["sustained_bytes_per_s"], *(device.get(f"{way}_bytes_per_s", math.inf) for way in LINK_WAYS))
    cached = "" if path["direct"] else ", page cache included"
    return (
        f"{where} hides about {format_size(rate / 2)} of a 1 s step ({rate / 1e9:.2f} GB/s both ways{cached}); next: "
        f'actoffload demo --path {where}, then offload_activations(target="nvme", path="{where}", model=model)'
    )


def device() -> dict[str, Any]:
    """Return the accelerator or the CPU, as torch sees it, and whether host memory can be pinned for it."""
    import torch

    kind = find_device()
    facts: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "type": kind}
    if kind == "cpu":
        return facts | {"name": "CPU", "pinned_memory": False}
    module = getattr(torch, kind)
    facts["name"] = str(module.get_device_name()) if hasattr(module, "get_device_name") else kind
    try:
        return facts | {"pinned_memory": True} | _link(kind)
    except RuntimeError as error:
        return facts | {"pinned_memory": False, "problem": str(error).splitlines()[0]}


def _link(kind: str) -> dict[str, float]:
    """Time one large copy each way between pinned host memory and the device; bytes a second."""
    import torch

    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=kind)
    rates = {}
    for name, target, source in zip(LINK_WAYS, (there, host), (host, there), strict=True):
        target.copy_(source, non_blocking=True)  # the first one also wakes the link
        begin_s = clock_s(kind)
        target.copy_(source, non_blocking=True)
        rates[f"{name}_bytes_per_s"] = LINK_BYTES / (clock_s(kind) - begin_s)
    return rates


def show(findings: dict[str, Any]) -> None:
    """Print a table for the machine and one for each path, and the verdicts."""
    device, memory = findings["device"], findings["memory"]
    pinned = "not needed: there is no accelerator" if device["type"] == "cpu" else "failed"
    limit = memory["cgroup_limit_bytes"]
    rows = [
        ("device", f"{device['name']} ({device['type']}), torch {device['torch']}, Python {device['python']}"),
        ("pinned memory", "works" if device["pinned_memory"] else pinned),
        *_rate_rows(device, *LINK_WAYS),
        ("memory", f"{format_size(memory['available_bytes'])} available of {format_size(memory['total_bytes'])}"),
        ("cgroup limit", "none" if limit is None else format_size(limit)),
    ]
    names = {"CPU allocator": "cpu_allocator", "hooks in C": "native_hooks", "io_uring": "io_uring"}
    for name, key in (names | {"GPUDirect Storage": "gds"}).items():
        rows.append((name, f"{'yes' if findings[key]['available'] else 'no'}: {findings[key]['reason']}"))
    print_rows(rows, title="machine")
    for path in findings["paths"]:
        system = path["file_system"]
        rows = [("file system", f"{system['type']}, {format_size(system['free_bytes'])} free")]
        if "engine" in path:
            rows.append(("direct I/O", f"yes, alignment {path['alignment']} B" if path["direct"] else "no: buffered"))
            rows.append(("engine", path["engine_reason"]))
        print_rows(rows + _rate_rows(path, *DIRECTIONS), title=path["path"])
    for line in findings["verdict"]:
        typer.echo(line)


def _rate_rows(facts: dict[str, Any], *ways: str) -> list[tuple[str, str]]:
    """Return the rates that were measured, and the problem, if there was one."""
    rates = {way.replace("_", " "): facts.get(f"{way}_bytes_per_s") for way in ways}
    rows = [(way, f"{rate / 1e9:.2f} GB/s") for way, rate in rates.items() if rate is not None]
    return rows + ([("problem", facts["problem"])] if "problem" in facts else [])
