"""Notes one step as it runs and makes its `Profile`: what is saved when and for how long, and how long all takes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..planning.profile import Profile, Storage
from ..policy import KeepReason
from ..tiers.record import Record
from ..tiers.timers import Stamp, Stopwatch
from .backward_end import BackwardEnd
from .even import Stretch, evened
from .identity import inner_tensors, storages

FREE_TO_MOVE = (KeepReason.LAST, KeepReason.PRESSURE, KeepReason.PLAN, KeepReason.FITS, KeepReason.NO_TIME)
"""Reasons of one step only: what stayed for one of them may move in the next."""


STAMP_BYTES = 1 << 20
"""Of storages that no plan moves, so many bytes at most share one moment."""
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
class BlockInput:
    """One tensor among the arguments of a block.

    Attributes:
        number: which argument it is, counted as `tree_flatten` lists them.
        storage: the number of its storage.
        nbytes: its size.
        wanted: it needs a gradient.
        recorded: a checkpoint's save of it makes a record.
        saved_before: it had a record when the block began.
        position: which saved storage it is, if the block saves it in a plain run.
    """

    number: int
    storage: int
    nbytes: int
    wanted: bool
    recorded: bool
    saved_before: bool
    position: int | None = None


@dataclass(slots=True, eq=False)
class RunBlock:
    """One run of a block's forward."""

    name: str
    begin: Stamp
    inputs: list[BlockInput] = field(default_factory=list)
    end: Stamp = None
    tape: int | None = None
    repeatable: bool = True

    @property
    def main_input(self) -> BlockInput | None:
        """The input that a checkpoint is taken to save: the first one that needs a gradient, or else the first."""
        return next((one for one in self.inputs if one.wanted), self.inputs[0] if self.inputs else None)

    @property
    def complete(self) -> bool:
        """Whether it could be run again, ended, saved something, and its checkpoint's input is known for certain."""
        main = self.main_input
        borrowed = main is not None and main.recorded and main.saved_before and main.position is None
        return self.repeatable and self.tape is not None and self.end is not None and not borrowed


