"""Whether a storage that autograd saves may leave: module patterns, the policy, what backward wants back at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from .config import OffloadConfig
from .phases import Phases
from .planner import Plan
from .policy import Decision, KeepReason, ModuleFilter, Policy, TensorFacts
from .record import Record
from .schedule import Tape, Window

KEEP_LAST_SHARE = 16
_KEEP = Decision.KEEP.value
_OTHER = -1


class Lane(Protocol):
    """Does in C what `Placement.why_keep` would say, where that is known without asking."""

    def follow(self, reason: KeepReason, text: str, kept: Sequence[int], moved: Sequence[int]) -> None:
        """What stays from now on, and what moves; `Placement.why_keep` is asked of all else.

        Args:
            reason: why something stays.
            text: the reason's value.
            kept: by index on the tape: the bytes of the storage that stays there, -1 where none does.
            moved: the same of what moves.
        """

    def keep_all(self, reason: KeepReason, text: str) -> None:
        """All stays from now on, and why: as of `follow`."""

    def move_all(self) -> None:
        """All moves from now on."""

    def keep_nothing(self) -> None:
        """`Placement.why_keep` is asked of everything from now on."""


class Latest:
    """What was decided in the forward that saved last; where what a plan keeps is kept in C, that is its place.

    Attributes:
        decisions: of each storage its bytes, why it stays (None: it moves) and its module, in order.
    """

    decisions: list[tuple[int, KeepReason | None, str | None]] | None = None


class Placement:
    """Decides by the facts of one record and by what the last forward was like.

    Args:
        config: the options.
        window: how far backward is prefetched; no more than that is kept at the end of a forward by default.
        phases: what follows the forward that runs, and how much it will have saved.
    """

    def __init__(self, config: OffloadConfig, window: Window, phases: Phases[Tape[Record]]) -> None:
        self._config = config
        self._window = window
        self._phases = phases
        policy = config.policy
        # A plan is followed entry by entry instead.
        self._policy: Policy | None = None if isinstance(policy, str) or type(policy) is Plan else policy
        self._planned = KeepReason.PLAN if isinstance(policy, str) else KeepReason.POLICY
        self._filter = ModuleFilter(config.include, config.exclude)
        self._keeps_last = config.policy in ("auto", "greedy")
        self._plan: Plan | None = config.policy if isinstance(config.policy, Plan) else None
        self._keeps_all = False
        self._lane: Lane | None = None
        self.mismatched_bytes = 0
        """Bytes that a plan knew nothing of at their places; whoever looks at it sets it back."""

    @property
    def keep_all(self) -> bool:
        """Move nothing for now."""
        return self._keeps_all

    @keep_all.setter
    def keep_all(self, value: bool) -> None:
        self._keeps_all = value
        self._tell()

    def follow(self, plan: Plan | None) -> None:
        """Do as a plan says; None: as before there was one."""
        self._plan = plan
        self._tell()

    def attach(self, lane: Lane) -> None:
        """From now on a lane is told what is known, so that `why_keep` need not be asked."""
        self._lane = lane
        self._tell()

    def _tell(self) -> None:
        if self._lane is None or self._policy is not None or not self._filter.allows_all:
            return
        if self._keeps_all:
            self._lane.keep_all(KeepReason.PLAN, KeepReason.PLAN.value)
        elif self._plan is not None:
            entries = self._plan.entries
            kept = [entry.nbytes if entry.action == _KEEP else _OTHER for entry in entries]
            moved = [_OTHER if entry.action == _KEEP else entry.nbytes for entry in entries]
            self._lane.follow(self._planned, self._planned.value, kept, moved)
        elif self._keeps_last:
            self._lane.keep_nothing()
        else:
            self._lane.move_all()

    def why_keep(self, record: Record, tensor: Tensor, tape: Tape[Record]) -> KeepReason | None:
        """Why a record that was just added to ``tape`` stays, or None.

        Args:
            record: the storage.
            tensor: the view of it that was saved first.
            tape: the forward that it is saved in.
        """
        if not self._filter.allows(record.module):
            return KeepReason.EXCLUDED
        if self._policy is not None and self._policy.decide(_facts(record, tensor)) is Decision.KEEP:
            return KeepReason.POLICY
        if self._keeps_all:
            return KeepReason.PLAN
        entry = self._plan.entry(record.index, record.nbytes) if self._plan is not None else None
        if entry is not None:
            record.tier = entry.tier
            return self._planned if entry.action == _KEEP else None
        if self._plan is not None:
            self.mismatched_bytes += record.nbytes
        return KeepReason.LAST if self._keeps_last and self._is_last(tape) else None

    def following_bytes(self, record: Record) -> int | None:
        """What the forward saves after this record, as far as a plan says; None: no plan knows."""
        if self._plan is None or self._plan.entry(record.index, record.nbytes) is None:
            return None
        following = record.index + 1
        return self._plan.entries[following].nbytes if following < len(self._plan.entries) else 0

    def _is_last(self, tape: Tape[Record]) -> bool:
        """Whether the newest record of a tape is among the last, and its backward follows at once."""
        follows = self._phases.follows()
        if follows is not None and follows != ("backward", tape):
            return False  # in a pipeline: by the time of its backward others have run
        last = self._phases.expected_bytes(tape)
        tail = self._config.size("keep_last_bytes", min(last // KEEP_LAST_SHARE, self._window.nbytes))
        return last - tail < tape.total_bytes <= last  # beyond it: a longer forward, which goes on


def _facts(record: Record, tensor: Tensor) -> TensorFacts:
    return TensorFacts(
        nbytes=record.nbytes,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        module=record.module,
        index=record.index,
    )
