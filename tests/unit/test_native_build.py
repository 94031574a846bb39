"""How compiled code is built and loaded; after a refusal, which has its reason, Python does the work."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import OffloadConfig, Offloader
from actoffload.autograd import native
from actoffload.errors import ActOffloadError
from actoffload.memory import cpu_allocator, native_build
from actoffload.memory.native_build import Refused
from tests.programs import run_program
from tests.spools import in_child

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("c++") is None, reason="Linux and a C++ compiler"
)


class Elsewhere(Tensor):
    """A tensor that reports another address than its memory's."""

    _cdata = 16


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was loaded or refused yet, and the cache is empty."""
    monkeypatch.setattr(native._Process, "module", None)
    monkeypatch.setattr(native._Process, "reason", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(native_build.SWITCH, raising=False)


def test_a_forked_child_does_not_wait_for_a_build_of_its_parent() -> None:
    module = native.load()

    def child() -> None:
        assert native.load() is module

    with native._Process.lock:
        assert in_child(child) == 0


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("why", "reported"),
    [
        ("switch", "ACTOFFLOAD_NATIVE=0 is set"),
        ("headers", "Python.h"),
        ("platform", "only on Linux"),
        ("free-threaded", "only for CPython with its global lock"),
        ("release", "not tested with PyTorch 9.1 (2.9 to 2.15; ACTOFFLOAD_NATIVE=1 has it tried)"),
        ("broken", "the C++ compiler failed: hooks.cpp"),
        ("library", "could not be loaded"),
        ("layout", "TypeError: this release of PyTorch lays out its objects otherwise"),
    ],
)
def test_a_refusal_has_its_reason(why: str, reported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "switch":
        monkeypatch.setenv(native_build.SWITCH, "0")
    elif why == "headers":
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    elif why == "platform":
        monkeypatch.setattr(sys, "platform", "darwin")
    elif why == "free-threaded":
        monkeypatch.setattr(sysconfig, "get_config_var", lambda name: 1)
    elif why == "release":
        monkeypatch.setattr(torch, "__version__", "9.1.0+cpu")
    elif why == "layout":
        monkeypatch.setenv("XDG_CACHE_HOME", str(Path.home() / ".cache"))
        monkeypatch.setattr(native, "_samples", lambda: (torch.ones(1).as_subclass(Elsewhere),))
    else:
        bad = tmp_path / "hooks.cpp"
        bad.write_text("no program" if why == "broken" else "int nothing;")
        monkeypatch.setattr(native, "SOURCE", bad)
    assert native.load() is None
    assert reported in native.refusal().replace(str(tmp_path) + "/", "")
    assert native.load() is None


@pytest.mark.parametrize("switch", ["1", "hooks"])
def test_another_release_is_tried_on_request(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.1.0+cpu")
    monkeypatch.setenv(native_build.SWITCH, switch)
    assert native.build().exists()


def test_a_damaged_module_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native._Process, "module", None)
    whole, damaged = native.build(), tmp_path / "hooks.so"
    damaged.touch()
    monkeypatch.setattr(native, "build", lambda: damaged if damaged.exists() else whole)
    assert native.load() is not None, native.refusal()
    assert not damaged.exists()


class Cached:
    """A small library that is built into a cache of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.temporary = folder / "home", folder / "temporary"
        self._source = folder / "answer.cpp"
        self._source.write_text('extern "C" int answer() { return 42; }')
        monkeypatch.setenv("XDG_CACHE_HOME", str(self.home / ".cache"))
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))
        monkeypatch.delenv(native_build.SWITCH, raising=False)
        monkeypatch.delenv("CXX", raising=False)

    def build(self) -> Path:
        return native_build.build(self._source, [], [])

    def answer(self) -> int:
        return native_build.load(self.build, lambda path: int(ctypes.CDLL(str(path)).answer()))


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cached:
    return Cached(tmp_path, monkeypatch)


def test_a_library_is_built_once_with_one_line(cached: Cached, capsys: pytest.CaptureFixture[str]) -> None:
    library, folder = cached.build(), cached.home / ".cache" / "actoffload"
    assert capsys.readouterr() == ("", f"actoffload: compiling answer.cpp once, about 10 s, into {folder}\n")
    assert list(folder.iterdir()) == [library]
    made = library.stat().st_mtime_ns
    assert cached.build() == library
    assert library.stat().st_mtime_ns == made
    assert capsys.readouterr() == ("", "")


