"""Directories and arena files: is this a place for a spool, and how is its file opened, aligned and grown.

Features of Linux (``O_TMPFILE``, ``O_DIRECT``, ``/proc``) are used if they exist; elsewhere the file is buffered.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import stat
import tempfile
from collections.abc import Iterable

import psutil

from ..errors import SpoolFullError, SpoolPathError, StorageError
from .engines.base import SpoolFile

MAX_BLOCK_BYTES = 4096
RESERVE_BYTES = 256 << 20  # left free on the file system for other programs

_SECTOR_BYTES = 512  # the kernel's unit, whatever the drive's sector is
_REFUSED = re.compile(
    r"tmpfs|ramfs|nfs\d*|cifs|smb.*|9p|fuse\..*|lustre|gpfs|beegfs.*|ceph|virtiofs|afs|coda|glusterfs|pvfs2|panfs"
)
_ON_NO_DEVICE_BUT_LOCAL = frozenset({"overlay", "zfs", "aufs", "ubifs"})
_BUFFERED_ONLY = frozenset({"overlay"})
_REMEDY_FS = "give a directory on a local disk, or set allow_any_filesystem=True"


def check_directory(path: str | os.PathLike[str], *, allow_any_filesystem: bool = False) -> str:
    """Check that ``path`` can hold a spool and return it resolved.

    Raises:
        SpoolPathError: It is missing, not a directory, not writable, or on a file system that is memory, a network or a
            FUSE daemon (unless ``allow_any_filesystem``).
    """
    value = os.fspath(path)
    try:
        mode = os.stat(value).st_mode
    except OSError as exc:
        raise _path_error(value, f"cannot be used ({exc.strerror}): create the directory first", exc.errno) from exc
    if not stat.S_ISDIR(mode):
        raise _path_error(value, "is not a directory: give the directory that the spool may use", errno.ENOTDIR)
    if not os.access(value, os.W_OK | os.X_OK):
        raise _path_error(value, "is not writable: give a directory that this user may write to", errno.EACCES)
    resolved = os.path.realpath(value)
    kind = filesystem_type(resolved)
    if kind is not None and not allow_any_filesystem and (_REFUSED.fullmatch(kind) or _needs_no_device(kind)):
        raise _path_error(value, f"is on {kind}, which is not a local disk: {_REMEDY_FS}", errno.EINVAL)
    return resolved


def filesystem_type(path: str) -> str | None:
    """Return the type of the file system that holds ``path`` (``"ext4"``), or None where that cannot be known."""
    best, kind = -1, None
    with contextlib.suppress(OSError):
        for mount in psutil.disk_partitions(all=True):
            point = mount.mountpoint
            inside = path == point or path.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= best:  # a later mount on the same point hides the earlier one
                best, kind = len(point), mount.fstype
    return kind


def _needs_no_device(kind: str) -> bool:
    """Whether the kernel lists a file system as one on no block device: it is memory, or on another machine."""
    try:
        with open("/proc/filesystems", encoding="utf-8") as file:
            listed = {tuple(line.split()) for line in file}
    except OSError:
        return False
    return ("nodev", kind) in listed and kind not in _ON_NO_DEVICE_BUT_LOCAL


def _path_error(value: str, remedy: str, number: int | None) -> SpoolPathError:
    return SpoolPathError(number or errno.EINVAL, f"path={value!r} {remedy}")


def bytes_by_all(devices: Iterable[int]) -> dict[str, int] | None:
    """Return the bytes that block devices have written and read for all programs; None: the kernel keeps no count.

    Args:
        devices: their numbers, as ``st_dev`` has them.
    """
    moved = {"write": 0, "read": 0}
    for device in devices:
        try:
            with open(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat", encoding="ascii") as file:
                counts = file.read().split()
            moved["read"] += _SECTOR_BYTES * int(counts[2])
            moved["write"] += _SECTOR_BYTES * int(counts[6])
        except (OSError, IndexError, ValueError):  # memory, or a file system that has no device of its own
            return None
    return moved if devices else None


def open_arena(directory: str) -> SpoolFile:
    """Open an unlinked, empty file (mode 0600) in a checked directory, with ``O_DIRECT`` where that works.

    Raises:
        SpoolPathError: No file can be created there.
    """
    try:
        fd = _open_unlinked(directory)
    except OSError as exc:
        raise _path_error(directory, f"refuses a new file ({exc.strerror}): give another directory", exc.errno) from exc
    try:
        buffered_only = filesystem_type(directory) in _BUFFERED_ONLY
        alignment = None if buffered_only else _enable_direct(fd)
    except BaseException:
        os.close(fd)
        raise
    link = f"/proc/self/fd/{fd}"
    return SpoolFile(
        fd=fd,
        path=directory,
        direct=alignment is not None,
        alignment=alignment or 1,
        reopen_path=link if os.path.exists(link) else None,
    )


def _open_unlinked(directory: str) -> int:
    if hasattr(os, "O_TMPFILE"):
        try:  # it never has a name (O_EXCL: nor can it get one), so nothing is left even after SIGKILL
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            if exc.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}:
                raise
    fd, name = tempfile.mkstemp(prefix=".actoffload-", dir=directory)
    os.unlink(name)
    return fd


def _enable_direct(fd: int) -> int | None:
    """Turn ``O_DIRECT`` on and return the alignment it needs, or leave the file buffered and return None."""
    if not hasattr(os, "O_DIRECT"):
        return None
    import fcntl  # POSIX only, as O_DIRECT is

    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        return None
    # Transfers of less than a block are legal on most file systems, but slow: ext4 takes the inode's lock alone for
    # them. Slots of host memory are aligned to that much, and not to more.
    if _direct_works(fd, MAX_BLOCK_BYTES):
        return MAX_BLOCK_BYTES
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return None


def _direct_works(fd: int, size: int) -> bool:
    """Write one block and read it back: some file systems take the flag and then refuse every transfer."""
    with mmap.mmap(-1, size) as block:
        block[:] = b"\xa5" * size
        try:
            if os.pwritev(fd, [block], 0) != size:
                return False
            block[:] = bytes(size)
            return os.preadv(fd, [block], 0) == size and block[:] == b"\xa5" * size
        except OSError:
            return False
        finally:
            os.ftruncate(fd, 0)


def free_bytes(file: SpoolFile) -> int:
    """Return how many bytes the arena may still grow: the free space of the file system, less `RESERVE_BYTES`."""
    info = os.fstatvfs(file.fd)
    return max(0, info.f_bavail * info.f_frsize - RESERVE_BYTES)


def grow_arena(file: SpoolFile, old_bytes: int, new_bytes: int) -> None:
    """Reserve ``[old_bytes, new_bytes)`` on the disk, so that a later write cannot find it full.

    Raises:
        SpoolFullError: There is no room (the file keeps its old size).
        StorageError: The file system failed in another way.
    """
    try:
        _reserve(file.fd, old_bytes, new_bytes)
    except OSError as exc:
        os.ftruncate(file.fd, old_bytes)  # a failed reservation may have taken a part: give it back
        message = f"the arena cannot grow from {old_bytes} to {new_bytes} bytes: {exc.strerror}"
        cls = SpoolFullError if exc.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG} else StorageError
        raise cls(exc.errno or errno.EIO, message, file.path) from exc


def _reserve(fd: int, old_bytes: int, new_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, old_bytes, new_bytes - old_bytes)
            return
        except OSError as exc:
            # The C library emulates it by small writes, which a direct descriptor refuses.
            if exc.errno not in {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV}:
                raise
    os.ftruncate(fd, new_bytes)
