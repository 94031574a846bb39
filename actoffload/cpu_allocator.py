"""Memory for large CPU tensors that the process keeps from one tensor to the next: builds and installs it.

The allocator is ``native/cpu_allocator.cpp``. It is compiled once (about two seconds) into the user's cache directory,
as a part of PyTorch's own C++ interface for allocators, and stays installed until the process ends: tensors outlive
every offloader. Where it cannot be built or should not be used, a reason says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import torch

SOURCE = Path(__file__).parent / "native" / "cpu_allocator.cpp"
SMALLEST_BYTES = 256 << 10
"""Smaller tensors stay with PyTorch's allocator."""
IDLE_EPOCHS = 4
"""Memory that no tensor was in for so many forwards goes back to the system."""
COMPILE_S = 120
_PRELOADED = ("jemalloc", "tcmalloc", "mimalloc")
_INSTALL_ERRORS = {1: "another allocator than PyTorch's own is in use", 2: "no addresses could be reserved"}


class Refused(Exception):
    """Why the allocator is not used here."""


class _Process:
    """What this process has: the library once it is installed, or the reason why it is not."""

    lock = threading.Lock()
    library: ctypes.CDLL | None = None
    reason: str | None = None


def install() -> str:
    """Use the allocator for every large CPU tensor from now on; "" when it is in use, else why not. Idempotent."""
    with _Process.lock:
        if _Process.library is None and _Process.reason is None:
            try:
                _Process.library = _install()
            except Refused as refused:
                _Process.reason = str(refused)
        return _Process.reason or ""


def next_epoch() -> None:
    """A forward begins: what was idle for `IDLE_EPOCHS` goes back to the system."""
    if _Process.library is not None:
        _Process.library.actoffload_next_epoch(ctypes.c_uint32(IDLE_EPOCHS))


def give_back() -> None:
    """Give all memory back that no tensor is in."""
    if _Process.library is not None:
        _Process.library.actoffload_next_epoch(ctypes.c_uint32(0))


def facts() -> dict[str, int] | None:
    """Bytes in tensors, the most there were, bytes with pages, and the number of blocks; None if it is not in use."""
    if _Process.library is None:
        return None
    found = (ctypes.c_uint64 * 4)()
    _Process.library.actoffload_facts(found)
    return dict(zip(("live_bytes", "peak_bytes", "resident_bytes", "blocks"), found, strict=True))


def build() -> Path:
    """Compile the allocator, unless that was done before; the library's path.

    Raises:
        Refused: there is no compiler, or it failed.
    """
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise Refused("there is no C++ compiler (c++, g++, clang++ or CXX)")
    source = SOURCE.read_bytes()
    key = hashlib.sha256(b"\0".join([source, torch.__version__.encode(), _torch_folder().encode(), compiler.encode()]))
    folder = _cache_folder()
    library = folder / f"cpu_allocator-{platform.machine()}-{key.hexdigest()[:20]}.so"
    if not library.exists():
        _compile(compiler, library)
    return library


def _install() -> ctypes.CDLL:
    if not sys.platform.startswith("linux"):
        raise Refused("only on Linux")
    preload = os.environ.get("LD_PRELOAD", "")
    for name in _PRELOADED:
        if name in preload:
            raise Refused(f"{name} is preloaded, and keeps memory itself")
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        raise Refused("the process's address space is limited (`ulimit -v`)")
    if _overcommit() == 2:
        raise Refused("the system does not overcommit memory (vm.overcommit_memory is 2)")
    try:
        library = ctypes.CDLL(str(build()))
    except OSError as error:
        raise Refused(f"the compiled library could not be loaded: {error}") from error
    code = library.actoffload_install(
        ctypes.c_size_t(int(psutil.virtual_memory().total)), ctypes.c_size_t(SMALLEST_BYTES)
    )
    if code:
        raise Refused(_INSTALL_ERRORS.get(code, f"installing it failed with {code}"))
    return library


def _compile(compiler: str, library: Path) -> None:
    root = Path(_torch_folder())
    unfinished = library.with_name(f"{library.name}.{os.getpid()}.{threading.get_ident()}")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    said = ""
    for standard in ("c++20", "c++17"):  # what PyTorch's headers need depends on its release
        command = [compiler, f"-std={standard}", "-O2", "-fPIC", "-shared", abi, f"-I{root / 'include'}"]
        command += [str(SOURCE), "-o", str(unfinished), f"-L{root / 'lib'}", "-lc10", "-pthread"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_S, check=False, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Refused(f"the C++ compiler failed: {error}") from error
        if done.returncode == 0:
            unfinished.replace(library)  # at once: other processes may look for it now
            return
        said = said or next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
    unfinished.unlink(missing_ok=True)
    raise Refused(f"the C++ compiler failed: {said.strip()}")


def _torch_folder() -> str:
    return str(Path(torch.__file__).parent)


def _cache_folder() -> Path:
    """A directory that only this user can write to: a library in it is loaded into the process."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "actoffload"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
        private = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if folder.is_absolute() and private and os.access(folder, os.W_OK | os.X_OK):
            return folder
    except OSError:
        pass
    return _temporary_folder()


def _temporary_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="actoffload-"))
    except OSError as error:
        raise Refused(f"no directory for the compiled library could be made: {error}") from error


def _overcommit() -> int:
    try:
        return int(Path("/proc/sys/vm/overcommit_memory").read_text())
    except (OSError, ValueError):
        return 0
