"""The allocator of large CPU tensors: builds it, installs it and tells it when to give memory back to the system.

The allocator itself is ``cpu_allocator.cpp``, which keeps memory from one tensor to the next. It is compiled once into
the user's cache directory, uses PyTorch's own C++ interface for allocators, and stays installed until the process ends,
as tensors outlive every offloader. Where it cannot be built or should not be used, a reason says why.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import threading
from pathlib import Path

import psutil

from . import native_build
from .native_build import Refused, told

SOURCE = native_build.PACKAGE / "memory" / "cpu_allocator.cpp"
SMALLEST_BYTES = 256 << 10
"""Smaller tensors stay with PyTorch's allocator."""
IDLE_EPOCHS = 16
"""Memory without tensors for this many forwards goes back to the system; a step may have several forwards."""
_PRELOADED = ("jemalloc", "tcmalloc", "mimalloc")
_INSTALL_ERRORS = {1: "another allocator than PyTorch's own is in use", 2: "no addresses could be reserved"}


class _Process:
    """State of this process: the library once it is installed, or the reason why it is not."""

    lock = threading.Lock()
    library: ctypes.CDLL | None = None
    reason: str | None = None
    users = 0


def install() -> str:
    """Use the allocator for every large CPU tensor from now on; return "" if it is in use, else why not. Idempotent."""
    with _Process.lock:
        if _Process.library is None and _Process.reason is None:
            try:
                _Process.library = _install()
            except Exception as error:  # training does not end because memory could not be tuned
                _Process.reason = told(error)
        return _Process.reason or ""


def refusal() -> str:
    """Return why `install` would not use it here, or ""; build it and do not install it."""
    try:
        _check_process()
        build()
    except Exception as error:
        return told(error)
    return ""


class Use:
    """One user of the allocator: while there is any, freed memory is kept for tensors to come, else it goes back."""

    def __init__(self) -> None:
        self._ended = False
        with _Process.lock:
            _Process.users += 1
            _keep(True)

    def end(self) -> None:
        """End this use. Idempotent."""
        with _Process.lock:
            if self._ended:
                return
            self._ended = True
            _Process.users = max(0, _Process.users - 1)
            if _Process.users == 0:
                _keep(False)
                give_back()


class HeldBlock:
    """Keeps a tensor's memory from being used again while this object lives, though its owner frees it meanwhile.

    Reads there see the old bytes. It does nothing for memory of another allocator.

    Args:
        address: where the memory of the tensor's storage begins.
        dense: all of it is in use; else huge pages are off, which would make the rest resident.
    """

    __slots__ = ("_address",)

    def __init__(self, address: int, *, dense: bool = True) -> None:
        library = _Process.library
        held = library is not None and library.actoffload_hold(ctypes.c_void_p(address), int(dense))
        self._address = address if held else 0

    def __del__(self) -> None:
        address = getattr(self, "_address", 0)  # an interrupt may have come before there was one
        if address and _Process.library is not None:
            let_go, where = _Process.library.actoffload_let_go, ctypes.c_void_p(address)
            self._address = 0  # no interrupt comes between this and the call, so that it is called once
            let_go(where)


def next_epoch() -> None:
    """Count a forward; memory that was idle for `IDLE_EPOCHS` of them goes back to the system."""
    if _Process.library is not None:
        _Process.library.actoffload_next_epoch(ctypes.c_uint32(IDLE_EPOCHS))


def give_back() -> None:
    """Give all memory back that no tensor is in."""
    if _Process.library is not None:
        _Process.library.actoffload_next_epoch(ctypes.c_uint32(0))


def facts() -> dict[str, int] | None:
    """Return bytes in tensors, their peak, bytes with pages, the number of blocks, and the peak since the last call.

    None if it is not in use.
    """
    if _Process.library is None:
        return None
    names = ("live_bytes", "peak_bytes", "resident_bytes", "blocks", "recent_peak_bytes")
    found = (ctypes.c_uint64 * len(names))()
    _Process.library.actoffload_facts(found)
    return dict(zip(names, found, strict=True))


def build() -> Path:
    """Compile the allocator, unless that was done before; return the library's path.

    Raises:
        Refused: There is no compiler, or it failed.
    """
    options, key = native_build.with_torch()
    return native_build.build(SOURCE, [*options, "-pthread"], key)


def _keep(keep: bool) -> None:
    if _Process.library is not None:
        _Process.library.actoffload_keep(ctypes.c_int(keep))


def _after_fork_in_child() -> None:
    _Process.lock = threading.Lock()  # the old one may be held by a thread that this process does not have
    _Process.users = 0  # the parent's offloaders do not work here
    _keep(False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _check_process() -> None:
    if not sys.platform.startswith("linux"):
        raise Refused("only on Linux")
    preload = os.environ.get("LD_PRELOAD", "")
    for name in _PRELOADED:
        if name in preload:
            raise Refused(f"{name} is preloaded, and keeps memory itself")
    for limit, name in ((resource.RLIMIT_AS, "v"), (resource.RLIMIT_DATA, "d")):
        if resource.getrlimit(limit)[0] != resource.RLIM_INFINITY:
            raise Refused(f"the process's address space is limited (`ulimit -{name}`), and much of it is reserved")
    if _overcommit() == 2:
        raise Refused("the system does not overcommit memory (vm.overcommit_memory is 2)")


def _install() -> ctypes.CDLL:
    _check_process()
    library = native_build.load(build, lambda path: ctypes.CDLL(str(path)))
    code = library.actoffload_install(
        ctypes.c_size_t(int(psutil.virtual_memory().total)), ctypes.c_size_t(SMALLEST_BYTES)
    )
    if code:
        raise Refused(_INSTALL_ERRORS.get(code, f"installing it failed with {code}"))
    return library


def _overcommit() -> int:
    try:
        return int(Path("/proc/sys/vm/overcommit_memory").read_text())
    except (OSError, ValueError):
        return 0
