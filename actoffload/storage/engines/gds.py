"""GPUDirect Storage: ``kvikio`` (cuFile) moves bytes between device memory and the file, past host memory.

Addresses of host memory work as well; then ``kvikio`` reads and writes by system calls. It takes any address and
length; parts of device pages go through a little host memory of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final

from ...errors import EngineUnavailableError
from .base import OTHER_BYTES, EngineCapabilities, IoKind, SpoolFile, try_transfers
from .queued import QueuedEngine, default_threads

PAGE_BYTES: Final = 4096
"""A page of a device: parts of a page go through host memory."""
_KERNEL_MODULE = Path("/proc/driver/nvidia-fs/stats")
_PROBE_BYTES = 64 << 10
_kept_after_fork: list[object] = []


class GdsEngine(QueuedEngine):
    """Transfers by ``kvikio``, in worker threads. The constructor tries device memory.

    Args:
        file: The file to work on; ``kvikio`` opens it again by its ``reopen_path``.
        threads: Transfers at the same time; None: up to 4. The thread pool of ``kvikio`` gets at least as many.

    Attributes:
        remark: Whether the bytes go straight to the device, or why ``kvikio`` is in compatibility mode.

    Raises:
        EngineUnavailableError: No ``kvikio``, no CUDA device, or the trial transfer failed or brought other bytes.
    """

    default_name: ClassVar[str] = "gds"

    def __init__(self, file: SpoolFile, *, threads: int | None = None) -> None:
        count = default_threads(threads)
        kvikio, defaults = _import("kvikio"), _import("kvikio.defaults")
        compat = why_compat()
        direct = file.direct and not compat
        capabilities = EngineCapabilities(
            self.default_name, direct, 1, threads=count, vectored=True, device_memory=True
        )
        super().__init__(file, capabilities)
        self.remark = (
            f"compatibility mode, through host memory: {compat}" if compat else "GPUDirect Storage, past host memory"
        )
        if file.reopen_path is None:
            raise _unavailable("the file cannot be opened a second time on this system")
        try:
            if defaults.get("num_threads") < count:
                defaults.set("num_threads", count)
            self._kvikio_file = kvikio.CuFile(file.reopen_path, "r+")
        except Exception as exc:  # a broken driver stack raises any class
            raise _unavailable(f"kvikio does not open a file: {_first_line(exc)}") from exc
        self.start_threads(count)
        try:
            problem = self._try_device_memory()
        except Exception as exc:
            problem = f"no device memory to try it with: {_first_line(exc)}"
        if problem is not None:
            self.abort()
            raise _unavailable(problem)

    def close(self) -> None:
        super().close()
        self._kvikio_file.close()  # idempotent

    def after_fork_in_child(self) -> None:
        _kept_after_fork.append(self._kvikio_file)  # its destructor would call a driver that a child cannot use
        ours = os.fstat(self._kvikio_file.fileno())
        for name in os.listdir("/proc/self/fd"):  # kvikio has a second descriptor that it does not expose
            with contextlib.suppress(OSError):
                found = os.fstat(int(name))
                if int(name) != self._file.fd and (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino):
                    os.close(int(name))

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        view = views[0]
        memory = _Memory(ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view))
        transfer = self._kvikio_file.pread if kind is IoKind.READ else self._kvikio_file.pwrite
        try:
            return int(transfer(memory, len(view), offset).get())
        except OSError:
            raise
        except Exception as exc:  # kvikio's are RuntimeError with a text
            raise OSError(errno.EIO, _first_line(exc)) from exc

    def _try_device_memory(self) -> str | None:
        """Write device memory behind the end of the file and read it back; return the failure, or None."""
        cuda = _import("cupy").cuda
        size = os.fstat(self._file.fd).st_size
        offset = -(-size // PAGE_BYTES) * PAGE_BYTES
        pattern = bytes(range(256)) * (_PROBE_BYTES // 256)
        host = ctypes.create_string_buffer(pattern + bytes(_PROBE_BYTES), 2 * _PROBE_BYTES)
        device = cuda.alloc(2 * _PROBE_BYTES)
        device.copy_from_host(ctypes.c_void_p(ctypes.addressof(host)), 2 * _PROBE_BYTES)
        try:
            problem = try_transfers(self, device.ptr, _PROBE_BYTES, offset)
        finally:
            os.ftruncate(self._file.fd, size)
        device.copy_to_host(ctypes.c_void_p(ctypes.addressof(host)), 2 * _PROBE_BYTES)
        if problem is None and host.raw != 2 * pattern:
            problem = OTHER_BYTES
        return problem


class _Memory:
    """An address by the protocol for device memory; ``kvikio`` finds out itself where it really lies."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def why_compat() -> str:
    """Why ``kvikio`` would read and write through host memory here; empty: it would not.

    Raises:
        EngineUnavailableError: There is no ``kvikio``.
    """
    if not _KERNEL_MODULE.exists():  # cuFile then goes through host memory by itself, and kvikio does not know
        return "the kernel module nvidia-fs is not loaded"
    if _import("kvikio.defaults").is_compat_mode_preferred():
        return "kvikio prefers it here (KVIKIO_COMPAT_MODE, or no cuFile)"
    try:
        works = _import("kvikio.cufile_driver").get("is_gds_available")
    except Exception as exc:
        return f"cuFile does not answer: {_first_line(exc)}"
    return "" if works else "cuFile says that GPUDirect Storage is not available"


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise _unavailable(f"cannot import {name} ({exc}); pip install actoffload[gds]") from exc


def _unavailable(reason: str) -> EngineUnavailableError:
    return EngineUnavailableError(f"engine='gds': {reason}; use 'auto'")


def _first_line(exc: BaseException) -> str:
    return next(iter(str(exc).splitlines()), type(exc).__name__)
