"""The checkpointed regions of a forward: which run once, which run again in backward, and the bytes they hold then."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..errors import ConfigError
from ..tiers.interrupts import aborts_when_interrupted
from ..tiers.record import Record
from ..tiers.storage_ref import StorageRef
from ..tiers.tiers import Tiers
from .backward_end import BackwardEnd
from .kept_place import KeptPlace
from .memory_beside import MemoryBeside
from .profiler import Profiler, RunRegion, SavedStorage
from .tape import Tape

MOST_COUNTS = 1024
"""The counts of so many recomputations are remembered: a run may have new shapes of inputs in each step."""
MOST_CHOICES = 64
"""So many choices of regions are remembered."""
ONE_IN = 16
"""One region of so many is counted in each step all the same, another one each time. Routing, or a frozen weight, may
have changed what all of them save."""


@dataclass(slots=True, eq=False)
class Region:
    """One run of a checkpointed region in a forward."""

    tape: Tape[Record]
    place: int  # the number of the region in its forward, from 0
    once: bool  # it does not run again in backward
    recorded: RunRegion | None = None  # while a step is recorded
    taken_bytes: int = 0  # bytes beside saved tensors that count as resident while its forward runs
    any_once: ClassVar[bool] = False
    """A region of this process has run once."""


@dataclass(slots=True, eq=False)
class Recomputation:
    """The storages that one recomputation has saved and that are still alive."""

    region: Region  # that runs again, or that has the nested checkpoint which does
    key: int  # equal for all recomputations of one kind: the region's place, or less than 0 for a nested checkpoint
    alike: Hashable = None  # equal for all that save as much, by which the count is remembered; None if it is not
    known_bytes: int | None = None
    """The remembered count, which then counts until backward has left the region. None if its bytes are counted."""
    run: int = field(default_factory=torch._C._current_graph_task_id)  # of backward, in which it runs
    saved: dict[int, tuple[StorageRef, int]] = field(default_factory=dict)
    """Each storage with its bytes, by its number. The weak reference keeps the number its own."""
    leaving: dict[int, StorageRef] = field(default_factory=dict)
    """Likewise, the storages whose copy to the host is under way, so that they count until its end."""
    held: SavedStorage | None = None  # the profiler's entry for its bytes, while a step is recorded

    def alive_bytes(self) -> int:
        """Return the bytes of the live storages, and drop the dead."""
        if self.known_bytes is not None:
            return self.known_bytes
        self.saved = {number: entry for number, entry in self.saved.items() if not entry[0].gone()}
        return sum(nbytes for _, nbytes in self.saved.values())


@dataclass(slots=True, eq=False)
class Derived:
    """A storage that backward has computed again from saved tensors.

    Attributes:
        left: backward is not in a region, run once, for which it made the storage. Until it has left the region, the
            storage counts as the bytes of a second run do: the memory that backward needs beside them is known only so.
    """

    storage: StorageRef
    nbytes: int
    held: SavedStorage | None  # as in `Recomputation`
    left: bool

    def alive_bytes(self) -> int:
        """Return its bytes while backward is in the region or the storage is alive, else 0."""
        return 0 if self.left and self.storage.gone() else self.nbytes


class Counts:
    """The bytes that recomputations hold. Some always save as much: these counts are remembered, by `alike`.

    To count all saves in each step took more than half of the library's host time.
    """

    def __init__(self) -> None:
        self.most: dict[int, int] = {}  # that each region held when it ran again, by `Recomputation.key`
        self.most_derived = {False: 0, True: 0}  # that backward has computed again at once, by `Shared.coded`
        self._known: dict[Hashable, int | None] = {}
        """None if two counts differed: these recomputations are always counted."""

    def of(self, alike: Hashable, number: int) -> int | None:
        """Return the count of the last recomputation; None if it is not known, and for one ``number`` in `ONE_IN`."""
        return self._known.get(alike) if number % ONE_IN else None

    def remember(self, alike: Hashable, nbytes: int) -> None:
        """Remember the count of a recomputation."""
        if len(self._known) >= MOST_COUNTS:
            self._known.clear()
        if self._known.setdefault(alike, nbytes) not in (nbytes, None):
            # What has changed may have changed the other counts as well.
            varying = [one for one, count in self._known.items() if count is None]
            self._known = dict.fromkeys([*varying, alike])


class TakenBytes:
    """The bytes beside saved tensors that count as resident for a while: for forwards of regions, and for the turn.

    The store's lock guards this; `give_back` alone takes no lock.
    """

    def __init__(self, tiers: Tiers, beside: MemoryBeside) -> None:
        self.in_forward: dict[int, int] = {}  # as `Beside.in_forward`, for the running step
        self.count = 0  # the regions of each forward of that step
        self.turn: tuple[Tape[Record], int, int] | None = None
        """The forward whose last region has ended, how many places it had then, and the bytes taken for its turn."""
        self.owed_bytes = 0  # of the next save, which has its room in what the running region gives back
        self._tiers, self._beside = tiers, beside
        self._known_ends: dict[tuple[frozenset[int], tuple[int, int]], dict[int, int]] = {}
        self.follow((frozenset(), (0, 0)))

    def follow(self, choice: tuple[frozenset[int], tuple[int, int]]) -> None:
        """Follow a plan, with this choice of regions: shapes may take turns, and have other numbers of storages."""
        if len(self._known_ends) >= MOST_CHOICES:
            self._known_ends.clear()
        # By place, how many storages a forward under the same plan had saved as the region ended.
        self.ends = self._known_ends.setdefault(choice, {})

    def take(self, place: int) -> int:
        """Take and return the bytes for the forward of the region at ``place``, or for the turn after so many."""
        nbytes, accounts = self.in_forward.get(place, 0), self._tiers.shared.accounts
        owed_bytes, self.owed_bytes = self.owed_bytes, 0  # the next save needs its room beside them
        if nbytes:
            for tier in self._tiers.by_device.values():  # before the program allocates them, in stream order
                accounts.pack_wait_s += tier.make_room(nbytes + owed_bytes)
            accounts.baseline_bytes += nbytes
            accounts.add_resident(nbytes)
            self._beside.taken_bytes += nbytes
        return nbytes

    def give_back(self, nbytes: int) -> None:
        """Have bytes no longer count."""
        if nbytes:
            self._tiers.shared.accounts.deferred.append(nbytes)
            self._beside.given_back.append(nbytes)

    def turn_ends(self) -> None:
        """Give back the bytes of the turn."""
        if self.turn is not None:
            self.give_back(self.turn[2])
            self.turn = None
            self._beside.parts.turn_ends()


class Regions:
    """A plan's choice among the checkpointed regions. The place in its forward identifies a region.

    The tensors that a recomputation saves pass our hooks and go to the checkpoint's hooks. They are on the device all
    the same, so they count as resident, and the store makes room for them.

    ``abort``: the store's method of that name, held weakly, as the store holds this object.
    """

    def __init__(
        self,
        tiers: Tiers,
        profiler: Profiler,
        beside: MemoryBeside,
        backward_end: BackwardEnd,
        abort: Callable[[BaseException], object],
    ) -> None:
        # The places of the regions that run once. Every other region runs again in backward, as programmed.
        self.once: frozenset[int] = frozenset()
        self.last: list[bool] = []  # for each region of the last forward, whether it ran once
        self.most = 0  # regions that a forward had
        self.expected: int | None = None  # regions that the first forward must have under the user's plan
        self.held: list[Recomputation | Derived] = []  # what backward has made and still held at the last count
        self.running: list[Recomputation] = []  # that have not ended
        self.taken = TakenBytes(tiers, beside)
        self.tiers = tiers
        self._shared, self._profiler, self._beside, self._backward_end = tiers.shared, profiler, beside, backward_end
        self._abort = weakref.WeakMethod(abort)
        self._counts = Counts()
        self._in: tuple[Tape[Record], int] | None = None
        """The region, run once, that backward is in: the tape and the place."""

    def follow(self, once: frozenset[int], saved: tuple[int, int] = (0, 0)) -> None:
        """Run these regions once from the next forward on. ``saved``: storages and bytes of its plan."""
        self.once = once
        self.taken.follow((once, saved))
        self._reserve()

    @property
    def bound(self) -> bool:
        """Whether a plan's steps have a bound for the whole device: the user's, or what checkpointing itself takes."""
        config = self._shared.config
        return config.device_memory is not None or (config.device_budget is None and self.most > 0)

    def abort_if_interrupted(self, error: BaseException) -> None:
        """Call the store's method of this name."""
        abort = self._abort()
        if abort is not None:
            abort(error)

    # -- forward ------------------------------------------------------------------------------------------------------

    @aborts_when_interrupted
    def begin(self, tape: Tape[Record], name: str) -> Region:
        """Note that a region begins in a forward.

        Raises:
            ConfigError: the user's plan has fewer regions.
        """
        place = len(tape.regions)
        region = Region(tape, place, place in self.once)
        if self.expected is not None and region.place >= self.expected:
            self._refuse(f"more than {self.expected}")
        Region.any_once |= region.once  # for all stores: any handle may raise the error that has this hint
        with self._shared.lock:
            self.last = tape.regions  # the list itself, which the forward's later regions extend
            tape.region_begins(region.once)
            self.most = max(self.most, len(tape.regions))
            if self._profiler.running:
                self.look_at_memory()
                self._beside.parts.region_begins()
                tape.region = region.recorded = self._profiler.region_began(tape, region.place, name, region.once)
            self.taken.turn_ends()
            region.taken_bytes = self.taken.take(region.place)
            if region.taken_bytes:
                self.look_at_memory()  # again: the room that was made is no longer resident
        return region

    def over(self, region: Region) -> None:
        """Note that the forward of a region has ended or raised. A finalizer may call this, so it takes no lock."""
        if region.tape.region is region.recorded:  # else another one has begun on the tape since this one raised
            region.tape.region = None
        self.taken.give_back(region.taken_bytes)

    @aborts_when_interrupted
    def end(self, region: Region) -> None:
        """Note that the forward of a region has ended, after `over`."""
        taken, is_last = self.taken, region.place + 1 == self.taken.count
        taken.ends[region.place] = len(region.tape)
        region.tape.region_ends(region.place)
        if region.recorded is None and not (is_last and taken.in_forward.get(taken.count)):
            return
        with self._shared.lock:
            if region.recorded is not None:
                self._profiler.region_ended(region.recorded)
            # First: it may wait, which releases the lock.
            nbytes = taken.take(taken.count) if is_last else 0
            taken.turn_ends()  # of a region that ended meanwhile, on another thread
            taken.turn = region.tape, len(region.tape.records), nbytes
            self.look_at_memory(region.place)
            self._beside.parts.turn_begins(region.place + 1)

    def has_room_for(self, nbytes: int, tape: Tape[Record], index: int) -> int:
        """Return how many of the next save's ``nbytes`` have room already; ``index``: of the save before it.

        A region that ends before that save has computed the storage in the room that it gives back as it ends.
        """
        place, taken = len(tape.regions) - 1, self.taken
        taken.owed_bytes = min(nbytes, taken.in_forward.get(place, 0)) if taken.ends.get(place) == index + 1 else 0
        return taken.owed_bytes

    def reach(self, record: Record | KeptPlace, round_: int) -> None:
        """Note that backward has reached a storage: the turn is over if a region or what precedes it has saved it."""
        tape = record.tape
        # Only the first time: a tensor that several regions use belongs to the one in which backward needs it first.
        if record.index not in tape.walk.seen or round_ > record.round:
            place = tape.come_to(record.index)
            self._come_to(None if place is None else (tape, place))
            if place is not None:
                self._shared.budget.used_bytes += record.nbytes
        if self.held:
            self.leave()
        turn = self.taken.turn
        if turn is not None and record.tape is turn[0] and record.index < turn[1]:
            self.look_at_memory()  # while it counts for the turn
            self.taken.turn_ends()

    def backward_ended(self) -> None:
        """Note that a backward has ended. The lock is held."""
        self._leave_region()
        self.leave()
        self.taken.turn_ends()

    def forward_ended(self, tape: Tape[Record]) -> None:
        """Note that a forward has ended.

        Raises:
            ConfigError: the user's plan has more regions.
        """
        if self.expected is None or not (len(tape) or tape.regions):
            return
        if self.most < self.expected:
            self._refuse(str(self.most))
        self.expected = None

    def _refuse(self, found: str) -> None:
        raise ConfigError(
            "policy",
            f"a plan of {self.expected} checkpointed regions",
            f"it was made for another step: the forward has {found}; the model and what of it is checkpointed must be "
            "those of the step that was recorded",
        )

    # -- backward -----------------------------------------------------------------------------------------------------

    @aborts_when_interrupted
    def again(self, region: Region, *, nested: bool = False, alike: Hashable = None) -> Recomputation:
        """Prepare for a region that runs again: make room for its bytes, as far as running writes free any.

        ``nested``: a checkpoint inside of it runs again, not the region itself. ``alike``: its function and the shapes
        of its inputs, if it always saves as much with them.
        """
        shared, recomputation = self._shared, Recomputation(region, -1 - region.place if nested else region.place)
        with shared.lock:
            region.tape.walk.ran_again = True  # so that the next save begins another tape
            # First: room is counted without the recomputations that backward has used up.
            if nested:
                self.passed()
            else:
                self._leave_region()
                self.leave()
            if alike is not None:
                recomputation.alike = region.place, alike
                if region.recorded is None:  # a recorded step shows each save
                    number = shared.accounts.steps + region.place
                    recomputation.known_bytes = self._counts.of(recomputation.alike, number)
            self.look_at_memory()  # while it counts for the turn
            self.taken.turn_ends()
            expected = self._counts.most.get(recomputation.key, 0)
            for tier in self.tiers.by_device.values():
                if self.bound:
                    tier.release_before_region()
                shared.accounts.unpack_wait_s += tier.make_room(expected)
            self.look_at_memory()
            if region.recorded is not None:
                recomputation.held = self._profiler.recomputation_begins(region.recorded, nested=nested)
            self._backward_end.expect()
            self.running.append(recomputation)  # last: after an error, nothing would remove it
        return recomputation

    @aborts_when_interrupted
    def ran_again(self, recomputation: Recomputation, *, whole: bool) -> None:
        """Note that a recomputation has run; it holds its bytes until backward has used them. ``whole``: no error."""
        key = recomputation.key
        with self._shared.lock:
            self.running.remove(recomputation)
            self.held.append(recomputation)
            nbytes = recomputation.alive_bytes()
            if recomputation.held is not None:
                self._profiler.recomputation_ended(recomputation.held, nbytes)
            if whole and recomputation.alike is not None:
                self._counts.remember(recomputation.alike, nbytes)
            self._counts.most[key] = max(nbytes, self._counts.most.get(key, 0))
            self._reserve()
            self.passed()
            self.look_at_memory()

    @aborts_when_interrupted
    def computed(self, storage: torch.UntypedStorage, region: tuple[Tape[Record], int] | None) -> None:
        """Note that backward has computed a storage again, which counts as `Derived` says.

        ``region``: the tape and the place of the region, run once, that saved it.
        """
        with self._shared.lock:
            if region is not None:
                # Backward may compute it from a kept tensor before it reaches any other one of the region.
                self._come_to(region)
            held = self._profiler.computed(storage.nbytes()) if self._profiler.running else None
            self.held.append(Derived(StorageRef(storage), storage.nbytes(), held, left=self._in is None))
            self.passed()
            self.will_compute(sum(one.alive_bytes() for one in self.held if isinstance(one, Derived)))
            self.look_at_memory()

    def will_compute(self, nbytes: int) -> None:
        """Note that backward will compute so many bytes again that are there at once. The lock is held."""
        most = self._counts.most_derived
        if nbytes > most[self._shared.coded]:
            most[self._shared.coded] = nbytes
            self._reserve()

    def released(self, record: Record) -> None:
        """Note that a record died in a recomputation: the cached output of a selective checkpoint, for example."""
        if record.host is not None and record.host.outgoing is not None:
            for recomputation in self.running:
                recomputation.leaving[record.saved.identity.cdata] = record.saved.identity

    def look_at_memory(self, place: int | None = None, *, born: int = 0, used: int = 0) -> None:
        """Look at memory in a recorded step, at the end of a hook: see `MemoryBeside.look`."""
        if self._profiler.running:
            with self._profiler.stopwatch.hook(), self._profiler.noting():
                self._beside.look(self.tiers, place, born=born, used=used)

    def leave(self, *, all_runs: bool = False) -> None:
        """Note that backward has reached something outside of the regions that ran again before. The lock is held.

        Autograd runs a region's nodes one after the other, so this run of backward has left the regions before.
        ``all_runs``: no other one is under way either.
        """
        run = torch._C._current_graph_task_id()
        if all_runs:  # also after a backward that raised, which has not notified of its end
            self._leave_region()
        for one in self.held:
            if isinstance(one, Recomputation) and one.known_bytes is not None and (all_runs or one.run == run):
                one.known_bytes = 0
        self.passed()

    def _come_to(self, region: tuple[Tape[Record], int] | None) -> None:
        """Note that backward is in a region, run once, by its tape and its place; None: in no such region."""
        if self._in != region:
            self._leave_region()
            self._in = region

    def _leave_region(self) -> None:
        """Note that backward has left the region, run once, that it was in."""
        self._in, self._shared.budget.used_bytes = None, 0
        for one in self.held:
            if isinstance(one, Derived):
                one.left = True

    def passed(self) -> None:
        """Count the bytes that backward has made and still holds. The lock is held."""
        nbytes, held = 0, list[Recomputation | Derived]()
        for recomputation in self.held:
            alive = recomputation.alive_bytes()
            nbytes += alive
            if alive:
                held.append(recomputation)
            elif recomputation.held is not None:
                self._profiler.recomputation_left(recomputation.held)
        self.held = held
        if nbytes != self._shared.accounts.recomputed_bytes:
            self._shared.accounts.recomputed(nbytes)

    def _reserve(self) -> None:
        """Leave prefetch no room that backward needs for the bytes that it makes."""
        budget, most = self._shared.budget, self._counts.most
        budget.again = {place: nbytes for place, nbytes in most.items() if place >= 0 and place not in self.once}
        # A nested checkpoint may lie in a region that runs once, and then runs while backward is in that region.
        nested = (nbytes for place, nbytes in most.items() if place < 0)
        budget.made_bytes = max([self._counts.most_derived[self._shared.coded], *nested])
