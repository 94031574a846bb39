"""The order of forwards and backwards of a step, learned and hinted."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from actoffload.phases import LONGEST_STEP, Hint, Phases


@dataclass(eq=False)
class _Forward:
    live: int = 1
    total_bytes: int = 100


def _play(phases: Phases[_Forward], schedule: str, nbytes: dict[int, int] | None = None) -> list[str]:
    """Run a step such as ``"F0 F1 B0 B1"``; returns what was predicted after each phase, ``-`` where nothing was."""
    forwards: dict[int, _Forward] = {}
    names: dict[int, int] = {}
    seen = []
    for word in schedule.split():
        number = int(word[1:])
        if word[0] == "F":
            forwards[number] = _Forward(total_bytes=(nbytes or {}).get(number, 100))
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
    phases: Phases[_Forward] = Phases()
    assert set(_play(phases, schedule)) == {"-"}
    words = schedule.split()
    begun = [words[: place + 1] for place in range(len(words))]
    expected = [
        word[0] if word[0] == "F" else word  # a forward that comes has no tape yet
        for word, _ in zip(words[1:], begun, strict=False)
    ]
    assert _play(phases, schedule) == [*expected, "-"]
    assert _play(phases, schedule) == [*expected, "-"]


def test_a_step_that_takes_another_way_is_not_predicted_from_there_on() -> None:
    phases: Phases[_Forward] = Phases()
    _play(phases, "F0 F1 B0 B1")
    assert _play(phases, "F0 F1 B1 B0") == ["F", "B0", "-", "-"]
    assert _play(phases, "F0 F1 B1 B0") == ["F", "B1", "B0", "-"]


def test_a_forward_without_a_backward_teaches_nothing() -> None:
    phases: Phases[_Forward] = Phases()
    _play(phases, "F0 F1 B0 B1")
    evaluated = _Forward()
    phases.begin_forward(evaluated)
    evaluated.live = 0
    assert _play(phases, "F0 F1 B0 B1") == ["F", "B0", "B1", "-"]


def test_a_step_that_never_ends_is_given_up() -> None:
    phases: Phases[_Forward] = Phases()
    leaked = _Forward()
    phases.begin_forward(leaked)
    phases.begin_backward(leaked)
    for _ in range(LONGEST_STEP):
        forward = _Forward()
        phases.begin_forward(forward)
        phases.begin_backward(forward)
        forward.live = 0
    assert len(phases._now) <= LONGEST_STEP
    assert len(phases._forwards) <= LONGEST_STEP
    phases.begin_backward(leaked)  # of a step that was given up: nothing happens
    assert phases._numbers.get(id(leaked)) is None


def test_each_forward_is_expected_to_be_as_large_as_the_same_one_of_the_step_before() -> None:
    phases: Phases[_Forward] = Phases()
    first = _Forward()
    assert phases.expected_bytes(first) == 0
    phases.begin_forward(first)
    assert phases.expected_bytes(first) == 0
    phases.begin_backward(first)
    first.live = 0
    _play(phases, "F0 F1 B0 B1", {0: 10, 1: 30})
    forwards = [_Forward(), _Forward(), _Forward()]
    for forward in forwards:
        phases.begin_forward(forward)
    assert [phases.expected_bytes(forward) for forward in forwards] == [10, 30, 30]


def test_a_hint_goes_before_what_was_learned() -> None:
    phases: Phases[_Forward] = Phases()
    _play(phases, "F0 F1 B0 B1")
    first, second = _Forward(), _Forward()
    phases.hint(Hint("a", "forward", ("b", "forward")))
    phases.begin_forward(first)
    assert phases.follows() == ("forward", None)
    phases.hint(Hint("b", "forward", ("b", "backward")))
    phases.begin_forward(second)
    assert phases.follows() == ("backward", second)  # learned: the first one's
    assert phases.hint(Hint("b", "backward", ("a", "backward"))) is second
    phases.begin_backward(second)
    assert phases.follows() == ("backward", first)


def test_a_hint_of_another_phase_is_not_taken_for_this_one() -> None:
    phases: Phases[_Forward] = Phases()
    first, second = _Forward(), _Forward()
    phases.hint(Hint(0, "forward", None))
    phases.begin_forward(first)
    phases.hint(Hint(1, "forward", None))
    phases.begin_forward(second)
    phases.hint(Hint(0, "backward", (1, "backward")))
    phases.begin_backward(second)
    assert phases.follows() is None
    phases.hint(Hint(2, "forward", (0, "backward")))
    phases.begin_backward(first)
    assert phases.follows() is None


def test_a_key_of_an_earlier_step_is_forgotten() -> None:
    phases: Phases[_Forward] = Phases()
    phases.hint(Hint(0, "forward", None))
    _play(phases, "F0 B0")
    phases.begin_forward(_Forward())
    assert phases.hint(Hint(0, "backward", None)) is None
