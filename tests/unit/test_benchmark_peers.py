"""Modes and peers give the same gradients and leave the model as it was; the CPU benchmarks' numbers and bounds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from actoffload.analysis import workers
from benchmarks import e2e_cpu, harness, peer_aio, peers_cpu, turns
from benchmarks.peers import Unavailable
from benchmarks.worker import Run

SPEC = {
    "model": "gpt",
    "gpt": {"layers": 2, "width": 64, "seq": 64, "vocab": 32},
    "batch": 2,
    "device": "cpu",
    "dtype": "float32",
    "mode": "keep",
    "options": {"min_bytes": 0},
}


class FakeHandle:
    """DeepSpeed's handle, as far as it is used: what was begun is done when somebody waits."""

    def __init__(self, *_: Any) -> None:
        self.begun: list[tuple[bool, Tensor, str, int]] = []

    def new_cpu_locked_tensor(self, count: int, like: Tensor) -> Tensor:
        return torch.full((count,), 0xAB, dtype=like.dtype)

    def async_pwrite(self, buffer: Tensor, file: str, offset: int) -> int:
        self.begun.append((True, buffer, file, offset))
        return 0

    def async_pread(self, buffer: Tensor, file: str, offset: int) -> int:
        assert Path(file).stat().st_size >= offset + len(buffer)
        self.begun.append((False, buffer, file, offset))
        return 0

    def wait(self) -> int:
        assert self.begun, "DeepSpeed's handle ends the process here"
        for write, buffer, file, offset in self.begun:
            fd = os.open(file, os.O_RDWR | os.O_CREAT)
            memory = buffer.numpy().data
            moved = os.pwrite(fd, memory, offset) if write else os.preadv(fd, [memory], offset)
            assert moved == len(buffer)
            os.close(fd)
        self.begun.clear()
        return 1


