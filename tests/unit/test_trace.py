"""The trace of a run: the events that a callable receives, the file's contents, and its reader."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from actoffload.errors import ConfigError, TraceFileError
from actoffload.events import EventKind, TraceEvent
from actoffload.runtime.trace_writer import TraceWriter, writer_for
from actoffload.testing.gpt import GPT, GPTConfig
from actoffload.tools.trace_file import TraceFile, load
from actoffload.tools.traced_run import look_at
from tests.harness import WAIT_S, Chain, MakeOffloader, batch, descriptors, train_step
from tests.programs import warm_python

TENSOR_BYTES = 128 * 64 * 4
OTHERS_BYTES = 24 << 20


def test_a_callable_sees_every_event(make_offloader: MakeOffloader) -> None:
    events: list[TraceEvent] = []
    offloader = make_offloader(trace=events.append)
    train_step(Chain(), batch(), offloader, between=offloader.synchronize)
    offloader.close()
    kinds = Counter(event.kind for event in events)
    assert kinds[EventKind.PACK] == kinds[EventKind.RELEASE] == len({event.record for event in events})
    assert kinds[EventKind.WRITE] == kinds[EventKind.PACK]
    assert 0 < kinds[EventKind.READ] <= kinds[EventKind.WRITE]
    assert all(event.nbytes == TENSOR_BYTES and event.duration_s >= 0 for event in events)
    per_record: dict[int, list[EventKind]] = {}
    for event in events:
        per_record.setdefault(event.record, []).append(event.kind)
    for story in per_record.values():
        assert story[0] is EventKind.PACK
        assert story[-1] is EventKind.RELEASE


def _traced(make_offloader: MakeOffloader, file: Path, *, steps: int = 2, **options: Any) -> TraceFile:
    offloader = make_offloader(trace=file, **options)
    model = Chain()
    offloader.use(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        with offloader:
            loss = model(batch()).square().sum()
        offloader.synchronize()
        loss.backward()
        optimizer.step()
    offloader.close()
    return load(file)


def assert_nested(trace: TraceFile) -> None:
    """Spans of one track nest, or a viewer shows them wrong; times are rounded to nanoseconds."""
    ends: dict[str, list[float]] = {}
    for span in sorted((*trace.phases, *trace.waits, *trace.transfers), key=lambda span: (span.begin_s, -span.end_s)):
        around = ends.setdefault(span.track, [])
        while around and around[-1] <= span.begin_s + 1e-8:
            around.pop()
        assert not around or span.end_s <= around[-1] + 1e-8, f"two spans of {span.track} cross at {span.begin_s}"
        around.append(span.end_s)


def test_a_trace_has_phases_transfers_and_memory(make_offloader: MakeOffloader, tmp_path: Path) -> None:
    trace = _traced(make_offloader, tmp_path / "run.json")
    assert [phase.name for phase in trace.phases] == ["forward", "backward", "optimizer"] * 2
    assert [phase.microbatch for phase in trace.phases] == [1, 1, 1, 2, 2, 2]
    assert len(trace.steps()) == 2
    statistics = trace.metadata["statistics"]
    for way, counted in (("write", "nvme_written_bytes"), ("read", "nvme_read_bytes")):
        assert sum(moved.nbytes for moved in trace.transfers if moved.link == f"disk {way}") == statistics[counted] > 0
    modules = {module for moved in trace.transfers for module, _ in moved.tensors}
    assert modules == {"layers.1", "layers.2", "layers.3", None}  # None: the loss, outside of the model
    memory = trace.counters["memory"].series
    assert memory["parameters"][-1] > 0
    assert memory["gradients"][-1] == memory["parameters"][-1]
    assert memory["optimizer state"][-1] >= 2 * memory["parameters"][-1]
    assert {"config", "machine", "torch", "statistics", "spool"} <= trace.metadata.keys()


def test_bytes_and_processor_time_are_the_kernels(make_offloader: MakeOffloader, tmp_path: Path) -> None:
    """All that others have moved on the drive is beside ours, and another program's file is never ours."""
    offloader, model = make_offloader(trace=tmp_path / "run.json", policy="all"), Chain(width=512)
    before, used_s = psutil.Process().io_counters(), 0.0
    for _ in range(3):
        began_s = time.process_time()
        with offloader:
            loss = model(batch(2048, 512)).square().sum()
            sum(range(3_000_000))
        used_s += time.process_time() - began_s
        offloader.synchronize()
        loss.backward()
    with offloader, (tmp_path / "another").open("wb") as file:
        model(batch(64, 512))
        file.write(bytes(OTHERS_BYTES))
        os.fsync(file.fileno())
    after = psutil.Process().io_counters()
    offloader.close()
    trace = load(tmp_path / "run.json")
    run = look_at(trace)
    forwards = [(phase.begin_s, phase.end_s) for phase in trace.phases if phase.name == "forward"][:3]
    # A busy machine samples late.
    assert sum(sum(run.processor_s(*part)) for part in forwards) == pytest.approx(used_s, rel=0.2)
    links = {link["name"]: link for link in run.links()}
    if "drives" not in trace.counters or after.write_bytes - before.write_bytes < OTHERS_BYTES:
        pytest.skip("the kernel does not count what is written here")
    written = links["disk write"]
    assert written["nbytes"] == trace.metadata["statistics"]["nvme_written_bytes"] > 16 << 20
    assert written["nbytes"] + OTHERS_BYTES == pytest.approx(after.write_bytes - before.write_bytes, rel=0.05)
    assert links["disk read"]["nbytes"] == pytest.approx(after.read_bytes - before.read_bytes, rel=0.05)
    assert written["others_bytes"] > 0.95 * OTHERS_BYTES


