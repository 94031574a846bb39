"""Notes one step as it runs and makes its `Profile`: what is saved when and for how long, and how long all takes."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from ..planning.profile import Block, Profile, Storage
from ..policy import KeepReason
from ..tiers.record import Record
from ..tiers.timers import Stamp, Stopwatch

FREE_TO_MOVE = (KeepReason.LAST, KeepReason.PRESSURE, KeepReason.PLAN, KeepReason.FITS, KeepReason.NO_TIME)
"""Reasons of one step only: what stayed for one of them may move in the next."""


MOST_STORAGES = 100_000
"""A recording with more is given up."""


@dataclass(slots=True, eq=False)
class SavedStorage:
    """One saved storage while its step runs."""

    nbytes: int
    birth: Stamp
    tape: int
    index: int | None
    module: str | None
    block: int | None
    kept: str
    need: Stamp = None
    death: Stamp = None


@dataclass(slots=True, eq=False)
class RunBlock:
    """One run of a block's forward."""

    name: str
    begin: Stamp
    inputs: dict[int, int]
    end: Stamp = None
    tape: int | None = None
    input: int | None = None
    repeatable: bool = True

    @property
    def complete(self) -> bool:
        """Whether it could be run again, ended, and saved something."""
        return self.repeatable and self.tape is not None and self.end is not None