@pytest.fixture
def aio(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        aio_handle = FakeHandle

    monkeypatch.setattr(peer_aio, "load_library", Library)
    monkeypatch.setattr(peer_aio, "LEAST_BYTES", 4096)
    monkeypatch.setattr(peer_aio, "WINDOW_BYTES", 1 << 20)


@pytest.mark.parametrize("name", ["recompute", "nvme, all", "save_on_cpu", "torch.save", "aio_handle"])
def test_each_mode_gives_the_same_gradients(name: str, tmp_path: Path, aio: None) -> None:
    expected = Run(SPEC).first_step()
    run = Run({**SPEC, "path": str(tmp_path)})
    before = [dict(vars(module)) for module in run.model.modules()]
    # No disk: a slow one would finish nothing before backward asks for it.
    peer = run.open(name, {"engine": "memory"})
    assert [run.first_step() for _ in range(3)] == [expected] * 3
    if name in ("nvme, all", "torch.save", "aio_handle"):
        for _ in range(100):  # on a busy machine backward asks before much is written
            facts = peer.facts()
            if facts["written_bytes"] > 1 << 20:
                break
            assert run.first_step() == expected
        assert facts["written_bytes"] > 1 << 20
        assert facts["read_bytes"] >= facts["written_bytes"] * 0.5
    run.close()
    assert list(tmp_path.iterdir()) == []
    assert [module.keys() for module in before] == [vars(module).keys() for module in run.model.modules()]
    run.open("keep")
    assert run.first_step() == expected


def test_handles_read_each_tensor_once_and_use_memory_again(tmp_path: Path, aio: None) -> None:
    run = Run({**SPEC, "path": str(tmp_path)})
    peer: Any = run.open("aio_handle")
    run.step()
    buffers, end = sum(map(len, peer.buffers.values())), peer.end
    assert peer.read_bytes == peer.written_bytes
    run.step()
    assert (sum(map(len, peer.buffers.values())), peer.end) == (buffers, end)
    run.close()


@pytest.mark.parametrize("name", ["TRL", "Megatron"])
def test_peers_that_need_an_accelerator_say_so(name: str) -> None:
    with pytest.raises(Unavailable, match="needs"):
        Run(SPEC).open(name)


@pytest.mark.parametrize("name", sorted(e2e_cpu.cases(True)))
def test_every_case_trains(name: str) -> None:
    pytest.importorskip("transformers")
    run = Run(SPEC | e2e_cpu.cases(True)[name])
    run.make_static()
    assert run.static_bytes > 1 << 20
    run.open("recompute")
    recomputed = run.first_step()
    run.open("keep")
    assert run.first_step() == recomputed
    assert float.fromhex(run.losses[0]) > 0


TURNING = """
import json, sys
spec = json.loads(sys.argv[1])
def note(what):
    open(spec["log"], "a").write(f"{spec['name']} {what},")
assert spec["in_turns"]
if spec["name"] == "fails at once":
    raise SystemExit("a bad day")
if spec["name"] == "not here":
    print(json.dumps({"unavailable": "no headers"}))
    raise SystemExit
note("warm")
print(json.dumps({"turn": 0}), flush=True)
step_s = []
for _ in sys.stdin:
    note("begins")
    if spec["name"] == "fails in a turn":
        raise SystemExit("a bad turn")
    step_s.append(len(step_s) + 1.0)
    note("ends")
    print(json.dumps({"turn": len(step_s)}), flush=True)
print(json.dumps({"step_s": step_s, "median_step_s": 1.5, "peak_rss_bytes": 1 << 20}))
"""
"""A worker that notes when its steps begin and end."""


def _sample(median_s: float, rss: int = 2000, **more: Any) -> harness.Sample:
    facts = {
        "step_s": [median_s],
        "median_step_s": median_s,
        "peak_rss_bytes": rss,
        "static_rss_bytes": 100,
        "others_cpu_share": 0.0,
    }
    trace = {"losses": ["0x1p+0"], "first_gradients": "a", "last_parameters": "b"}
    counted = {"statistics": {"baseline_peak_bytes": 1000, "resident_peak_bytes": 200}}
    used = {"system_s_per_step": median_s / 10, "page_faults_per_step": rss * 10}
    return facts | trace | counted | used | {"written_bytes_per_step": 900.0, "wait_s_per_step": 0.5} | more


def test_the_summary_and_the_bounds_of_e2e() -> None:
    row = e2e_cpu.summarise([_sample(2.0)] * 2, [_sample(1.75, 1900)] * 2, [_sample(2.1, 1300)] * 2)
    assert row["gone_share"] == pytest.approx(0.7)
    assert row["offload_above_static_bytes"] == 1200
    assert row["page_faults_per_step"] == {"keep": 20000, "keep, same memory": 19000, "default": 13000}
    table = e2e_cpu.render({"gpt": row})
    assert "| gpt | 1.050 (1.05 to 1.05) | 1.200 (1.20 to 1.20) | 2.00 | 0.20 | 0.17 | 0.21 | 20,000 |" in table
    bounds = e2e_cpu.bounds({"gpt": row, "gpt, layers × 2": row | {"ratio": 0.9, "moving": 1.22}})
    assert {bound.what: (round(bound.measured or 0, 6), bound.holds) for bound in bounds} == {
        "gpt: saved bytes gone from peak RSS": (0.7, True),
        "gpt: step time / keep's": (1.05, True),
        "gpt, layers × 2: change of the step time / keep's": (0.15, False),  # smaller is a change as well
        "gpt: step time / keep's in the same memory": (1.2, False),
        "gpt, layers × 2: change of the step time / keep's in the same memory": (0.02, True),
    }
    assert e2e_cpu.bounds({"bert": row}) == []


def test_a_ratio_is_taken_within_each_turn() -> None:
    # The machine becomes three times slower after the first turn: medians of all steps would give 1.2 and 1.5.
    keep = [_sample(0.0, step_s=[2.0, 6.0, 6.0])]
    ours = [_sample(0.0, step_s=[2.4, 7.2, 6.6])]
    assert turns.ratios(ours, keep) == [pytest.approx(1.2)]
    assert turns.ratios([*ours, _sample(9.0)], [*keep, _sample(6.0)]) == [pytest.approx(1.2), pytest.approx(1.5)]
    with pytest.raises(ValueError, match="shorter"):
        turns.ratios(ours, [_sample(2.0)])
    assert turns.spread([1.2]) == "1.200"
    assert turns.spread([1.2, 0.9, 1.0]) == "1.000 (0.90 to 1.20)"


def test_workers_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Each step of one ends before the next begins; a worker that fails, or is not to be had, holds nobody up."""
    (tmp_path / "turning.py").write_text(TURNING, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(harness.ROOT)]))
    monkeypatch.setattr(turns, "WORKER", "turning")
    log = tmp_path / "log"
    names = ("a", "fails at once", "fails in a turn", "not here", "b")
    group = {name: {"name": name, "log": str(log), "steps": 2} for name in names}
    seen: list[list[str]] = []
    samples = turns.take_rounds([group], 1, limit_s=60, after_round=lambda taken: seen.append(list(taken)))
    said = log.read_text(encoding="utf-8").split(",")
    ready = ["a warm", "fails in a turn warm", "b warm"]
    first = ["a begins", "a ends", "fails in a turn begins", "b begins", "b ends"]
    assert said == [*ready, *first, "b begins", "b ends", "a begins", "a ends", ""]
    assert samples["a"][0]["step_s"] == [1.0, 2.0]
    assert 0 <= samples["a"][0]["others_cpu_share"] <= 1
    assert "a bad day" in samples["fails at once"][0]["error"]
    assert "a bad turn" in samples["fails in a turn"][0]["error"]
    assert samples["not here"][0]["unavailable"] == "no headers"
    assert samples["b"][0]["step_s"] == [1.0, 2.0]
    assert seen == [list(names)]
    assert "not here: no headers" in capfd.readouterr().out


def test_workers_end_with_who_asked_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "turning.py").write_text(TURNING, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(harness.ROOT)]))

    def interrupt(name: str, said: harness.Sample) -> None:
        if said.get("turn"):
            raise KeyboardInterrupt

    specs = {name: {"name": name, "log": str(tmp_path / "log"), "in_turns": True} for name in ("a", "b")}
    before = psutil.Process().children()
    with pytest.raises(KeyboardInterrupt):
        workers.take_turns("turning", specs, 1, limit_s=60, on_said=interrupt)
    assert set(psutil.Process().children()) <= set(before)


@pytest.mark.parametrize("key", ["losses", "first_gradients", "last_parameters"])
def test_one_bit_makes_a_difference(key: str) -> None:
    other = _sample(2.0) | {key: ["0x1.8p+0"] if key == "losses" else "c"}
    same = [_sample(2.0)]
    assert e2e_cpu.summarise(same, same, [other])["identical"] is False
    assert e2e_cpu.summarise(same, [other], same)["identical"] is False
    assert peers_cpu.summarise({"keep": [_sample(2.0)], "all": [other]})["all"]["identical"] is False


def test_the_summary_of_peers() -> None:
    samples = {
        "keep": [_sample(2.0)],
        "default": [_sample(2.1, 1300)],
        "torch.save": [_sample(4.2)],
        "aio_handle": [{"mode": "aio_handle", "unavailable": "no headers", "others_cpu_share": 0.0}],
    }
    summary = peers_cpu.summarise(samples)
    assert summary["default"]["above_static_bytes"] == 1200
    assert summary["aio_handle"] == {"why": "no headers"}
    (bound,) = peers_cpu.bounds(summary)
    assert bound.measured == pytest.approx(2.0)
    assert bound.holds
    table = peers_cpu.render(summary)
    assert "Not measured: aio_handle: no headers" in table
    assert "| torch.save | 2.100 |" in table


@pytest.mark.slow
def test_the_cpu_benchmarks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(peers_cpu, "NAMES", ("keep", "all"))
    monkeypatch.setattr(peers_cpu, "bounds", lambda summary: [])
    arguments = ["--tiny", "--rounds", "1", "--steps", "1", "--path", str(tmp_path)]
    assert e2e_cpu.main([*arguments, "--cases", "gpt"]) == 0, capsys.readouterr().out
    assert peers_cpu.main(arguments) == 0, capsys.readouterr().out
    (e2e,) = tmp_path.glob("e2e_cpu_*.json")
    (peers,) = tmp_path.glob("peers_cpu_*.json")
    written = json.loads(e2e.read_text(encoding="utf-8"))
    assert written["summary"]["gpt"]["identical"] is True
    assert [written["samples"][f"gpt/{mode}"][0].get("written_bytes_per_step") for mode in e2e_cpu.MODES[:2]] == [
        None,
        0,
    ]
    # Perhaps nothing: the kernel counts in ticks, of which such a step may see none.
    assert written["samples"]["gpt/default"][0]["system_s_per_step"] >= 0
    assert written["samples"]["gpt/default"][0]["page_faults_per_step"] >= 0
    rows = json.loads(peers.read_text(encoding="utf-8"))["summary"]
    assert [row["identical"] for row in rows.values()] == [True, True]
    assert rows["all"]["written_bytes_per_step"] > 0
    assert str(tmp_path) not in e2e.read_text(encoding="utf-8") + peers.read_text(encoding="utf-8")
