"""Which forward or backward comes next when several are under way, as in a pipeline. Pure: no torch, no clock.

A step is the phases from the first forward until no forward of it is alive any more. The order of one step predicts the
next one's for as long as they agree; a hint for a phase goes before what was learned.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import ConfigError
from .tape import Tape

Direction = Literal["forward", "backward"]

LONGEST_STEP = 4096
"""Phases after which a step is given up: something of it stays alive for ever, and its order says nothing."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A forward or a backward, by the forward's number in its step."""

    direction: Direction
    number: int


@dataclass(frozen=True, slots=True)
class Hint:
    """What a schedule says of a phase that is about to begin, and of the one after it."""

    key: Hashable
    direction: Direction
    next: tuple[Hashable, Direction] | None


class Phases:
    """The phases of this step so far, those of the step before, and what follows. A tape stands for its forward."""

    def __init__(self) -> None:
        self.changes = 0
        """Grows whenever the answers of `follows` and `expected_bytes` may have changed."""
        self._past: list[Phase] = []
        self._past_bytes: dict[int, int] = {}
        self._now: list[Phase] = []
        self._bytes: dict[int, int] = {}
        self._forwards: list[Tape[Any]] = []
        self._numbers: dict[int, int] = {}
        self._keys: dict[Hashable, Tape[Any]] = {}
        self._agrees = False
        self._pending: Hint | None = None
        self._next: tuple[Hashable, Direction] | None = None

    def hint(self, hint: Hint) -> Tape[Any] | None:
        """A phase is about to begin; returns the forward that a backward belongs to, if it is known."""
        self._pending = hint
        self.changes += 1
        return self._keys.get(hint.key) if hint.direction == "backward" else None

    def begin_forward(self, forward: Tape[Any]) -> None:
        """A forward has saved its first bytes."""
        if not any(other.live for other in self._forwards) or len(self._now) >= LONGEST_STEP:
            self._begin_step()
        number = len(self._forwards)
        self._forwards.append(forward)
        self._numbers[id(forward)] = number  # of an object that `_forwards` keeps alive
        hint = self._begin(Phase("forward", number))
        if hint is not None:
            self._keys[hint.key] = forward
        self.changes += 1

    def begin_backward(self, forward: Tape[Any]) -> None:
        """Backward has asked for the first bytes of a forward."""
        number = self._numbers.get(id(forward))
        if number is not None:  # else it is of a step that was given up
            self._bytes[number] = forward.total_bytes
            if self._pending is not None and self._keys.get(self._pending.key) is not forward:
                self._pending = None  # the hint was of another one
            self._begin(Phase("backward", number))
            self.changes += 1

    def forget(self) -> None:
        """Hold no forward any more: the step was given up."""
        self._forwards.clear()
        self._numbers.clear()
        self._keys.clear()

    def follows(self) -> tuple[Direction, Tape[Any] | None] | None:
        """What comes after the phase that runs: its direction, and its forward if that has begun. None: not known."""
        if self._next is not None:
            key, direction = self._next
            return direction, self._keys.get(key) if direction == "backward" else None
        if not self._agrees or len(self._now) >= len(self._past):
            return None
        phase = self._past[len(self._now)]
        known = phase.direction == "backward" and phase.number < len(self._forwards)
        return phase.direction, self._forwards[phase.number] if known else None

    def expected_bytes(self, forward: Tape[Any]) -> int:
        """What a forward that runs will have saved at its end, judged by the step before; 0 when nothing is known."""
        number = self._numbers.get(id(forward))
        known = None if number is None else self._past_bytes.get(number)
        if known is not None:
            return known
        last = next(reversed(self._bytes.values()), None)
        return last if last is not None else next(reversed(self._past_bytes.values()), 0)

    def _begin(self, phase: Phase) -> Hint | None:
        place = len(self._now)
        self._agrees = self._agrees and place < len(self._past) and self._past[place] == phase
        self._now.append(phase)
        hint, self._pending = self._pending, None
        if hint is None or hint.direction != phase.direction:
            self._next = None
            return None
        self._next = hint.next
        return hint

    def _begin_step(self) -> None:
        if self._bytes:  # a step that never reached backward teaches nothing
            self._past, self._past_bytes = self._now, self._bytes
        self._now, self._bytes = [], {}
        self._forwards, self._numbers, self._keys = [], {}, {}
        self._agrees = bool(self._past)


def check_phase(direction_field: str, key_field: str, phase: tuple[Hashable, str]) -> None:
    """Refuse what is no phase.

    Raises:
        ConfigError: names the field, ``direction_field`` or ``key_field``.
    """
    key, direction = phase
    if direction not in get_args(Direction):
        raise ConfigError(direction_field, direction, 'the direction is "forward" or "backward"')
    try:
        hash(key)
    except TypeError:
        remedy = "a micro-batch's key must be hashable, for example an int or a tuple"
        raise ConfigError(key_field, key, remedy) from None
