"""Text from outside the library: it is accepted, or refused with an error that names the option or the file."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from actoffload import OffloadConfig, Offloader, Plan, Profile
from actoffload.errors import ActOffloadError, ConfigError, TraceFileError, printable
from actoffload.planning.plan import PlanEntry
from actoffload.planning.profile import Link, Region, RegionSave, Storage
from actoffload.planning.search import Limits, best
from actoffload.tools.app import app
from actoffload.tools.report import render
from actoffload.tools.trace_file import load
from actoffload.tools.traced_run import look_at

T = TypeVar("T")

ESCAPES = "\x1b]0;pwned\x07\x1b[2J\n\r\x9b31m\u202e"
LONGEST_S = 5.0
"""A mutated profile of three storages is planned in milliseconds, also on a busy machine."""


@cache
def plan() -> str:
    entries = tuple(PlanEntry(index=n, nbytes=4096, action=("keep", "offload")[n % 2], module="m") for n in range(3))
    return Plan(entries, planner="auto", once=(0,), regions=2, predicted_step_s=0.5).to_json()


@cache
def profile() -> str:
    storages = tuple(
        Storage(index=n, nbytes=1 << 20, birth_s=n * 0.1, need_s=1.0 - n * 0.1, last_need_s=1.0 - n * 0.1)
        for n in range(3)
    )
    saves = (RegionSave(offset_s=0.1, nbytes=1 << 20),)
    region = Region(
        place=0, name="b", begin_s=0.1, end_s=0.3, again_s=0.6, recompute_s=0.2, backward_end_s=0.9, saves=saves
    )
    link = Link(write_bytes_per_s=1e9, read_bytes_per_s=1e9)
    return Profile(storages=storages, regions=(region,), disk=link, forward_s=0.5, backward_s=0.5).to_json()


COUNTERS = ("memory", "memory total", "memory with nothing moved", "host pool", "disk", "disk write")


@cache
def trace() -> str:
    def event(ph: str, name: str, ts: float, **more: Any) -> dict[str, Any]:
        return {"ph": ph, "name": name, "ts": ts, "pid": 1, "tid": 1, **more}

    about = {"base_ns": 10**18, "torch": "2.9", "machine": {}, "config": {"target": "nvme"}}
    events = [
        event("M", "actoffload", 0, args=about),
        event("M", "thread_name", 0, args={"name": "disk write #1"}),
        event("X", "forward", 1, dur=10, tid=2, args={"microbatch": 1}),
        event("X", "layer", 3, dur=4, args={"bytes": 4096, "tensors": [["layer", 4096]]}),
        event("X", "wait for data", 12, dur=1, tid=2, args={"module": "layer", "bytes": 4096}),
        *(event("C", name, 2, args={"bytes": 5.0, "bytes_per_s": 1.0, "can_do": 2.0}) for name in COUNTERS),
        event("X", "backward", 12, dur=10, tid=2, args={"microbatch": 1}),
        event("i", "degraded", 13, args={"module": "layer", "bytes": 1}),
    ]
    return json.dumps({"traceEvents": events, "otherData": {"elapsed_s": 1.0}})


ODD: list[Any] = [
    None, True, 0, -1, 1 << 40, 1 << 63, 10**400, 0.5, -0.0, 1e308, "", "a", ESCAPES, "\ud800", "9" * 400,
    [], [[]], {}, {"a": 1}, [None], [["a", 1]],
]  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += _places(item, (*path, key))
    return found


@st.composite
def mutated(draw: st.DrawFn, source: Callable[[], str]) -> str:
    """A text with some values exchanged, taken out or put in, or with some characters changed."""
    data = json.loads(source())
    for _ in range(draw(st.integers(1, 3))):
        places = _places(data)
        if not places:
            break
        *way, last = draw(st.sampled_from(places))
        owner = data
        for key in way:
            owner = owner[key]
        kind = draw(st.sampled_from(["exchange", "take out", "put in"]))
        if kind == "exchange":
            owner[last] = copy.deepcopy(draw(st.sampled_from(ODD)))
        elif kind == "take out":
            del owner[last]
        elif isinstance(owner, dict):
            key = draw(st.sampled_from(["odd", "args", "ts", "version", ESCAPES]))
            owner[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
        else:
            owner.insert(0, copy.deepcopy(draw(st.sampled_from(ODD))))
    text = json.dumps(data)
    if draw(st.integers(0, 9)) == 0:
        place = draw(st.integers(0, len(text) - 1))
        piece = draw(st.sampled_from(["", "[" * 3000, '{"a":' * 3000, "\0", "\ud800", "NaN", "é"]))
        text = text[:place] + piece + text[place + 1 :]
    return text


def _made(make: Callable[[], T], kind: type[Exception], name: str) -> T | None:
    """The result of ``make``; None if it raises an error of the kind, whose message has the name in it."""
    try:
        return make()
    except kind as error:
        reported = str(error)
    assert name in reported
    assert printable(reported) == reported
    return None


MANY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_the_originals_are_read(tmp_path: Path) -> None:
    assert Plan.from_json(plan()).to_json() == plan()
    assert Profile.from_json(profile()).to_json() == profile()
    (tmp_path / "t.json").write_text(trace())
    assert len(look_at(load(tmp_path / "t.json")).trace.transfers) == 1


@MANY
@given(text=mutated(plan))
def test_a_text_is_a_plan_or_an_error_that_names_the_policy(text: str) -> None:
    read = _made(lambda: Plan.from_json(text), ConfigError, "policy")
    if read is not None:
        assert Plan.from_json(read.to_json()) == read
        assert printable(read.summary()) == read.summary()


@MANY
@given(text=mutated(profile))
def test_a_text_is_a_profile_that_can_be_planned_or_an_error_that_names_it(text: str) -> None:
    read = _made(lambda: Profile.from_json(text), ConfigError, "profile")
    if read is None:
        return
    began_s = time.process_time()
    with contextlib.suppress(ActOffloadError):
        best(read, Limits(device_budget=1 << 20, tiers=("host", "nvme")))
    assert time.process_time() - began_s < LONGEST_S


@MANY
@given(text=mutated(trace))
def test_a_text_is_a_trace_or_an_error_that_names_the_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        _made(lambda: render(look_at(load(file))), TraceFileError, "run.json")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        done = CliRunner().invoke(app, ["report", str(file)])  # the notes on a run have no schema
        assert done.exit_code == 1
        assert "run.json: broken" in done.output


@pytest.mark.parametrize("read", [Plan.from_json, Profile.from_json])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "", "nul", "\ud800", '{"version": 1}'])
def test_endlessly_nested_text_is_refused(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(ConfigError):
        read(text)


def test_a_trace_writes_nothing_to_a_terminal_that_it_obeys(tmp_path: Path) -> None:
    def poison(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: poison(item) for key, item in value.items()}
        if isinstance(value, list):
            return [poison(item) for item in value]
        kept = ("M", "X", "C", "i", "actoffload", "thread_name", "forward", "backward", "nvme", *COUNTERS)
        return value + ESCAPES if isinstance(value, str) and value not in kept else value

    file = tmp_path / "run.json"
    file.write_text(json.dumps(poison(json.loads(trace()))))
    done = CliRunner().invoke(app, ["report", str(file)])
    assert done.exit_code == 0, done.output
    assert "pwned" in done.output
    assert {each for each in done.output if printable(each) != each} <= {"\n"}


class Bytes:
    def __fspath__(self) -> bytes:
        return b"/tmp"


VALUES: dict[str, Any] = {
    **{ascii(value)[:40]: value for value in ODD},
    "array": np.zeros(3),
    "array of one": np.array(["nvme"]),
    "array scalar": np.array(1),
    "int64": np.int64(5),
    "nan": float("nan"),
    "inf": float("inf"),
    "large": 10**5000,
    "308 digits": "9" * 308 + "GiB",
    "zero byte": "a\0b",
    "bytes": b"/tmp",
    "path of bytes": Bytes(),
    "full": "/dev/full",
    "share": "1e300%",
    "object": object(),
    "lambda": lambda: None,
}


@pytest.mark.parametrize("value", VALUES.values(), ids=[ascii(name) for name in VALUES])
def test_each_option_takes_a_value_or_names_itself(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some values are names of files
    os.mkfifo(tmp_path / "pipe")
    usual: dict[str, Any] = {"target": "nvme", "path": tmp_path, "engine": "posix", "announce": "none"}
    for name in OffloadConfig.__dataclass_fields__:
        for passed in (value, str(tmp_path / "pipe")):
            options = usual | {name: passed}
            made = _made(lambda: Offloader(OffloadConfig(**options)), ActOffloadError, name)  # noqa: B023 - called now
            if made is not None:
                made.close()
