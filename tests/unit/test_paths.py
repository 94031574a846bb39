"""Where a spool may lie: directories that are checked, and the file systems under them."""

from __future__ import annotations

import os
import types
from pathlib import Path

import psutil
import pytest

from actoffload.errors import SpoolPathError
from actoffload.storage import spool_files as paths
from tests.spools import BLOCK, MakeSpool, get, put


def test_a_directory_without_write_permission_is_refused(
    make_spool: MakeSpool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(SpoolPathError, match="is not writable"):
        make_spool()


MOUNTS = (
    ("/tmp dir", "tmpfs"),
    ("/mnt/net", "nfs4"),
    ("/mnt/net/local", "xfs"),
    ("/mnt/ssh", "fuse.sshfs"),
    ("/mnt/ssh", "btrfs"),
)


def mounted(monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    """Have the file system of the root be of a kind."""
    found = [types.SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in (("/", root), *MOUNTS)]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/me", "ext4"),
        ("/tmp dir/x", "tmpfs"),
        ("/tmp dirt", "ext4"),
        ("/mnt/net", "nfs4"),
        ("/mnt/net/local/x", "xfs"),
        ("/mnt/ssh", "btrfs"),
    ],
)
def test_the_file_system_is_that_of_the_innermost_last_mount(
    path: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted(monkeypatch, "ext4")
    assert paths.filesystem_type(path) == kind


NETWORKS = {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "lustre", "gpfs", "beegfs", "ceph", "virtiofs", "afs"}
HERE = Path("/proc/filesystems")
KNOWN = [line.split() for line in HERE.read_text().splitlines()] if HERE.exists() else []
ON_NO_DEVICE = [line[1] for line in KNOWN if line[0] == "nodev" and line[1] not in ("overlay", "zfs", "aufs", "ubifs")]


@pytest.mark.parametrize("kind", sorted({"tmpfs", "ramfs", "devtmpfs", *ON_NO_DEVICE} | NETWORKS))
def test_memory_and_network_file_systems_are_refused_by_default(
    make_spool: MakeSpool, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    mounted(monkeypatch, kind)
    with pytest.raises(SpoolPathError, match=f"is on {kind}, .*allow_any_filesystem"):
        make_spool()
    spool = make_spool(allow_any_filesystem=True)
    assert get(spool, put(spool, b"\x07" * BLOCK), BLOCK) == b"\x07" * BLOCK


@pytest.mark.skipif(not os.path.ismount("/dev"), reason="no file system of its own is on /dev")
def test_the_directory_of_devices_is_no_disk() -> None:
    with pytest.raises(SpoolPathError, match=r"path='/dev' is on (dev)?tmpfs"):
        paths.check_directory("/dev")


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "f2fs", "apfs", "fuseblk"])
def test_local_disks_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    mounted(monkeypatch, kind)
    assert paths.check_directory(tmp_path) == os.path.realpath(tmp_path)


def test_overlay_is_taken_but_buffered(make_spool: MakeSpool, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(monkeypatch, "overlay")
    assert not make_spool().direct


def test_a_system_without_mount_table_takes_every_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [])
    assert paths.filesystem_type("/") is None
    assert paths.check_directory(tmp_path) == os.path.realpath(tmp_path)
