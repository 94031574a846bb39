"""Messages of an offloader: the line after the first forward, ``explain()``, advice, and logging."""

from __future__ import annotations

import errno
import gc
import io
import logging
import re
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import actoffload
from actoffload.runtime.tape import MANY, SavedByNode
from tests.harness import Chain, MakeOffloader, assert_same_gradients, batch, train_step


def test_one_line_has_the_target_and_the_bytes_that_move_and_stay(make_offloader: MakeOffloader, tmp_path: Any) -> None:
    lines: list[str] = []
    offloader = make_offloader(announce=lines.append, min_bytes=33 << 10, engine="posix")
    model = Chain(width=64)
    with offloader:
        loss = model(batch(256)).sum() + model(batch(4)).sum()
    (line,) = lines
    loss.backward()
    train_step(model, batch(), offloader)
    assert lines == [line]
    assert line.startswith(f"actoffload: target nvme ({tmp_path}: posix engine, direct I/O): the first forward saved ")
    statistics = offloader.statistics()
    assert statistics.kept_bytes["below min_bytes"] > 0
    assert " moves, " in line
    assert "below min_bytes)" in line
    assert "of parameters, buffers and inputs never moves" in line
    assert "rank" not in line


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_last_line_is_of_the_whole_run_and_keeps_nothing_alive(tmp_path: Path, interrupted: bool) -> None:
    """The offloader goes with its model, and its store with it; the line is written then."""
    lines: list[str] = []
    model = Chain()
    attachment = actoffload.attach(
        model, target="nvme", path=str(tmp_path), min_bytes=1024, policy="all", announce=lines.append
    )
    for _ in range(2):  # as two forward steps of Megatron with equal options do, which share an offloader
        attachment.offloader.sum_up(at_end=True)
    for number in range(4):
        model(batch(256)).square().sum().backward()
        if interrupted and number == 1:  # by Ctrl-C: a new store takes its place, and its counts begin anew
            attachment.offloader.store.abort_if_interrupted(KeyboardInterrupt())
    offloader, store = weakref.ref(attachment.offloader), weakref.ref(attachment.offloader.store)
    del attachment, model
    gc.collect()
    assert offloader() is None
    for thread in threading.enumerate():
        if thread.name.startswith(("actoffload-last-line", "actoffload-close")):
            thread.join(60)
    assert store() is None
    assert re.fullmatch(r"actoffload: [24] forward passes: activations' peak .*iB, .*; details: .*", lines[-1])
    assert sum("; details: " in line for line in lines) == 1
    assert ("2 forward" in lines[-1]) == interrupted


class _Gone(io.StringIO):
    """The standard error of a program whose terminal was closed."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("stream", [_Gone(), None, "closed", "ascii"])
def test_a_line_that_nobody_can_read_ends_no_training(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stream: Any
) -> None:
    if isinstance(stream, str):
        closed, stream = stream == "closed", io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        if closed:
            stream.close()
    offloader = make_offloader(announce="first")
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("actoffload.autograd.offloader.announcement", lambda facts: "actoffload: päth")
    model = Chain()
    expected = train_step(model, batch())
    assert_same_gradients(train_step(model, batch(), offloader), expected)
    assert capsys.readouterr().out == "", "nor does it go elsewhere"


def test_announce_none_writes_nothing(make_offloader: MakeOffloader, capfd: pytest.CaptureFixture[str]) -> None:
    offloader = make_offloader(announce="none")
    train_step(Chain(), batch(), offloader)
    offloader.sum_up()
    assert capfd.readouterr() == ("", "")


def test_the_line_has_a_remedy_when_nothing_moves(make_offloader: MakeOffloader) -> None:
    lines: list[str] = []
    train_step(Chain(), batch(), make_offloader(announce=lines.append, min_bytes="1GiB"))
    (line,) = lines
    assert "nothing moves (" in line
    assert "below min_bytes): lower min_bytes, or check target, devices and policy" in line


def test_a_pass_without_gradients_and_a_failed_one_are_not_the_first_forward(make_offloader: MakeOffloader) -> None:
    lines: list[str] = []
    offloader = make_offloader(announce=lines.append)
    model = Chain()
    with torch.no_grad(), offloader:
        model(batch())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), offloader:
        model(batch(width=3))
    assert lines == []
    train_step(model, batch(), offloader)
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("announce", "rank", "printed"),
    [("first", "0", True), ("first", "1", False), ("all", "1", True)],
)
def test_announce_selects_the_ranks(
    make_offloader: MakeOffloader,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    announce: str,
    rank: str,
    printed: bool,
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    train_step(Chain(), batch(), make_offloader(announce=announce))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("actoffload: target nvme") == printed
    assert captured.err.endswith(f"[rank {rank} of 2]\n") == printed


def test_explain_names_each_tensor_on_request(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(include="layers.0", min_bytes="16KiB")
    assert offloader.explain() == "actoffload (target nvme): no forward has saved anything yet."
    model = Chain(depth=2)
    offloader.use(model)
    with offloader:
        loss = model(batch()).sum()
    text = offloader.explain()
    assert text.startswith("1 forward pass: activations' peak ")
    assert text.splitlines()[-1].startswith("last forward: ")
    assert "keep (module excluded)" not in text
    assert "keep (module excluded)" in offloader.explain(tensors=True)
    loss.backward()
    assert "storage engine posix, direct I/O" in offloader.report()


# -- where one autograd node saves most of a forward, as a compiled graph does -----------------------------------------


def bursts(*nodes: tuple[int, int]) -> SavedByNode:
    """Nodes one after the other, each with a number of storages of equal size."""
    seen = SavedByNode()
    for number, (count, nbytes) in enumerate(nodes):
        for index in range(count):
            assert seen.saved(number, nbytes) == (index + 1 >= MANY)
            assert seen.node_bytes == (index + 1) * nbytes
    return seen


@pytest.mark.parametrize(
    ("nodes", "most"),
    [
        ([(20, 100), (1, 1900)], 2000),
        ([(20, 100), (1, 2000)], 0),  # half, not more
        ([(MANY - 1, 100)], 0),
        ([(MANY, 100)], 100 * MANY),
        ([], 0),
    ],
)
def test_only_a_burst_of_more_than_half_counts(nodes: list[tuple[int, int]], most: int) -> None:
    assert bursts(*nodes).most_of(sum(count * nbytes for count, nbytes in nodes)) == most


# -- logging -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_plans_and_failures_are_logged(make_offloader: MakeOffloader, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "actoffload")
    offloader = make_offloader(policy="auto", min_bytes="16KiB", nvme_budget="64KiB")
    model = Chain(depth=8)
    for _ in range(4):
        train_step(model, batch(256), offloader)
    levels = {record.getMessage().split(":")[0]: record.levelname for record in caplog.records}
    assert levels["no room on disk"] == "WARNING"
    assert levels["plan"] == "INFO"


def test_logging_is_quiet_unless_the_program_asks_for_it() -> None:
    """Without a handler of the library's own, `logging` would print warnings to stderr."""
    assert [type(handler) for handler in logging.getLogger("actoffload").handlers] == [logging.NullHandler]