class SharedStamp:
    """A moment for what no plan moves: small tensors share one, until they are together as large as one that moves.

    A stamp is an event of the device, and a step may save 20,000 small tensors. Each is taken to live from the moment
    before its birth to the one after its death, never for less, so that a plan keeps its budget.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._birth: Stamp = None
        self._born_bytes = self._dead_bytes = 0
        """Of those that share a moment."""
        self._dead: deque[SavedStorage] = deque()

    def birth(self, nbytes: int) -> Stamp:
        """A moment no later than now, for a storage of ``nbytes`` that is saved."""
        self._born_bytes += nbytes
        if self._birth is None or self._born_bytes >= STAMP_BYTES:
            self._birth, self._born_bytes = self._stopwatch.stamp(), 0
        return self._birth

    def died(self, entry: SavedStorage) -> None:
        """Note the death of a storage. May be called anywhere: only atomic operations on the list."""
        self._dead.append(entry)
        self._dead_bytes += entry.nbytes
        if self._dead_bytes >= STAMP_BYTES:
            self.dead_by(self._stopwatch.stamp())

    def dead_by(self, stamp: Stamp) -> None:
        """Those whose death was noted were dead by this moment."""
        self._dead_bytes = 0
        while self._dead:
            try:
                self._dead.popleft().death = stamp
            except IndexError:  # another thread took the last one
                return


class Profiler:
    """The notes of one step. The offloader's lock is held, except where a block begins or ends.

    Args:
        stopwatch: tells the time.

    Attributes:
        is_recorded: gives, while there is one, what says whether a tensor that is saved now gets a record.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self.is_recorded: Callable[[], Callable[[Tensor], bool] | None] = lambda: None
        self._local = threading.local()
        self.running: list[None] = []
        """Not empty while a step is recorded: looked at for each tensor, in C as well."""
        self._backward_end = BackwardEnd(self._backward_ended)
        self.forget()

    def forget(self) -> None:
        """Drop what was recorded, and record nothing more."""
        self.running.clear()
        self._saved: list[SavedStorage] = []
        self._number_of: dict[Record, int] = {}
        self._blocks: list[RunBlock] = []
        self._phases: list[tuple[str, Stamp]] = []
        self._tapes: dict[int, tuple[int, object]] = {}
        self._in_backward: set[int] = set()
        self._end: Stamp = None
        self._shared = SharedStamp(self.stopwatch)
        self._even: Callable[[float], float] = float
        self.finished = False
        """The step has ended, and its profile may be asked for."""

    @property
    def active(self) -> bool:
        """Whether a step is recorded."""
        return bool(self.running)

    # -- while the step runs ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins; forget the last one."""
        self.forget()
        self.running.append(None)
        self.stopwatch.begin()

    def saved(self, record: Record, reason: KeepReason | None) -> None:
        """A new record was made, and stays for a reason or moves."""
        if not self.running:
            return
        if len(self._saved) >= MOST_STORAGES:
            self.forget()  # something of this step stays alive for ever, so it never ends
            return
        birth = self.stopwatch.stamp()
        tape = self._tape_of(record, birth)
        kept = "" if reason is None or reason in FREE_TO_MOVE else reason.value
        number = len(self._saved)
        block = self._running()
        module = record.module or self._block_name(block)
        self._saved.append(SavedStorage(record.nbytes, birth, tape, record.index, module, block, kept))
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
        block = self._running()
        stamp = self._shared.birth(nbytes)
        entry = SavedStorage(nbytes, stamp, 0, None, self._block_name(block), block, reason.value)
        self._saved.append(entry)
        return entry

    def kept_died(self, entry: SavedStorage) -> None:
        """Its last user died. May be called anywhere."""
        if self.running:
            self._shared.died(entry)

    def needed(self, record: Record, *, alive: bool) -> None:
        """Backward has a record's bytes, from now on; ``alive``: others than us hold them as well."""
        number = self._number_of.get(record) if self.running else None
        if number is None or self._saved[number].need is not None:
            return
        entry = self._saved[number]
        entry.need = self.stopwatch.stamp()
        if alive and not entry.kept:
            entry.kept = KeepReason.ALIVE.value  # moving it would free nothing
        if entry.tape not in self._in_backward:
            self._in_backward.add(entry.tape)
            self._phases.append(("backward", entry.need))
            self._backward_end.expect()

    def died(self, record: Record) -> None:
        """The last handle of a record died."""
        number = self._number_of.pop(record, None) if self.running else None
        if number is not None:
            self._saved[number].death = stamp = self.stopwatch.stamp()
            self._shared.dead_by(stamp)

    def block_began(self, name: str, inputs: Mapping[int, Tensor]) -> None:
        """A block's forward begins in this thread; ``inputs`` are its arguments, by their numbers."""
        if not self.running:
            return
        self._stack().append(len(self._blocks))
        block = RunBlock(name, self.stopwatch.stamp())
        is_recorded = self.is_recorded()
        identities = [record.identity for record in list(self._number_of)]
        known = {identity.cdata for identity in identities if identity is not None}
        for number, tensor in inputs.items():
            recorded = is_recorded is None or all(map(is_recorded, inner_tensors(tensor)))
            nbytes = tensor.numel() * tensor.element_size()
            for storage in storages(tensor):
                one = BlockInput(
                    number, storage._cdata, nbytes, tensor.requires_grad, recorded, storage._cdata in known
                )
                block.inputs.append(one)
        self._blocks.append(block)

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
        identity = record.identity
        for one in self._blocks[block].inputs:
            if identity is not None and one.storage == identity.cdata and one.position is None:
                one.position = number

    def _stack(self) -> list[int]:
        stack: list[int] | None = getattr(self._local, "stack", None)
        if stack is None or (stack and stack[-1] >= len(self._blocks)):
            stack = self._local.stack = []  # the old one is of a step that was given up
        return stack

    def _running(self) -> int | None:
        stack = self._stack()
        return stack[-1] if stack else None

    def _block_name(self, block: int | None) -> str | None:
        """Return what stands for a module's name where no names are asked for."""
        return None if block is None else self._blocks[block].name

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The step has ended: nothing more is noted."""
        if self.running:
            self._end = self.stopwatch.stamp()
            self._shared.dead_by(self._end)
            self.running.clear()
            self.finished = True

    @property
    def has_no_record(self) -> bool:
        """Whether all that the step saved stays without a record, so that no plan moves any of it."""
        return all(entry.index is None for entry in self._saved)

    @property
    def useful(self) -> bool:
        """Whether the step that was recorded reached backward."""
        return bool(self._in_backward)

    def profile(self, device: str = "cpu") -> Profile | None:
        """The step as a profile, of tensors on this device; None while the device has not come to its end."""
        self.finish()
        if not self.stopwatch.end():
            return None
        self._even = evened(self._stretches(self._recomputable()))
        saved = tuple(map(self._storage, self._saved))
        profile = Profile(
            storages=saved,
            device=device,
            **self._durations(),
        )
        self.forget()
        return profile

    def _seconds(self, stamp: Stamp) -> float:
        return self._even(self.stopwatch.seconds(stamp))

    def _stretches(self, blocks: Iterable[int]) -> list[Stretch]:
        """The forwards and backwards of blocks, by what they save: those of equal blocks are equal."""
        seconds = self.stopwatch.seconds
        own: dict[int, list[SavedStorage]] = {number: [] for number in blocks}
        for entry in self._saved:
            if entry.block in own:
                own[entry.block].append(entry)
        found = []
        needs: dict[int, list[float]] = {}
        """By forward, when backward reached the blocks before."""
        for number, entries in own.items():
            block = self._blocks[number]
            assert block.tape is not None, "a usable block saved something"
            sizes = tuple(entry.nbytes for entry in entries)
            found.append(Stretch(seconds(block.begin), seconds(block.end), ("forward", sizes)))
            first_need_s = min((seconds(entry.need) for entry in entries if entry.need is not None), default=None)
            earlier = needs.setdefault(block.tape, [])
            if first_need_s is not None:
                end_s = min((need_s for need_s in earlier if need_s >= first_need_s), default=None)
                if end_s is not None:
                    found.append(Stretch(first_need_s, end_s, ("backward", sizes)))
                earlier.append(first_need_s)
        return found

    def _durations(self) -> dict[str, Any]:
        found = {"forward": 0.0, "backward": 0.0, "other": 0.0}
        phase, since_s = "forward", 0.0
        for following, stamp in [*self._phases, ("other", self._end)]:
            time_s = max(since_s, self._seconds(stamp))
            found[phase] += time_s - since_s
            phase, since_s = following, time_s
        return {f"{name}_s": seconds for name, seconds in found.items()}

    def _storage(self, entry: SavedStorage) -> Storage:
        seconds = self._seconds
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
            tape=entry.tape,
            kept=entry.kept,
        )

    def _recomputable(self) -> list[int]:
        """The numbers of the blocks that could be run again."""
        runs: dict[tuple[str, int | None], list[int]] = {}
        for number, block in enumerate(self._blocks):
            runs.setdefault((block.name, block.tape), []).append(number)
        single = sorted(numbers[0] for numbers in runs.values() if len(numbers) == 1)
        return [n for n in single if self._blocks[n].complete]
