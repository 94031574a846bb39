"""The cache of compiled libraries: what is damaged is made anew, and what others may exchange is not trusted."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from actoffload.memory import native_build

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("c++") is None, reason="Linux and a C++ compiler"
)


class Cached:
    """A small library that is built into a cache of its own, and how often it was compiled."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.loaded = folder / "home", Path()
        self._source = folder / "answer.cpp"
        self._source.write_text('extern "C" int answer() { return 42; }')
        monkeypatch.setenv("XDG_CACHE_HOME", str(self.home / ".cache"))
        monkeypatch.setattr(tempfile, "tempdir", str(folder / "temporary"))
        monkeypatch.delenv(native_build.SWITCH, raising=False)

    def build(self) -> Path:
        return native_build.build(self._source, [], [])

    def answer(self) -> int:
        def load(path: Path) -> int:
            self.loaded = path
            return int(ctypes.CDLL(str(path)).answer())

        return native_build.load(self.build, load)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cached:
    return Cached(tmp_path, monkeypatch)


@pytest.mark.parametrize("damage", ["empty", "half", "last byte", "hole", "bit", "more", "another's"])
def test_a_library_in_the_cache_that_is_not_whole_is_made_anew_once(
    cached: Cached, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    library = cached.build()
    good = library.read_bytes()
    middle = len(good) // 2
    library.write_bytes(
        {
            "empty": b"",
            "half": good[:middle],
            "last byte": good[:-1],
            "hole": good[:64] + bytes(256) + good[320:],
            "bit": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
            "more": good + b"\0",
            "another's": Path(torch._C.__file__).read_bytes(),
        }[damage]
    )
    capsys.readouterr()
    assert [cached.answer(), cached.answer()] == [42, 42]
    assert capsys.readouterr().err.count("compiling") == 1


def test_what_is_loaded_is_not_the_file_in_the_cache(cached: Cached) -> None:
    """Losing bytes while it is mapped would end the process; and nobody may load from a file system that is noexec."""
    assert cached.answer() == 42
    assert not cached.loaded.samefile(cached.build())
    first = cached.loaded
    assert cached.answer() == 42
    assert not cached.loaded.samefile(first), "the loader takes two files of one name for one library"


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
def test_a_cache_that_others_may_exchange_is_not_trusted(cached: Cached, mode: int) -> None:
    cached.home.mkdir()
    cached.home.chmod(mode)
    library = cached.build()
    trusted = library.is_relative_to(cached.home)
    assert trusted == bool(mode & 0o1000), "in a sticky directory nobody exchanges another's"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a directory to somebody else")
def test_a_cache_under_somebody_else_s_directory_is_not_trusted(cached: Cached) -> None:
    cached.home.mkdir(mode=0o755)
    os.chown(cached.home, 12345, 12345)
    assert not cached.build().is_relative_to(cached.home)
