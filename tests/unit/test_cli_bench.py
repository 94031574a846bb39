"""``actoffload bench``: its measurements, the rates from them, and an empty disk afterwards."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from actoffload.storage.engines.base import IoKind
from actoffload.storage.engines.posix import PosixEngine
from actoffload.tools import bench
from actoffload.tools.bench import DIRECTIONS, Rates, Rig, advice, best_of
from tests import commands

KIB, MIB = 1 << 10, 1 << 20
TINY = ["--seconds", "0.02"]
invoke = partial(commands.invoke, "bench")


def rates(write: float, read: float, mixed: float, **setting: Any) -> Rates:
    chosen = {"engine": "posix", "direct": True, **setting}
    return Rates(**chosen, write=write, read=read, mixed=mixed)


# -- from samples to rates --------------------------------------------------------------------------------------------


def test_the_slowest_ways_median_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([1.0, 5.0, 3.0, 9.0, 5.0, 3.0, 2.0, 5.0, 3.0])
    with Rig([str(tmp_path)], "posix", 4, 64 * KIB, MIB) as rig:
        monkeypatch.setattr(rig, "measure", lambda direction, seconds: next(taken))
        found = rig.rates(0.01, rounds=3)
    assert (found.write, found.read, found.mixed, found.sustained) == (2.0, 5.0, 3.0, 2.0)


def test_the_best_engine_hides_most_and_the_page_cache_wins_only_alone() -> None:
    slow, fast = rates(9.0, 9.0, 1.0), rates(2.0, 2.0, 2.0, engine="uring")
    cached = rates(90.0, 90.0, 90.0, engine="aiofiles", direct=False)
    assert best_of([cached, slow, fast]) == fast
    assert best_of([cached]) == cached
    assert best_of([]) is None
    assert "page cache" in advice(cached)[-1]


def test_half_of_the_step_writes_and_half_reads() -> None:
    text = "\n".join(advice(rates(4e9, 2e9, 3e9)))
    assert "2.00 GB/s both ways" in text
    assert "A step of 1 s hides 953.7 MiB written and read back" in text  # 1e9 bytes


# -- measurements -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["posix", "aiofiles"])
def test_both_at_once_moves_as_much_each_way(engine: str, tmp_path: Path) -> None:
    pytest.importorskip("aiofiles")
    with Rig([str(tmp_path)], engine, 2, 64 * KIB, 2 * MIB) as rig:
        rig.measure("write", 0.01)
        before = rig.spool.statistics()
        assert rig.measure("mixed", 0.05) > 0
        after = rig.spool.statistics()
        written, read = after.written_bytes - before.written_bytes, after.read_bytes - before.read_bytes
    assert min(written, read) > 0
    assert abs(written - read) <= 4 * 64 * KIB  # each slot is at most one transfer ahead


def test_a_disk_that_fails_ends_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer, calls = PosixEngine._transfer_once, [0]

    def failing(self: PosixEngine, kind: IoKind, views: list[memoryview], offset: int) -> int:
        calls[0] += 1
        if calls[0] > 40:
            raise OSError(errno.EIO, "broken")
        return transfer(self, kind, views, offset)

    monkeypatch.setattr(PosixEngine, "_transfer_once", failing)
    assert "broken" in invoke("--path", str(tmp_path), "--engine", "posix", *TINY, "--seconds", "1000", status=1)
    assert open_files(tmp_path) == []


def open_files(folder: Path, pid: int | str = "self") -> list[str]:
    """The files that a process has open in a folder, even without a name, and the files that the folder lists."""
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(fd))
    return [link for link in links if link.startswith(str(folder))] + [file.name for file in folder.iterdir()]


# -- the command ------------------------------------------------------------------------------------------------------


def test_json_and_nothing_else(tmp_path: Path) -> None:
    arguments = ["--path", str(tmp_path), "--engine", "posix", "--engine", "memory", *TINY]
    facts = commands.answer("bench", *arguments)
    assert [one["engine"] for one in facts["rates"]] == ["posix", "memory"]
    assert all(one[way] > 0 for one in facts["rates"] for way in (*DIRECTIONS, "sustained"))
    best, training = facts["best"], facts["training"]
    assert best["sustained"] == min(best[way] for way in DIRECTIONS)
    assert (training["step_s"], training["hidden_bytes"]) == (1.0, best["sustained"] / 2)
    assert open_files(tmp_path) == []


def test_an_engine_that_cannot_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    arguments = ["--path", str(tmp_path), "--engine", "gds", *TINY]
    assert invoke(*arguments, status=1).count("gds was not measured: engine='gds': cannot import kvikio") == 1
    beside = invoke(*arguments, "--engine", "posix")
    assert "gds was not measured" in beside
    assert "Best: posix" in beside


def test_too_little_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, nbytes: reserved.append(nbytes))
    monkeypatch.setattr(bench, "REGION_BYTES", 100_000 << 40)
    printed = invoke("--path", str(tmp_path), *TINY, status=1)
    assert "too little room for 100000.0 TiB" in printed
    assert str(tmp_path) in printed
    assert open_files(tmp_path) == []
    assert reserved == []  # nor was the disk filled for a moment, at the expense of other processes


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    arguments = ["--path", str(tmp_path), "--engine", "posix"]
    command = [sys.executable, "-m", "actoffload", "bench", "--json", *arguments, "--seconds", "100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 60
            while not open_files(tmp_path, process.pid):
                assert time.monotonic() < deadline, "it never opened its file"
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=45)
        finally:
            process.kill()
    assert process.returncode != 0
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    assert out == ""
