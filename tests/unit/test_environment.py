"""For measurements: facts of the machine and the process, workers with failures as results, whole files."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from pathlib import Path

import pytest

from actoffload.tools.environment import commit_of, write_json
from actoffload.tools.workers import OthersShare, run_worker, stream_worker

MIB = 1 << 20


def _git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_a_commit_belongs_to_a_checkout_of_this_project(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None
    _git(tmp_path, "init")
    (tmp_path / "README").write_text("somebody else's")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "x")
    (tmp_path / "actoffload").mkdir()
    (tmp_path / "actoffload" / "version.py").write_text("1")
    assert commit_of(tmp_path) is None, "installed into another project's repository"
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "y")
    commit = commit_of(tmp_path)
    assert commit is not None
    assert len(commit) == 12
    (tmp_path / "README").write_text("of no matter")
    assert commit_of(tmp_path) == commit
    (tmp_path / "actoffload" / "version.py").write_text("2")
    assert commit_of(tmp_path) == f"{commit}+changes"


def _worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> str:
    (tmp_path / "a_worker.py").write_text(f"import json, sys, time\nspec = json.loads(sys.argv[1])\n{script}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "a_worker"


def test_a_workers_last_object_is_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "print('noise'); print(json.dumps({'no': 1})); print(json.dumps(spec)); print('more noise')"
    result = run_worker(_worker(tmp_path, monkeypatch, script), {"a": 1}, limit_s=60)
    assert 0 <= result.pop("others_cpu_share") <= 1
    assert result == {"a": 1}


@pytest.mark.parametrize(
    ("script", "oom", "text", "limit_s"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", True, "killed by the system", 60),
        ("raise MemoryError('no room')", True, "MemoryError: no room", 60),
        ("raise SystemExit('a bad day')", False, "a bad day", 60),
        ("time.sleep(60)", False, "stopped after 1 s", 1),
        ("", False, "no output", 60),
    ],
)
def test_a_worker_that_fails_is_a_result(
    script: str, oom: bool, text: str, limit_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = run_worker(_worker(tmp_path, monkeypatch, script), {}, limit_s=limit_s)
    assert result["oom"] is oom
    assert text in result["error"]


def test_the_share_of_other_processes_is_of_all_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([(100.0, 10.0), (100.5, 15.0), (99.0, 16.0)])
    monkeypatch.setattr(OthersShare, "_now", lambda self: next(seen))
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 2)
    others = OthersShare()
    assert (others.share(), others.share()) == (0.05, 0.0)


def test_a_stream_yields_each_object_and_then_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "print(json.dumps(spec)); print('noise'); print('{\"b\": 2}', flush=True); raise SystemExit('a bad day')"
    printed = list(stream_worker(_worker(tmp_path, monkeypatch, script), {"a": 1}, limit_s=60))
    assert printed == [{"a": 1}, {"b": 2}, {"error": "status 1: a bad day", "oom": False}]
    assert "a bad day" in capfd.readouterr().err


class Clock(threading.Timer):
    """A timer: the third one started is over at once, no other ever is."""

    started = 0
    running = 0

    def start(self) -> None:
        Clock.started, Clock.running = Clock.started + 1, Clock.running + 1
        if Clock.started == 3:
            self.function()

    def cancel(self) -> None:
        Clock.running = 0


def test_a_stream_with_a_limit_for_each_object_may_take_longer_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time between two objects, in which the caller waits for none, does not count."""
    script = "print('{\"a\": 1}', flush=True)\ninput()\nprint('{\"b\": 2}', flush=True)\ntime.sleep(600)"
    name = _worker(tmp_path, monkeypatch, script)
    monkeypatch.setattr(threading, "Timer", Clock)
    with contextlib.closing(stream_worker(name, {}, limit_s=5, prompts=iter([True, False]).__next__)) as stream:
        for printed in ({"a": 1}, {"b": 2}):
            assert next(stream) == printed
            assert Clock.running == 0
        assert next(stream) == {"error": "stopped after 5 s", "oom": False}
    assert Clock.started == 3


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    assert file.read_text(encoding="utf-8") == '{\n "a": 1\n}\n'
    assert [found.name for found in tmp_path.iterdir()] == ["x.json"]
