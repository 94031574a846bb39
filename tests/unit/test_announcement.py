"""The one line at the end of the first forward: what it says, when, and to whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from actoffload import Offloader
from actoffload.errors import ConfigError
from tests.harness import Chain, MakeOffloader, batch


def _step(offloader: Offloader, model: Chain) -> None:
    with offloader:
        loss = model(batch()).sum()
    loss.backward()


def test_it_says_once_what_is_active_what_moves_and_what_stays(make_offloader: MakeOffloader, tmp_path: Any) -> None:
    lines: list[str] = []
    offloader = make_offloader(announce=lines.append, min_bytes=33 << 10, engine="posix")
    model = Chain(width=64)
    with offloader:
        loss = model(batch(256)).sum() + model(batch(4)).sum()
    (line,) = lines
    loss.backward()
    _step(offloader, model)
    assert lines == [line]
    assert line.startswith(f"actoffload: target nvme ({tmp_path}: posix engine, direct I/O): the first forward saved ")
    statistics = offloader.statistics()
    assert statistics.kept_bytes["below min_bytes"] > 0
    assert " moves, " in line
    assert "below min_bytes)" in line
    assert "of parameters, buffers and inputs never moves" in line
    assert "rank" not in line


def test_it_says_when_nothing_moves_and_what_to_look_at(make_offloader: MakeOffloader) -> None:
    lines: list[str] = []
    _step(make_offloader(announce=lines.append, min_bytes="1GiB"), Chain())
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
    _step(offloader, model)
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("announce", "rank", "said"),
    [("first", "0", True), ("first", "1", False), ("all", "1", True), ("none", "0", False)],
)
def test_who_says_it(
    make_offloader: MakeOffloader,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    announce: str,
    rank: str,
    said: bool,
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    _step(make_offloader(announce=announce), Chain())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("actoffload: target nvme") == said
    assert captured.err.endswith(f"[rank {rank} of 2]\n") == said


@pytest.mark.parametrize("announce", ["second", None, 1])
def test_another_value_is_refused(make_offloader: Callable[..., Offloader], announce: Any) -> None:
    with pytest.raises(ConfigError, match=r"^announce="):
        make_offloader(announce=announce)