def test_without_a_home_it_is_built_once_as_well(cached: Cached) -> None:
    cached.home.touch()  # no directory can be made there
    library = cached.build()
    assert library.parent == cached.temporary / f"actoffload-{os.geteuid()}"
    assert library.parent.stat().st_mode & 0o777 == 0o700
    made = library.stat().st_mtime_ns
    assert cached.build() == library
    assert library.stat().st_mtime_ns == made
    library.parent.chmod(0o777)
    with pytest.raises(Refused, match="set XDG_CACHE_HOME"):
        cached.build()


def test_a_compiler_that_hangs_or_is_gone_is_a_reason(cached: Cached, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "COMPILE_S", 0.01)
    with pytest.raises(Refused, match="timed out"):
        cached.build()
    monkeypatch.setattr(shutil, "which", lambda name: "/nowhere/c++")
    with pytest.raises(Refused, match="C\\+\\+ compiler failed"):
        cached.build()


@pytest.mark.parametrize("damage", ["empty", "zeros", "text", "header", "half"])
def test_a_library_in_the_cache_that_is_not_whole_is_made_anew_once(
    cached: Cached, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """To load a library that has lost its second half ends the process by a signal."""
    good = cached.build().read_bytes()
    parts = {"header": good[:70], "half": good[: len(good) // 2], "zeros": b"\0" * 8192, "text": b"no library"}
    cached.build().write_bytes(parts.get(damage, b""))
    capsys.readouterr()
    assert [cached.answer(), cached.answer()] == [42, 42]
    assert capsys.readouterr().err.count("compiling") == 1


def test_a_cache_from_which_nothing_can_be_loaded_is_not_used(cached: Cached, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, home = os.statvfs, cached.home

    def flags(folder: Path) -> Any:
        found = plain(folder)
        noexec = os.ST_NOEXEC if folder.is_relative_to(home) else 0
        return SimpleNamespace(f_flag=found.f_flag | noexec)

    monkeypatch.setattr(os, "statvfs", flags)
    assert not cached.build().is_relative_to(home)
    assert cached.answer() == 42


@pytest.mark.parametrize("mask", [0, 0o002, 0o077, 0o277])
def test_a_cache_is_made_for_its_user_alone(cached: Cached, mask: int) -> None:
    before = os.umask(mask)
    try:
        library = cached.build()
    finally:
        os.umask(before)
    made = [library.parent, library.parent.parent, cached.home]
    assert made[-1] == library.parents[2]
    assert [folder.stat().st_mode & 0o7777 for folder in made] == [0o700] * 3


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_cache_that_other_users_may_exchange_is_not_trusted(cached: Cached, mode: int) -> None:
    cached.home.mkdir()
    cached.home.chmod(mode)
    library = cached.build()
    trusted = library.is_relative_to(cached.home)
    assert trusted == bool(mode & 0o1000), "in a sticky directory only its owner exchanges a file"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change a directory's owner")
def test_a_cache_under_another_users_directory_is_not_trusted(cached: Cached) -> None:
    cached.home.mkdir(mode=0o755)
    os.chown(cached.home, 12345, 12345)
    assert not cached.build().is_relative_to(cached.home)


def test_a_build_needs_nobody_who_reads_its_line(cached: Cached, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as after `2>&1 | head`
    unread = os.fdopen(writer, "w")
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", unread)
        assert cached.answer() == 42
    with pytest.raises(BrokenPipeError):
        unread.close()


# -- the allocator of large CPU tensors; where it is refused, blocks go back one by one --------------------------------


@pytest.fixture
def no_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library is in use or was refused, as far as `cpu_allocator` knows."""
    monkeypatch.setattr(cpu_allocator._Process, "library", None)
    monkeypatch.setattr(cpu_allocator._Process, "reason", None)


@pytest.mark.usefixtures("no_allocator")
def test_nothing_is_installed_to_tell_that_nothing_refuses_it() -> None:
    assert cpu_allocator.refusal() == ""
    assert cpu_allocator.facts() is None


@pytest.mark.usefixtures("no_allocator")
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
def test_a_refusal_of_the_allocator_has_its_reason(why: str, reported: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_where_it_is_refused_blocks_go_back_one_by_one(tmp_path: Path) -> None:
    program = """
import os, sys
import torch, actoffload
from actoffload.memory import cpu_allocator
offloader = actoffload.Offloader(actoffload.OffloadConfig(target="nvme", path=sys.argv[1]))
assert cpu_allocator.facts() is None and "jemalloc is preloaded" in cpu_allocator.install()
assert "block by block, which costs time: jemalloc is preloaded" in offloader.report()
def rss(): return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
for _ in range(8):
    pairs = [(torch.full((2 << 20,), 1, dtype=torch.uint8), torch.empty(20_000)) for _ in range(32)]
    before = rss()
    pairs = [small for _, small in pairs]  # between them the heap would have holes of 2 MiB
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
