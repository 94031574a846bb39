"""How the allocator of large CPU tensors is built and loaded; where it is refused, the reason is reported."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from actoffload import OffloadConfig, Offloader
from actoffload.errors import ActOffloadError
from actoffload.memory import cpu_allocator, native_build
from actoffload.memory.native_build import Refused
from tests.programs import run_program

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("c++") is None, reason="Linux and a C++ compiler"
)


@pytest.fixture
def quickly_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds an empty library, for tests of its place only."""
    source = tmp_path / "cpu_allocator.cpp"
    source.write_text("int nothing;")
    monkeypatch.setattr(cpu_allocator, "SOURCE", source)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No library is in use and the cache is empty, as far as `cpu_allocator` knows; returns its folder."""
    monkeypatch.setattr(cpu_allocator._Process, "library", None)
    monkeypatch.setattr(cpu_allocator._Process, "reason", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "actoffload"


def test_the_library_is_built_once_with_one_message(fresh: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = cpu_allocator.build()
    assert library.parent == fresh
    assert capsys.readouterr().err == f"actoffload: compiling cpu_allocator.cpp once, about 10 s, into {fresh}\n"
    assert [file.name for file in fresh.iterdir()] == [library.name]
    made = library.stat().st_mtime_ns
    assert cpu_allocator.build() == library
    assert cpu_allocator.refusal() == ""
    assert cpu_allocator.facts() is None
    assert library.stat().st_mtime_ns == made
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("quickly_compiled")
def test_without_a_home_it_is_built_once_as_well(fresh: Path) -> None:
    temporary = fresh.parent / "temporary"
    fresh.touch()  # no directory can be made there
    library = cpu_allocator.build()
    assert library.parent == temporary / f"actoffload-{os.geteuid()}"
    assert library.parent.stat().st_mode & 0o777 == 0o700
    made = library.stat().st_mtime_ns
    assert cpu_allocator.build() == library
    assert library.stat().st_mtime_ns == made
    library.parent.chmod(0o777)
    assert "set XDG_CACHE_HOME" in cpu_allocator.refusal()
    library.parent.chmod(0o700)
    assert cpu_allocator.refusal() == ""


@pytest.mark.parametrize(
    ("why", "reported"),
    [
        ("compiler", "no C++ compiler"),
        ("preload", "jemalloc is preloaded"),
        ("limit", "limited (`ulimit -v`)"),
        ("data", "limited (`ulimit -d`)"),
        ("overcommit", "does not overcommit"),
        ("platform", "only on Linux"),
    ],
)
def test_a_refusal_has_its_reason(why: str, reported: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/unit/test_native_build.py` has the reasons that all compiled code shares."""
    if why == "compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    elif why == "preload":
        monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    elif why in ("limit", "data"):
        limited = resource.RLIMIT_AS if why == "limit" else resource.RLIMIT_DATA
        monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 40 if which == limited else -1, -1))
    elif why == "overcommit":
        monkeypatch.setattr(cpu_allocator, "_overcommit", lambda: 2)
    else:
        monkeypatch.setattr(sys, "platform", "darwin")
    assert reported in cpu_allocator.refusal()
    reason = cpu_allocator.install()
    assert reported in reason
    assert cpu_allocator.install() == reason
    assert cpu_allocator.facts() is None
    cpu_allocator.next_epoch()
    cpu_allocator.give_back()
    torch.full((1 << 20,), 1.0)


def test_a_compiler_that_hangs_or_is_gone_is_a_reason(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "COMPILE_S", 0.01)
    with pytest.raises(Refused, match="timed out"):
        cpu_allocator.build()
    monkeypatch.setattr(shutil, "which", lambda name: "/nowhere/c++")
    with pytest.raises(Refused, match="C\\+\\+ compiler failed"):
        cpu_allocator.build()


def test_where_it_is_refused_blocks_go_back_one_by_one(tmp_path: Path) -> None:
    program = """
import os, sys
import torch, actoffload
from actoffload.memory import cpu_allocator
offloader = actoffload.Offloader(actoffload.OffloadConfig(target="nvme", path=sys.argv[1]))
assert cpu_allocator.facts() is None and "jemalloc is preloaded" in cpu_allocator.install()
assert "block by block, which costs time: jemalloc is preloaded" in offloader.report()
def rss(): return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
held = [torch.full((2 << 20,), 1, dtype=torch.uint8) for _ in range(32)]
guard = torch.full((1 << 20,), 1, dtype=torch.uint8)
before = rss()
del held
assert rss() < before - (48 << 20)
"""
    done = run_program(program, str(tmp_path), environment={"LD_PRELOAD": "/nowhere/libjemalloc.so"})
    assert done.returncode == 0, done.stderr


def test_an_offloader_that_cannot_be_made_uses_nothing(tmp_path: Path) -> None:
    users = cpu_allocator._Process.users
    with pytest.raises(ActOffloadError):
        Offloader(OffloadConfig(target="nvme", path=str(tmp_path / "nowhere")))
    assert cpu_allocator._Process.users == users
    offloader = Offloader(OffloadConfig(target="nvme", path=str(tmp_path)))
    assert cpu_allocator._Process.users == users + 1
    offloader.close()
    assert cpu_allocator._Process.users == users
