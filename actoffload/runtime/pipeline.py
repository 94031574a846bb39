"""Prediction of the next forward or backward while several are under way, as in a pipeline. No torch, no clock.

A step consists of the phases from its first forward until none of its forwards is alive. The order of one step predicts
the next step for as long as both agree. A hint overrides the learned order.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import ConfigError
from .tape import Tape

Direction = Literal["forward", "backward"]

LONGEST_STEP = 4096
"""A step with more phases is abandoned: a forward of it stays alive for ever, and its order predicts nothing."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A forward or a backward, by the forward's number in its step."""

    direction: Direction
    number: int


@dataclass(frozen=True, slots=True)
class Hint:
    """A schedule's announcement of the phase that begins next, and of the phase after it."""

    key: Hashable
    direction: Direction
    next: tuple[Hashable, Direction] | None


class Phases:
    """The phases of this step so far and of the step before, and the next phase. A tape stands for its forward."""

    def __init__(self) -> None:
        self.changes = 0
        """Grows whenever the answers of `follows` and `expected_bytes` may have changed."""
        self._past: list[Phase] = []
        self._past_bytes: dict[int, int] = {}
        self._now: list[Phase] = []
        self._bytes: dict[int, int] = {}
        self._forwards: list[Tape[Any]] = []
        self._numbers: dict[Tape[Any], int] = {}
        self._keys: dict[Hashable, Tape[Any]] = {}
        self._agrees = False
        self._pending: Hint | None = None
        self._next: tuple[Hashable, Direction] | None = None

    def hint(self, hint: Hint) -> Tape[Any] | None:
        """Note the phase that begins next; return the forward of a backward, if it is known."""
        self._pending = hint
        self.changes += 1
        return self._keys.get(hint.key) if hint.direction == "backward" else None

    def begin_forward(self, forward: Tape[Any]) -> None:
        """Note that a forward has saved its first bytes."""
        if not any(other.live for other in self._forwards) or len(self._now) >= LONGEST_STEP:
            self._begin_step()
        number = len(self._forwards)
        self._forwards.append(forward)
        self._numbers[forward] = number
        hint = self._begin(Phase("forward", number))
        if hint is not None:
            self._keys[hint.key] = forward
        self.changes += 1

    def begin_backward(self, forward: Tape[Any]) -> None:
        """Note that backward has reached a forward's first record."""
        number = self._numbers.get(forward)
        if number is not None:  # else its step was abandoned
            self._bytes[number] = forward.total_bytes
            if self._pending is not None and self._keys.get(self._pending.key) is not forward:
                self._pending = None  # the hint is for the backward of another forward
            self._begin(Phase("backward", number))
            self.changes += 1

    def forget(self) -> None:
        """Drop all forwards, as the step was abandoned."""
        self._forwards.clear()
        self._numbers.clear()
        self._keys.clear()

    def follows(self) -> tuple[Direction, Tape[Any] | None] | None:
        """Return the direction of the next phase, and its forward if that has begun; None if unknown."""
        if self._next is not None:  # the schedule knows its order, the last step only suggests one
            key, direction = self._next
            return direction, self._keys.get(key) if direction == "backward" else None
        if not self._agrees or len(self._now) >= len(self._past):
            return None
        phase = self._past[len(self._now)]
        known = phase.direction == "backward" and phase.number < len(self._forwards)
        return phase.direction, self._forwards[phase.number] if known else None

    def expected_bytes(self, forward: Tape[Any]) -> int:
        """Return the bytes that a running forward will save in all, judged by the step before; 0 if unknown."""
        number = self._numbers.get(forward, -1)
        if number in self._past_bytes:
            return self._past_bytes[number]
        # The last step has no forward of this number: the most recent forward is the best guess.
        return next(reversed((self._bytes or self._past_bytes).values()), 0)

    def _begin(self, phase: Phase) -> Hint | None:
        place = len(self._now)
        self._agrees = self._agrees and place < len(self._past) and self._past[place] == phase
        self._now.append(phase)
        hint, self._pending = self._pending, None
        if hint is not None and hint.direction != phase.direction:
            hint = None
        self._next = None if hint is None else hint.next
        return hint

    def _begin_step(self) -> None:
        if self._bytes:  # else the step never reached backward, as in evaluation, and predicts nothing
            self._past, self._past_bytes = self._now, self._bytes
        self._now, self._bytes = [], {}
        self._forwards, self._numbers, self._keys = [], {}, {}
        self._agrees = bool(self._past)


def check_phase(direction_field: str, key_field: str, phase: tuple[Hashable, str]) -> None:
    """Check a phase that a user passed, in the fields with these names."""
    key, direction = phase
    if direction not in get_args(Direction):
        raise ConfigError(direction_field, direction, 'the direction is "forward" or "backward"')
    try:
        hash(key)
    except TypeError:
        remedy = "a micro-batch's key must be hashable, for example an int or a tuple"
        raise ConfigError(key_field, key, remedy) from None