class Profiler:
    """The notes of one step. The offloader's lock is held, except where a block begins or ends.

    Args:
        stopwatch: tells the time.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self._local = threading.local()
        self.running: list[None] = []
        """Not empty while a step is recorded: looked at for each tensor, in C as well."""
        self._clear()

    def _clear(self) -> None:
        self.active = False
        self._saved: list[SavedStorage] = []
        self._number_of: dict[Record, int] = {}
        self._blocks: list[RunBlock] = []
        self._phases: list[tuple[str, Stamp]] = []
        self._tapes: dict[int, tuple[int, object]] = {}
        self._in_backward: set[int] = set()
        self._end: Stamp = None
        self.finished = False
        """The step has ended, and its profile may be asked for."""

    @property
    def active(self) -> bool:
        """Whether a step is recorded."""
        return bool(self.running)

    @active.setter
    def active(self, value: bool) -> None:
        self.running[:] = [None] if value else []

    # -- while the step runs ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins; forget the last one."""
        self._clear()
        self.active = True
        self.stopwatch.begin()

    def saved(self, record: Record, reason: KeepReason | None) -> None:
        """A new record was made, and stays for a reason or moves."""
        if not self.running:
            return
        if len(self._saved) >= MOST_STORAGES:
            self._clear()  # something of this step stays alive for ever, so it never ends
            return
        birth = self.stopwatch.stamp()
        tape = self._tape_of(record, birth)
        kept = "" if reason is None or reason in FREE_TO_MOVE else reason.value
        number = len(self._saved)
        block = self._running()
        self._saved.append(SavedStorage(record.nbytes, birth, tape, record.index, record.module, block, kept))
        self._number_of[record] = number
        if block is not None:
            self._blocks[block].tape = tape
            self._match_input(record, number, block)

    def saved_again(self, record: Record) -> None:
        """A record was saved once more."""
        number = self._number_of.get(record) if self.running else None
        if number is None:
            return
        block = self._running()
        if block is not None:
            if self._blocks[block].tape is None:
                self._blocks[block].tape = self._saved[number].tape
            self._match_input(record, number, block)
        if self._saved[number].block != block:
            self._saved[number].block = None

    def kept(self, nbytes: int, reason: KeepReason) -> SavedStorage | None:
        """An activation stays without a record; returns what `kept_died` takes."""
        if not self.running:
            return None
        entry = SavedStorage(nbytes, self.stopwatch.stamp(), 0, None, None, self._running(), reason.value)
        self._saved.append(entry)
        return entry

    def kept_died(self, entry: SavedStorage) -> None:
        """Its last user died. May be called anywhere."""
        if self.running:
            entry.death = self.stopwatch.stamp()

    def needed(self, record: Record) -> None:
        """Backward has a record's bytes, from now on."""
        number = self._number_of.get(record) if self.running else None
        if number is None or self._saved[number].need is not None:
            return
        entry = self._saved[number]
        entry.need = self.stopwatch.stamp()
        if entry.tape not in self._in_backward:
            self._in_backward.add(entry.tape)
            self._phases.append(("backward", entry.need))
            if torch._C._current_graph_task_id() != -1:
                Variable._execution_engine.queue_callback(self._backward_ended)

    def died(self, record: Record) -> None:
        """The last handle of a record died."""
        number = self._number_of.pop(record, None) if self.running else None
        if number is not None:
            self._saved[number].death = self.stopwatch.stamp()

    def block_began(self, name: str, inputs: tuple[Tensor, ...]) -> None:
        """A block's forward begins in this thread."""
        if self.running:
            self._stack().append(len(self._blocks))
            storages = {t.untyped_storage()._cdata: t.numel() * t.element_size() for t in inputs}
            self._blocks.append(RunBlock(name, self.stopwatch.stamp(), storages))

    def block_ended(self, name: str, *, repeatable: bool) -> None:
        """It has ended."""
        stack = self._stack()
        if self.running and stack and self._blocks[stack[-1]].name == name:
            block = self._blocks[stack.pop()]
            block.end = self.stopwatch.stamp()
            block.repeatable = repeatable

    def _backward_ended(self) -> None:
        if self.running:
            self._phases.append(("other", self.stopwatch.stamp()))

    def _tape_of(self, record: Record, birth: Stamp) -> int:
        known = self._tapes.get(id(record.tape))
        if known is not None:
            return known[0]
        number = len(self._tapes)
        self._tapes[id(record.tape)] = number, record.tape  # held, so that its address is its own
        if number:  # the first one began with the step
            self._phases.append(("forward", birth))
        return number

    def _match_input(self, record: Record, number: int, block: int) -> None:
        if record.identity is not None and record.identity.cdata in self._blocks[block].inputs:
            self._blocks[block].input = number

    def _stack(self) -> list[int]:
        stack: list[int] | None = getattr(self._local, "stack", None)
        if stack is None or (stack and stack[-1] >= len(self._blocks)):
            stack = self._local.stack = []  # the old one is of a step that was given up
        return stack

    def _running(self) -> int | None:
        stack = self._stack()
        return stack[-1] if stack else None

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The step has ended: nothing more is noted."""
        if self.running:
            self._end = self.stopwatch.stamp()
            self.active, self.finished = False, True

    @property
    def useful(self) -> bool:
        """Whether the step that was recorded reached backward."""
        return bool(self._in_backward)

    def profile(self, **facts: Any) -> Profile | None:
        """The step as a profile; None while the device has not come to its end.

        Args:
            facts: fields of `Profile` that are known elsewhere: the links, the device, the prefetch window.
        """
        self.finish()
        if not self.stopwatch.end():
            return None
        blocks, renumbered = self._recomputable()
        storages = tuple(self._storage(entry, renumbered) for entry in self._saved)
        profile = Profile(
            storages=storages,
            blocks=tuple(self._block(block, number, storages) for number, block in enumerate(blocks)),
            **{**self._durations(), **facts},
        )
        self._clear()
        return profile

    def _durations(self) -> dict[str, Any]:
        found = {"forward": 0.0, "backward": 0.0, "other": 0.0}
        phase, since_s = "forward", 0.0
        for following, stamp in [*self._phases, ("other", self._end)]:
            time_s = max(since_s, self.stopwatch.seconds(stamp))
            found[phase] += time_s - since_s
            phase, since_s = following, time_s
        return {f"{name}_s": seconds for name, seconds in found.items()}

    def _storage(self, entry: SavedStorage, renumbered: dict[int, int]) -> Storage:
        seconds = self.stopwatch.seconds
        birth_s = seconds(entry.birth)
        need_s = None if entry.need is None else max(birth_s, seconds(entry.need))
        death = self._end if entry.death is None else entry.death
        return Storage(
            index=entry.index,
            nbytes=entry.nbytes,
            birth_s=birth_s,
            need_s=need_s,
            last_need_s=max(birth_s, need_s or 0.0, seconds(death)),
            module=entry.module,
            block=None if entry.block is None else renumbered.get(entry.block),
            tape=entry.tape,
            kept=entry.kept,
        )

    def _recomputable(self) -> tuple[list[RunBlock], dict[int, int]]:
        """The blocks that could be run again, and their numbers by the numbers under which they ran."""
        runs: dict[tuple[str, int | None], list[int]] = {}
        for number, block in enumerate(self._blocks):
            runs.setdefault((block.name, block.tape), []).append(number)
        single = sorted(numbers[0] for numbers in runs.values() if len(numbers) == 1)
        usable = [n for n in single if self._blocks[n].complete]
        return [self._blocks[n] for n in usable], {old: new for new, old in enumerate(usable)}

    def _block(self, run: RunBlock, number: int, storages: tuple[Storage, ...]) -> Block:
        begin_s, end_s = self.stopwatch.seconds(run.begin), self.stopwatch.seconds(run.end)
        forward_s = max(0.0, end_s - begin_s)
        assert run.tape is not None, "a usable block saved something"
        first_need_s = min((s.need_s for s in storages if s.block == number and s.need_s is not None), default=None)
        earlier = [s.need_s for s in storages if s.tape == run.tape and s.need_s is not None and s.birth_s < begin_s]
        backward_s = forward_s * 2
        if first_need_s is not None and earlier:
            backward_s = max(0.0, min(n for n in [*earlier, float("inf")] if n >= first_need_s) - first_need_s)
        input_ = run.input if run.input is not None and storages[run.input].block in (None, number) else None
        return Block(
            name=run.name,
            forward_s=forward_s,
            backward_s=backward_s if backward_s != float("inf") else forward_s * 2,
            recompute_s=forward_s,
            input_bytes=sum(run.inputs.values()),
            input=input_,
            tape=run.tape,
        )
