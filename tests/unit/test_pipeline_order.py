"""Several micro-batches under way: the order of a step's forwards and backwards, learned and hinted, and its use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import Offloader
from actoffload.errors import ConfigError
from actoffload.events import EventKind, TraceEvent
from actoffload.runtime.pipeline import LONGEST_STEP, Phases
from actoffload.runtime.tape import Tape
from tests.harness import MakeOffloader, assert_empty, lock_of, same_bits, states_of, wait_until


def _forward() -> Tape[Any]:
    """A forward that has saved a tensor."""
    tape: Tape[Any] = Tape()
    tape.append(None, 100)
    return tape


def _play(phases: Phases, schedule: str) -> list[str]:
    """Run a step such as ``"F0 F1 B0 B1"``; returns the prediction after each phase, ``-`` for none."""
    forwards: dict[int, Tape[Any]] = {}
    names: dict[int, int] = {}
    seen = []
    for word in schedule.split():
        number = int(word[1:])
        if word[0] == "F":
            forwards[number] = _forward()
            names[id(forwards[number])] = number
            phases.begin_forward(forwards[number])
        else:
            phases.begin_backward(forwards[number])
            forwards[number].live = 0
        follows = phases.follows()
        if follows is None:
            seen.append("-")
        else:
            direction, forward = follows
            seen.append(direction[0].upper() + ("" if forward is None else str(names[id(forward)])))
    return seen


ONE_F_ONE_B = "F0 F1 B0 F2 B1 F3 B2 B3"
GPIPE = "F0 F1 F2 B0 B1 B2"
REVERSED = "F0 F1 F2 B2 B1 B0"


@pytest.mark.parametrize("schedule", [ONE_F_ONE_B, GPIPE, REVERSED, "F0 B0"])
def test_the_second_step_is_known_from_the_first(schedule: str) -> None:
    phases = Phases()
    assert set(_play(phases, schedule)) == {"-"}
    expected = [
        word[0] if word[0] == "F" else word for word in schedule.split()[1:]
    ]  # no tape yet of a forward to come
    for _ in range(2):
        assert _play(phases, schedule) == [*expected, "-"]


def test_a_step_that_never_ends_is_given_up() -> None:
    phases = Phases()
    leaked = _forward()
    phases.begin_forward(leaked)
    phases.begin_backward(leaked)
    for _ in range(LONGEST_STEP):
        forward = _forward()
        phases.begin_forward(forward)
        phases.begin_backward(forward)
        forward.live = 0
    phases.begin_backward(leaked)  # its step was given up: nothing happens
    leaked.live = 0
    _play(phases, GPIPE)
    assert "-" not in _play(phases, GPIPE)[:-1]


# -- its use -----------------------------------------------------------------------------------------------------------


SAVES = 6
ELEMENTS = 64 << 10


class _Pipeline:
    """Micro-batches of one forward, each of which saves `SAVES` tensors of 256 KiB."""

    def __init__(self, make_offloader: MakeOffloader, **options: Any) -> None:
        self.reads: list[int] = []
        self.offloader: Offloader = make_offloader(
            policy="greedy",
            trace=self._note,
            **({"keep_last_bytes": 2 * 4 * ELEMENTS, "prefetch_bytes": 2 * 4 * ELEMENTS} | options),
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
        x = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(number)).requires_grad_()
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
        """Records of a micro-batch that have been read back, after all reads under way have ended."""
        wait_until(lambda: "fetching" not in states_of(self.offloader))
        with lock_of(self.offloader):  # the thread that reads notes a read before it lets go of the lock
            return sum(self.numbers[record][0] == number for record in self.reads)


MakePipeline = Callable[..., _Pipeline]


@pytest.fixture
def make_pipeline(make_offloader: MakeOffloader) -> MakePipeline:
    return partial(_Pipeline, make_offloader)


def test_a_tail_stays_only_where_its_own_backward_follows_at_once(make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline()
    pipeline.step("F0 F1 B0 B1")
    pipeline.kept.clear()
    pipeline.step("F0 F1 B1 B0")  # as far as it agrees with the first: after F0 comes F1, after F1 comes B0
    assert pipeline.kept == {}
    pipeline.step("F0 F1 B1 B0")
    assert pipeline.kept == {1: 2}
    assert_empty(pipeline.offloader)


def test_hints_keep_the_tail_from_the_first_step_on(make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline()
    stage = pipeline.offloader.stage
    for number in (0, 1):  # the last stage of a pipeline
        stage(number, "forward", next=(number, "backward"))
        pipeline.forward(number)
        stage(number, "backward", next=(number + 1, "forward"))
        pipeline.backward(number)
    assert pipeline.kept == {1: 2}  # the order of the first forward's end is unknown
    pipeline.kept.clear()
    stage(0, "forward", next=(1, "forward"))
    pipeline.forward(0)
    stage(1, "forward", next=(0, "backward"))
    pipeline.forward(1)
    assert pipeline.kept == {}
    pipeline.backward(0)
    pipeline.backward(1)
    assert_empty(pipeline.offloader)


def test_the_next_backwards_tail_is_fetched_before_its_unpack(make_pipeline: MakePipeline) -> None:
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


def test_prefetch_across_micro_batches_obeys_the_budget(make_pipeline: MakePipeline) -> None:
    budget = 4 * 4 * ELEMENTS
    pipeline = make_pipeline(keep_last_bytes=0, prefetch_bytes=64 * 4 * ELEMENTS, device_budget=budget)
    for _ in range(3):
        pipeline.step("F0 F1 F2 B0 B1 B2")
    assert pipeline.offloader.statistics().resident_peak_bytes <= budget
    assert_empty(pipeline.offloader)


def test_a_stage_inside_one_context_begins_a_tape_of_its_own(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    leaves = [torch.randn(ELEMENTS).requires_grad_() for _ in range(3)]
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
