"""The checkpointed regions of a forward: which run once, which run again in backward, and the bytes they hold then."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ClassVar

from ..errors import ConfigError
from ..interrupts import aborts_when_interrupted
from ..planning.regions import in_part, split
from ..tiers.record import Record
from ..tiers.storage_ref import StorageRef
from ..tiers.tiers import Tiers
from .backward_end import BackwardEnd
from .profiler import Profiler, RunRegion, SavedStorage
from .run_so_far import RunSoFar
from .tape import Tape


class Region:
    """One run of a checkpointed region in a forward.

    Attributes:
        tape: of its forward; ``place``: the number of the region in it, from 0.
        selective: it may run again in part.
        once: it does not run again in backward; ``in_part``: it runs again in part.
        recorded: the profiler's entry; None while no step is recorded.
    """

    __slots__ = ("in_part", "once", "place", "recorded", "selective", "tape")

    def __init__(self, tape: Tape[Record], chosen: frozenset[int], *, selective: bool) -> None:
        self.tape = tape
        self.place = len(tape.regions)
        self.selective = selective
        self.once = self.place in chosen
        self.in_part = selective and in_part(self.place) in chosen
        self.recorded: RunRegion | None = None


class Recomputation:
    """The storages that one recomputation has saved and that are still alive.

    Attributes:
        region: the region that runs again, or that has the nested checkpoint which does.
        key: equal for all recomputations of one kind: place, whether a nested checkpoint runs again, and whether the
            region runs again in part.
        saved: each storage with its bytes, by its number. The weak reference keeps the number its own.
        leaving: storages, by their numbers, whose copy to the host is under way, so that they count until its end. The
            weak reference keeps the number its own.
        held: the profiler's entry for its bytes; None while no step is recorded.
        taken_bytes: results of the first run that it has taken; they were resident before.
    """

    __slots__ = ("held", "key", "leaving", "region", "saved", "taken_bytes")

    def __init__(self, region: Region, nested: bool) -> None:
        self.region = region
        self.key = region.place, nested, region.in_part
        self.taken_bytes = 0
        self.saved: dict[int, tuple[StorageRef, int]] = {}
        self.leaving: dict[int, StorageRef] = {}
        self.held: SavedStorage | None = None

    def alive_bytes(self) -> int:
        """Return the bytes of the live storages, and drop the dead."""
        self.saved = {number: entry for number, entry in self.saved.items() if not entry[0].gone()}
        return sum(nbytes for _, nbytes in self.saved.values())


class Regions:
    """A plan's choice among the checkpointed regions. The place in its forward identifies a region.

    The tensors that a recomputation saves pass our hooks and go to the checkpoint's hooks. They are on the device all
    the same, so they count as resident, and the store makes room for them.

    Args:
        tiers: make room, and have the counts.
        profiler: notes each region while a step is recorded; ``run``: looks at memory then.
        backward_end: calls the store when a run of backward ends.
        abort: the store's method of that name, held weakly, as the store holds this object.

    Attributes:
        once: the places of the regions that run once, and `in_part` of the places of those that run again in part.
            Every other region runs again in backward, as programmed.
        last: for each region of the last forward, its member in the choice, or None if it ran again.
        selective: regions may run again in part.
        any_once: a region of this process has run once.
        expected: the number of regions that the first forward must have under the user's plan.
        held: the recomputations that held bytes at the last count; ``running``: those that have not ended.
    """

    any_once: ClassVar[bool] = False

    def __init__(
        self,
        tiers: Tiers,
        profiler: Profiler,
        run: RunSoFar,
        backward_end: BackwardEnd,
        abort: Callable[[BaseException], object],
    ) -> None:
        self.once: frozenset[int] = frozenset()
        self.last: list[int | None] = []
        self.selective = tiers.shared.config.checkpoints == "selective"
        self.expected: int | None = None
        self.tiers = tiers
        self._shared, self._profiler, self._run, self._backward_end = tiers.shared, profiler, run, backward_end
        self._abort = weakref.WeakMethod(abort)
        self._bytes: dict[tuple[int, bool, bool], int] = {}
        """The most that each region held when it ran again, by `Recomputation.key`."""
        self.held: list[Recomputation] = []
        self.running: list[Recomputation] = []
        self._most = 0
        """The most regions that a forward had."""

    def follow(self, once: frozenset[int]) -> None:
        """Run regions like this from the next forward on; ``once``: as the attribute."""
        self.once = once
        self._reserve()

    def counts(self) -> dict[str, int]:
        """The counts of the last forward's regions."""
        once, partly = split(n for n in self.last if n is not None)
        return {"regions": len(self.last), "regions_once": len(once), "regions_in_part": len(partly)}

    def abort_if_interrupted(self, error: BaseException) -> None:
        """Call the store's method of this name."""
        abort = self._abort()
        if abort is not None:
            abort(error)

    # -- forward ------------------------------------------------------------------------------------------------------

    @aborts_when_interrupted
    def begin(self, tape: Tape[Record], name: str, *, selective: bool) -> Region:
        """Note that a region begins in a forward; ``selective``: it may run again in part.

        Raises:
            ConfigError: the user's plan has fewer regions.
        """
        region = Region(tape, self.once, selective=selective)
        if self.expected is not None and region.place >= self.expected:
            self._refuse(f"more than {self.expected}")
        Regions.any_once |= region.once  # for all stores: any handle may raise the error that has this hint
        with self._shared.lock:
            self.last = tape.regions  # the list itself, which the forward's later regions extend
            tape.regions.append(region.place if region.once else in_part(region.place) if region.in_part else None)
            self._most = max(self._most, len(tape.regions))
            if self._profiler.running:
                region.recorded = self._profiler.region_began(tape, region.place, name, region.once)
                self._note_host(region, -1)
        return region

    @aborts_when_interrupted
    def end(self, region: Region) -> None:
        """Note that the forward of a region has ended."""
        if region.recorded is not None:
            with self._shared.lock:
                self._note_host(region, 1)
                self._profiler.region_ended(region.recorded)

    def _note_host(self, region: Region, sign: int) -> None:
        """Begin (-1) or end (1) the host's time in a recorded first run, which counts for a run in part."""
        if region.selective and region.recorded is not None:
            region.recorded.host_s += sign * self._profiler.stopwatch.host_s()

    def forward_ended(self, tape: Tape[Record]) -> None:
        """Note that a forward has ended.

        Raises:
            ConfigError: the user's plan has more regions.
        """
        if self.expected is None or not (len(tape) or tape.regions):
            return
        if self._most < self.expected:
            self._refuse(str(self._most))
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
    def again(self, region: Region, *, nested: bool = False) -> Recomputation:
        """Prepare for a region that runs again: make room for its bytes, as far as running writes free any.

        Args:
            region: the region.
            nested: a checkpoint inside of it runs again, not the region itself.
        """
        shared, recomputation = self._shared, Recomputation(region, nested)
        with shared.lock:
            region.tape.ran_again = True  # so that the next save begins another tape
            self.passed()  # first: room is counted without the recomputations that backward has used up
            expected = self._bytes.get(recomputation.key, 0)
            for tier in self.tiers.by_device.values():
                shared.accounts.unpack_wait_s += tier.make_room(expected)
            self._look_at_memory()
            if region.recorded is not None:
                recomputation.held = self._profiler.recomputation_begins(region.recorded, nested=nested)
            self._backward_end.expect()
            self.running.append(recomputation)  # last: after an error, nothing would remove it
        return recomputation

    @aborts_when_interrupted
    def ran_again(self, recomputation: Recomputation) -> None:
        """Note that a recomputation has run; it holds its bytes until backward has used them."""
        key = recomputation.key
        with self._shared.lock:
            self.running.remove(recomputation)
            self.held.append(recomputation)
            nbytes = recomputation.alive_bytes()
            if recomputation.held is not None:
                self._profiler.recomputation_ended(recomputation.held, nbytes)
            self._bytes[key] = max(nbytes - recomputation.taken_bytes, self._bytes.get(key, 0))
            self._reserve()
            self.passed()
            self._look_at_memory()

    def released(self, record: Record) -> None:
        """Note that a record died in a recomputation: the cached output of a selective checkpoint, for example."""
        if record.outgoing is not None and record.identity is not None:
            for recomputation in self.running:
                recomputation.leaving[record.identity.cdata] = record.identity

    def _look_at_memory(self) -> None:
        """Look at memory in a recorded step: around a recomputation, and around the backward of its region."""
        if self._profiler.running:
            self._run.look_at_memory(self.tiers)

    def passed(self) -> None:
        """Count the bytes that recomputations still hold. The lock is held."""
        nbytes, held = 0, []
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
        """Leave prefetch no room that a recomputation needs at once."""
        self._shared.budget.recompute_bytes = max((n for key, n in self._bytes.items() if self._occurs(key)), default=0)

    def _occurs(self, key: tuple[int, bool, bool]) -> bool:
        """Whether recomputations of a kind still occur."""
        place, nested, partly = key
        return nested or (place not in self.once and partly == (self.selective and in_part(place) in self.once))
