"""Where a spool may lie: directories that are checked, and the file systems under them."""

from __future__ import annotations

import os
from pathlib import Path

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


MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - {root} /dev/sda1 rw
23 22 0:5 / /tmp\040dir rw - tmpfs tmpfs rw
24 22 0:6 / /mnt/net rw shared:2 master:3 - nfs4 server:/export rw
25 24 0:7 / /mnt/net/local rw - xfs /dev/sdb rw
26 22 0:8 / /mnt/ssh rw - fuse.sshfs host: rw
27 26 0:9 / /mnt/ssh rw - btrfs /dev/sdc rw
"""


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
    path: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "_MOUNTS_FILE", mounts_file(tmp_path, "ext4"))
    assert paths.filesystem_type(path) == kind


def mounts_file(folder: Path, kind: str) -> Path:
    file = folder / "mountinfo"
    file.write_text(MOUNTS.replace("{root}", kind))
    return file


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"])
def test_memory_and_network_file_systems_are_refused_unless_told(
    make_spool: MakeSpool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(paths, "_MOUNTS_FILE", mounts_file(tmp_path, kind))
    with pytest.raises(SpoolPathError, match=f"is on {kind}, .*allow_any_filesystem"):
        make_spool()
    spool = make_spool(allow_any_filesystem=True)
    assert get(spool, put(spool, b"\x07" * BLOCK), BLOCK) == b"\x07" * BLOCK


def test_overlay_is_taken_but_buffered(make_spool: MakeSpool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_MOUNTS_FILE", mounts_file(tmp_path, "overlay"))
    assert not make_spool().direct


def test_a_system_without_mount_table_takes_every_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paths, "_MOUNTS_FILE", tmp_path / "none")
    assert paths.filesystem_type("/") is None
    assert paths.check_directory(tmp_path) == os.path.realpath(tmp_path)