def test_a_viewer_gets_rows_in_order(make_offloader: MakeOffloader, tmp_path: Path) -> None:
    _traced(make_offloader, tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    places = {names[e["tid"]]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    rows = sorted(places, key=lambda row: places[row])
    links = [row.partition(" #")[0] for row in rows if row.startswith("disk")]
    assert [rows[0], *dict.fromkeys(links)] == ["phases, main thread", "disk write", "disk read"]


def test_memory_is_sampled_while_nothing_is_saved(make_offloader: MakeOffloader, tmp_path: Path) -> None:
    offloader = make_offloader(trace=tmp_path / "run.json", policy="keep")
    model = Chain()
    offloader.use(model)
    with offloader:
        first = model.layers[0](batch())
        first.register_hook(lambda _: time.sleep(0.3))  # all but the first layer have their gradients by then
        loss = torch.nn.Sequential(*model.layers[1:])(first).sum()
    loss.backward()
    offloader.close()
    trace = load(tmp_path / "run.json")
    (backward,) = (phase for phase in trace.phases if phase.name == "backward")
    memory = trace.counters["memory"]
    within = [
        gradients
        for time_s, gradients in zip(memory.times_s, memory.series["gradients"], strict=True)
        if backward.begin_s < time_s < backward.end_s
    ]
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert any(0 < gradients < whole for gradients in within), within


class _Sample:
    """A sample of memory that begins, and ends only when it is let go on."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def rss_bytes(self) -> int:
        if threading.current_thread().name == "actoffload-trace-memory":
            self.begun.set()
            self.goes_on.wait(WAIT_S)
        return 1 << 30


@pytest.fixture
def slow_sample(monkeypatch: pytest.MonkeyPatch) -> _Sample:
    sample = _Sample()
    monkeypatch.setattr("actoffload.runtime.trace.rss_bytes", sample.rss_bytes)
    return sample


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_in_the_middle_of_a_sample_of_memory(
    make_offloader: MakeOffloader, tmp_path: Path, slow_sample: _Sample
) -> None:
    offloader = make_offloader(trace=tmp_path / "run.json", policy="keep")
    with offloader:
        assert slow_sample.begun.wait(WAIT_S)
        child = os.fork()
        if not child:
            signal.alarm(5)
            offloader.close()
            os._exit(0)
        slow_sample.goes_on.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


_ASKERS: set[str] = set()


def _asked(parameter: Any) -> Any:
    _ASKERS.add(threading.current_thread().name)
    own: Any = Tensor.grad
    return own.__get__(parameter)


_Watched: Any = type("_Watched", (nn.Parameter,), {"grad": property(_asked)})


def test_only_threads_that_make_gradients_read_them(make_offloader: MakeOffloader, tmp_path: Path) -> None:
    """Autograd assigns a parameter's gradient without a lock: another thread that reads it then may crash."""
    model = Chain(depth=8)
    model.extra = _Watched(torch.ones(8))
    offloader = make_offloader(trace=tmp_path / "run.json", policy="keep").use(model)
    for _ in range(3):
        train_step(model, batch(), offloader)
        time.sleep(0.05)  # for the thread that samples memory
    offloader.close()
    assert _ASKERS
    assert "actoffload-trace-memory" not in _ASKERS


def test_an_evaluation_after_the_last_step_is_no_step(make_offloader: MakeOffloader, tmp_path: Path) -> None:
    offloader, model = make_offloader(trace=tmp_path / "run.json", policy="keep"), Chain()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        with torch.no_grad(), offloader:
            model(batch())
        for _ in range(2):
            train_step(model, batch(), offloader)
        optimizer.step()
    with torch.no_grad(), offloader:
        model(batch())
    offloader.close()
    steps = load(tmp_path / "run.json").steps()
    assert len(steps) == 3
    assert [end_s for _, end_s in steps[:-1]] == [begin_s for begin_s, _ in steps[1:]]


def _run(file: Path, end: str, **environment: str) -> int:
    """Train a step in a process of its own, which attaches without `close` and ends with the statement ``end``."""
    program = f"""
import os, signal, time, torch, actoffload
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
actoffload.attach(model, target="nvme", trace={str(file)!r}, announce="none", policy="keep")
model(torch.ones(256, 256)).sum().backward()
{end}
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([warm_python(), "-c", program], check=False, env=environment).returncode


def test_a_killed_run_leaves_a_trace_marked_as_truncated(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert _run(file, "time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)") == -signal.SIGKILL
    with pytest.raises(TraceFileError, match=r"run\.json: truncated after \d+ events: .*truncated_ok=True"):
        load(file)
    trace = load(file, truncated_ok=True)
    assert trace.truncated
    assert [phase.name for phase in trace.phases] == ["forward", "backward"]
    assert "statistics" not in trace.metadata
    assert trace.metadata["config"]["policy"] == "keep"
    with file.open("r+b") as half:  # as if killed in the middle of the last event
        half.truncate(file.stat().st_size - 7)
    assert load(file, truncated_ok=True).phases


@pytest.mark.parametrize("until", ["the next write", "the end"])
def test_a_disk_that_is_full_leaves_a_trace_that_can_be_read(
    until: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may have room again when the trace ends."""
    file, write = tmp_path / "run.json", os.pwrite
    writer = TraceWriter(str(file), {"rank": 0})
    writer.open()

    def forwards(first: int) -> None:
        for number in range(first, first + 20):
            writer.span("phases, main thread", "forward", number, number + 0.5, {"microbatch": number})
        writer.flush()

    def full(fd: int, data: bytes, place: int) -> int:
        if place >= size + 300:
            raise OSError(errno.ENOSPC, "no space left on device")
        return write(fd, data[: size + 300 - place], place)

    forwards(0)
    size = file.stat().st_size
    monkeypatch.setattr(os, "pwrite", full)
    if until == "the next write":
        forwards(20)
        monkeypatch.undo()
    writer.close({"statistics": {}, "report": "x" * 200})
    monkeypatch.undo()
    trace = load(file, truncated_ok=True)
    assert 20 <= len(trace.phases) < 40
    assert trace.truncated


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        (None, "cannot be read"),
        ("no trace", "no trace .JSON is malformed"),
        ('{"a": 1}', "no trace .Object missing required field `traceEvents`"),
        ('{"traceEvents": [{"ph": "X", "name": "conv", "pid": 1, "ts": 1, "dur": 2}]}', "another program"),
    ],
)
def test_the_wrong_file_is_refused(text: str | None, reported: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(TraceFileError, match=rf"other\.json: .*{reported}"):
        load(file)


def test_arrows_of_an_earlier_version_are_left_out(make_offloader: MakeOffloader, tmp_path: Path) -> None:
    file, offloader = tmp_path / "run.json", make_offloader(trace=tmp_path / "run.json")
    train_step(Chain(), batch(), offloader)
    offloader.close()
    before = load(file)
    *events, last = file.read_text(encoding="utf-8").partition("\n],")[0].splitlines()
    arrows = [json.dumps({**json.loads(last), "ph": kind, "id": 1, "dur": None}) for kind in "sf"]
    rest = file.read_text(encoding="utf-8").partition("\n],")[2]
    file.write_text("\n".join([*events, f"{last},", ",\n".join(arrows)]) + "\n]," + rest, encoding="utf-8")
    after = load(file)
    assert (after.phases, after.transfers) == (before.phases, before.transfers)


def test_a_run_without_a_step_is_refused(make_offloader: MakeOffloader, tmp_path: Path) -> None:
    make_offloader(trace=tmp_path / "run.json").close()
    with pytest.raises(TraceFileError, match="empty: no forward ran"):
        load(tmp_path / "run.json")


def test_a_trace_has_the_clock_of_the_profiler(make_offloader: MakeOffloader, tmp_path: Path) -> None:
    """Both files' events lie on one time line: our forward is within the profiler's region around it."""
    offloader = make_offloader(trace=tmp_path / "run.json", policy="keep")
    model = Chain()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(2):
            with record_function("region"):
                loss = train_step(model, batch(), offloader)
        del loss
    offloader.close()
    load(tmp_path / "run.json")
    profiled.export_chrome_trace(str(tmp_path / "profile.json"))
    both = [json.loads((tmp_path / name).read_text(encoding="utf-8")) for name in ("run.json", "profile.json")]
    ours, theirs = (data["traceEvents"] for data in both)
    assert both[0]["baseTimeNanoseconds"] == both[1]["baseTimeNanoseconds"]
    region = [event for event in theirs if event.get("name") == "region" and event["ph"] == "X"][-1]
    slack = 500  # microseconds
    for name in ("forward", "backward"):
        phase = [event for event in ours if event["name"] == name][-1]
        assert region["ts"] - slack <= phase["ts"]
        assert phase["ts"] + phase["dur"] <= region["ts"] + region["dur"] + slack


def test_each_rank_has_a_file_of_its_own_and_ends_it_at_exit(tmp_path: Path) -> None:
    assert _run(tmp_path / "run.json", "", WORLD_SIZE="2", RANK="1") == 0
    trace = load(tmp_path / "run.rank1.json")
    assert trace.metadata["rank"] == 1
    assert trace.metadata["statistics"]["kept_bytes"]["policy"] > 0
    assert "\ndiagnosis: nothing moves, as policy='keep' says\n" in trace.metadata["report"]
    assert not (tmp_path / "run.json").exists()


def test_two_offloaders_share_a_file(make_offloader: MakeOffloader, tmp_path: Path) -> None:
    """The two follow each other, as after an interrupt, or run at the same time."""
    file, model = tmp_path / "run.json", Chain()
    first, second = (make_offloader(trace=file, policy=policy) for policy in ("keep", "greedy"))
    for offloader in (first, second):
        train_step(model, batch(), offloader)
        offloader.close()
    third = make_offloader(trace=file, policy="keep")
    train_step(model, batch(), third)
    third.close()
    assert [phase.name for phase in load(file).phases] == ["forward", "backward"] * 3


def test_a_file_that_was_deleted_is_begun_anew(make_offloader: MakeOffloader, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    for _ in range(2):
        offloader = make_offloader(trace=file, policy="keep")
        train_step(Chain(), batch(), offloader)
        offloader.close()
        assert [phase.name for phase in load(file).phases] == ["forward", "backward"]
        file.unlink()


def test_two_threads_that_close_an_offloader_end_its_part_of_a_file_once(
    make_offloader: MakeOffloader, tmp_path: Path, slow_sample: _Sample
) -> None:
    file = tmp_path / "run.json"
    first, second = make_offloader(trace=file, policy="keep"), make_offloader(trace=file, policy="keep")
    train_step(Chain(), batch(), first)
    assert slow_sample.begun.wait(WAIT_S)
    closing = [threading.Thread(target=first.close) for _ in range(2)]
    for thread in closing:
        thread.start()
    time.sleep(0.1)  # both wait for the end of the sample
    slow_sample.goes_on.set()
    for thread in closing:
        thread.join(WAIT_S)
    train_step(Chain(), batch(), second)
    second.close()
    assert [phase.name for phase in load(file).phases] == ["forward", "backward"] * 2


def test_a_model_with_a_sparse_buffer(make_offloader: MakeOffloader, tmp_path: Path) -> None:
    model = Chain()
    model.register_buffer("edges", torch.eye(4).to_sparse())
    offloader = make_offloader(trace=tmp_path / "run.json").use(model)
    train_step(model, batch(), offloader)
    offloader.close()
    assert load(tmp_path / "run.json").phases


def test_a_variable_that_names_no_file_is_refused(
    make_offloader: MakeOffloader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTOFFLOAD_TRACE", str(tmp_path / "missing" / "run.json"))
    files = descriptors()
    with pytest.raises(ConfigError, match=r"ACTOFFLOAD_TRACE.*directory does not exist"):
        make_offloader()
    assert descriptors() == files


def test_no_event_is_written_behind_the_end_of_the_file(tmp_path: Path) -> None:
    """A thread that is about to write waits for the lock meanwhile, and finds the file closed."""
    file = tmp_path / "run.json"
    writer = writer_for(str(file), {})
    late = threading.Thread(target=writer.flush)

    class Written:
        def __str__(self) -> str:  # runs while the writer makes the end of the file
            writer.instant("notes", "late", 0.0)
            late.start()
            return "known"

    writer.close({"known": Written()})
    late.join()
    assert json.loads(file.read_bytes())["otherData"]["known"] == "known"
    assert not writer.failed


def test_two_offloaders_of_one_step_write_its_phases_once(make_offloader: MakeOffloader, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    outer, inner = (make_offloader(trace=file, policy=policy) for policy in ("keep", "greedy"))
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(5):
        with outer:
            with inner:
                hidden = model(batch())
            loss = hidden.exp().square().sum()
        loss.backward()
        optimizer.step()
    outer.close()
    inner.close()
    trace = load(file)
    assert_nested(trace)
    assert [phase.name for phase in trace.phases] == ["forward", "forward", "backward", "optimizer"] * 5
    assert "2 offloaders" in look_at(trace).about()


def test_an_optimizer_that_raised_hides_no_later_step(make_offloader: MakeOffloader, tmp_path: Path) -> None:
    offloader, model = make_offloader(trace=tmp_path / "run.json", policy="keep"), Chain()
    optimizer = torch.optim.SGD(model.parameters())
    for number in range(3):
        train_step(model, batch(), offloader)
        if number == 0:
            with pytest.raises(ZeroDivisionError):
                optimizer.step(lambda: 1 / 0)
        optimizer.step()
    offloader.close()
    trace = load(tmp_path / "run.json")
    assert [phase.name for phase in trace.phases if phase.name == "optimizer"] == ["optimizer"] * 4
    assert len(trace.steps()) == 3


def test_a_backward_that_raised_has_an_end(make_offloader: MakeOffloader, tmp_path: Path) -> None:
    offloader = make_offloader(trace=tmp_path / "run.json", policy="keep")
    model = Chain()
    with offloader:
        loss = model(batch()).square().sum()
    first = next(model.parameters())
    hook = first.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()
    del loss
    train_step(model, batch(), offloader)
    offloader.close()
    assert [phase.name for phase in load(tmp_path / "run.json").phases] == ["forward", "backward"] * 2


def test_the_trace_of_a_program_is_valid_and_adds_up(make_offloader: MakeOffloader, tmp_path: Path) -> None:
    """An independent package also reads the file. `test_a_command_runs` has the command that traces a program."""
    chrometrace = pytest.importorskip("chrometrace")
    file, model = tmp_path / "run.json", GPT(GPTConfig(layers=4, width=256, seq=128))
    offloader = make_offloader(trace=file, policy="auto", min_bytes=None).use(model)
    optimizer, tokens = torch.optim.AdamW(model.parameters()), torch.randint(0, 256, (4, 129))
    for _ in range(4):
        with offloader:
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    offloader.close()
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    for event in events:
        read = chrometrace.TraceEvent.from_dict(event)
        letter = {"i": "I"}.get(read.event_type, read.event_type)  # the package knows an older letter for instants
        assert chrometrace.TraceEventType(letter)
        assert isinstance(read.process_id, int)
        assert read.duration_us >= 0
        assert read.timestamp_us > 0 or letter == "M"
    trace = load(file)
    assert_nested(trace)
    assert [phase.name for phase in trace.phases] == ["forward", "backward", "optimizer"] * 4
    total, memory = trace.counters["memory total"].series["bytes"], trace.counters["memory"].series
    for place, measured in enumerate(total):
        assert abs(sum(values[place] for values in memory.values()) - measured) <= 0.02 * measured
    assert {"parameters", "gradients", "optimizer state", "other"} <= memory.keys()
    # On a loaded machine no sample may fall into the milliseconds in which one certain block holds its tensors.
    assert any(name.startswith("saved by stack.blocks.") for name in memory)
    assert trace.metadata["predicted"]["step_s"] > 0
