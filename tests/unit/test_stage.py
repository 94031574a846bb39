"""Several micro-batches under way: whose tail stays, and what is fetched ahead across them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import Offloader
from actoffload.errors import ConfigError
from actoffload.events import EventKind, TraceEvent
from tests.harness import WAIT_S, MakeOffloader, assert_empty, same_bits

SAVES = 6
ROWS = 64 << 10


class _Pipeline:
    """Micro-batches of one forward, each of which saves `SAVES` tensors of 256 KiB."""

    def __init__(self, make_offloader: MakeOffloader, **options: Any) -> None:
        self.reads: list[int] = []
        self.offloader: Offloader = make_offloader(
            policy="greedy",
            trace=self._note,
            **({"keep_last_bytes": 2 * 4 * ROWS, "prefetch_bytes": 2 * 4 * ROWS} | options),
        )
        self.numbers: dict[int, tuple[int, int]] = {}
        self.kept: dict[int, int] = {}
        self.losses: dict[int, Tensor] = {}
        self.leaves: dict[int, Tensor] = {}
        self._forward = 0
        self._packs = 0

    def _note(self, event: TraceEvent) -> None:
        if event.kind is EventKind.PACK:
            self.numbers[event.record] = (self._forward, self._packs)
            self._packs += 1
        elif event.kind is EventKind.KEEP:
            self.kept[self._forward] = self.kept.get(self._forward, 0) + 1
        elif event.kind is EventKind.READ:
            self.reads.append(event.record)

    def forward(self, number: int, at_end: Callable[[], object] | None = None) -> None:
        self._forward, self._packs = number, 0
        x = torch.randn(ROWS, generator=torch.Generator().manual_seed(number)).requires_grad_()
        with self.offloader:
            y = x
            for _ in range(SAVES):
                y = (y * 1.25).sin()
            self.losses[number] = y.sum()
            if at_end is not None:
                at_end()
        self.leaves[number] = x
        self.offloader.synchronize()

    def backward(self, number: int) -> None:
        x = self.leaves.pop(number)
        self.losses.pop(number).backward()
        plain = x.detach().clone().requires_grad_()
        y = plain
        for _ in range(SAVES):
            y = (y * 1.25).sin()
        y.sum().backward()
        assert same_bits(x.grad, plain.grad)

    def step(self, schedule: str) -> None:
        for word in schedule.split():
            (self.forward if word[0] == "F" else self.backward)(int(word[1:]))

    def read_of(self, number: int) -> int:
        """How many records of a micro-batch have been read back, or will be with what is under way."""
        deadline_s = time.monotonic() + WAIT_S
        before = -1
        while time.monotonic() < deadline_s:
            found = sum(self.numbers[record][0] == number for record in self.reads)
            if found == before:
                return found
            before = found
            time.sleep(0.1)
        raise AssertionError("reads do not end")


@pytest.fixture
def make_pipeline(make_offloader: MakeOffloader) -> Callable[..., _Pipeline]:
    return lambda **options: _Pipeline(make_offloader, **options)


def test_a_tail_stays_only_where_its_own_backward_follows_at_once(make_pipeline: Callable[..., _Pipeline]) -> None:
    pipeline = make_pipeline()
    pipeline.step("F0 F1 B0 B1")
    pipeline.kept.clear()
    pipeline.step("F0 F1 B1 B0")  # as far as it agrees with the first: after F0 comes F1, after F1 comes B0
    assert pipeline.kept == {}
    pipeline.step("F0 F1 B1 B0")
    assert pipeline.kept == {1: 2}
    assert_empty(pipeline.offloader)


def test_hints_keep_the_tail_from_the_first_step_on(make_pipeline: Callable[..., _Pipeline]) -> None:
    pipeline = make_pipeline()
    stage = pipeline.offloader.stage
    for number in (0, 1):  # the last stage of a pipeline
        stage(number, "forward", next=(number, "backward"))
        pipeline.forward(number)
        stage(number, "backward", next=(number + 1, "forward"))
        pipeline.backward(number)
    assert pipeline.kept == {1: 2}  # of the first forward nobody knows where it ends
    pipeline.kept.clear()
    stage(0, "forward", next=(1, "forward"))
    pipeline.forward(0)
    stage(1, "forward", next=(0, "backward"))
    pipeline.forward(1)
    assert pipeline.kept == {}
    pipeline.backward(0)
    pipeline.backward(1)
    assert_empty(pipeline.offloader)


def test_the_next_backwards_tail_is_fetched_before_it_is_asked_for(make_pipeline: Callable[..., _Pipeline]) -> None:
    pipeline = make_pipeline(keep_last_bytes=0)
    pipeline.step("F0 F1 B0 B1")
    pipeline.reads.clear()
    pipeline.step("F0 F1")
    assert pipeline.read_of(0) == 2, "after F1 comes B0: its tail is fetched when F1 ends"
    pipeline.reads.clear()
    pipeline.backward(0)
    assert pipeline.read_of(1) == 2, "after B0 comes B1: its tail is fetched when nothing of B0 is left to fetch"
    pipeline.backward(1)
    assert_empty(pipeline.offloader)


def test_it_is_fetched_while_the_forward_before_it_still_runs(make_pipeline: Callable[..., _Pipeline]) -> None:
    pipeline = make_pipeline(keep_last_bytes=0)
    pipeline.step("F0 F1 B0 B1")
    pipeline.reads.clear()
    pipeline.forward(0)
    early: list[int] = []
    pipeline.forward(1, at_end=lambda: early.append(pipeline.read_of(0)))
    assert early == [2], "near the end of a forward as long as the last one"
    pipeline.step("B0 B1")


def test_a_forward_of_unknown_length_fetches_it_at_its_end(make_pipeline: Callable[..., _Pipeline]) -> None:
    pipeline = make_pipeline(keep_last_bytes=0)
    pipeline.offloader.stage(0, "forward")
    pipeline.forward(0)
    pipeline.offloader.stage(1, "forward", next=(0, "backward"))
    early: list[int] = []
    pipeline.forward(1, at_end=lambda: early.append(pipeline.read_of(0)))
    assert early == [0]
    assert pipeline.read_of(0) == 2
    pipeline.step("B0 B1")


def test_nothing_is_fetched_across_micro_batches_before_the_order_is_known(
    make_pipeline: Callable[..., _Pipeline],
) -> None:
    pipeline = make_pipeline(keep_last_bytes=0)
    pipeline.step("F0 F1")
    assert pipeline.reads == []
    pipeline.backward(0)
    assert pipeline.read_of(1) == 0
    pipeline.backward(1)


def test_a_hint_of_a_backward_fetches_its_tail_at_once(make_pipeline: Callable[..., _Pipeline]) -> None:
    pipeline = make_pipeline(keep_last_bytes=0)
    stage = pipeline.offloader.stage
    stage("a", "forward")
    pipeline.forward(0)
    stage("b", "forward")
    pipeline.forward(1)
    assert pipeline.reads == []
    stage("a", "backward", next=("b", "backward"))
    assert pipeline.read_of(0) == 2
    assert pipeline.read_of(1) == 0
    pipeline.backward(0)
    assert pipeline.read_of(1) == 2
    pipeline.backward(1)
    assert_empty(pipeline.offloader)


def test_what_is_fetched_across_micro_batches_obeys_the_budget(make_pipeline: Callable[..., _Pipeline]) -> None:
    budget = 4 * 4 * ROWS
    pipeline = make_pipeline(keep_last_bytes=0, prefetch_bytes=64 * 4 * ROWS, device_budget=budget)
    for _ in range(3):
        pipeline.step("F0 F1 F2 B0 B1 B2")
    assert pipeline.offloader.statistics().resident_peak_bytes <= budget
    assert_empty(pipeline.offloader)


def test_a_stage_inside_one_context_begins_a_tape_of_its_own(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    leaves = [torch.randn(ROWS).requires_grad_() for _ in range(3)]
    losses = []
    with offloader:
        for number, leaf in enumerate(leaves):
            offloader.stage(number, "forward")
            losses.append((leaf * 2).sin().sum())
            del leaf
    assert len(offloader.plan.entries) == 1
    for number, loss in enumerate(losses):
        offloader.stage(number, "backward")
        loss.backward()
    for leaf in leaves:
        assert same_bits(leaf.grad, (leaf.detach() * 2).cos() * 2)
    del losses, loss
    assert_empty(offloader)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"microbatch": 0, "direction": "sideways"}, "direction"),
        ({"microbatch": [], "direction": "forward"}, "microbatch"),
        ({"microbatch": 0, "direction": "forward", "next": 1}, "next"),
        ({"microbatch": 0, "direction": "forward", "next": (1, "up")}, "next"),
        ({"microbatch": 0, "direction": "forward", "next": ([], "forward")}, "next"),
    ],
)
def test_a_bad_hint_names_its_argument(make_offloader: MakeOffloader, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}="):
        make_offloader().stage(**arguments)
