"""The recording of one step, and its `Profile`: the life of each saved storage, and the durations of the phases."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..events import now
from ..planning.profile import Profile, Region, RegionSave, Storage
from ..policy import KeepReason, Kind
from ..tiers.record import Record
from ..tiers.storage_ref import StorageRef
from ..tiers.timers import Stamp, Stopwatch
from .backward_end import BackwardEnd
from .ranks import collectives
from .tape import Tape

STAMP_BYTES = 1 << 20
"""At most this many bytes of storages that no plan moves share one stamp."""
MOST_STORAGES = 100_000
"""A recording with more storages is dropped."""


@dataclass(slots=True, eq=False)
class SavedStorage:
    """One saved storage while its step runs."""

    nbytes: int
    birth: Stamp
    kept: str
    tape: int = 0
    index: int | None = None
    module: str | None = None
    region: int | None = None
    need: Stamp = None
    death: Stamp = None
    let_go: bool = False
    input_of: RunRegion | None = None


@dataclass(slots=True, eq=False)
class RunRegion:
    """One run of a checkpointed region while its step runs."""

    place: int  # its number in its forward
    tape: int  # the number of that forward
    name: str  # of its function
    once: bool  # it does not run again
    begin: Stamp  # of its forward
    end: Stamp = None  # of its forward; None if that raised
    held: SavedStorage | None = None
    """The storages that its second run left alive, as one entry; None before that run."""
    again_end: Stamp = None  # of the second run
    saves: list[tuple[Stamp, int, str, int | None]] = field(default_factory=list)
    """Of the second run: the moment of each save, its bytes, why it would stay, and `RegionSave.outside`."""
    communicates: bool = False  # a collective ran in it, or may have
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    """Of each tensor that the first run saved, a tensor that shares its version counter, and the version."""
    changed: bool = False  # one of these tensors was changed in place before the second run
    input_bytes: int = 0  # of the largest input that the second run saved as well
    collectives: int | None = 0  # that were enqueued before the last run

    def count_collectives(self) -> None:
        """Note, after a run, whether a collective was enqueued meanwhile."""
        found = collectives()
        self.communicates |= found is None or found != self.collectives


class SharedStamp:
    """A stamp for several small tensors, until their bytes together reach the size of a tensor that moves.

    A stamp is an event of the device, and a step may save 20,000 small tensors. Each counts as alive from the last
    stamp before its birth to the first after its death, never for less, so that a plan keeps its budget.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._birth: Stamp = None
        self._born_bytes = self._dead_bytes = 0
        """Of the storages that share the present stamp."""
        self._dead: deque[SavedStorage] = deque()

    def birth(self, nbytes: int) -> Stamp:
        """Return a stamp no later than now for a storage of ``nbytes``."""
        self._born_bytes += nbytes
        if self._birth is None or self._born_bytes >= STAMP_BYTES:
            self._birth, self._born_bytes = self._stopwatch.stamp(), 0
        return self._birth

    def died(self, entry: SavedStorage) -> None:
        """Note the death of a storage. It may run anywhere: the deque's operations are atomic."""
        self._dead.append(entry)
        self._dead_bytes += entry.nbytes  # an update that another thread overwrites only delays the stamp
        if self._dead_bytes >= STAMP_BYTES:
            self.dead_by(self._stopwatch.stamp())

    def dead_by(self, stamp: Stamp) -> None:
        """Set the death of all noted storages to this stamp."""
        self._dead_bytes = 0
        while self._dead:
            try:
                self._dead.popleft().death = stamp
            except IndexError:  # another thread took the last entry after the check
                return


class Profiler:
    """The recording of one step. The caller holds the offloader's lock."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self.noted_s = 0.0
        """The host's time that recording took in hooks."""
        self.running: list[None] = []
        """Not empty while a step is recorded. A list, as the compiled hooks check it for each tensor."""
        self._backward_end = BackwardEnd(self._backward_ended)
        self.forget()

    def forget(self, *, timed: bool = False) -> None:
        """Drop the recording, and record nothing more; ``timed``: time the hooks of the step that begins."""
        self.running.clear()
        self.stopwatch.running = False
        if timed:
            self.stopwatch.begin()
        self._saved: list[SavedStorage] = []
        self._entry_of: dict[Record, SavedStorage] = {}
        self._regions: list[RunRegion] = []
        self._recomputations: list[SavedStorage] = []
        self._outside: dict[int, tuple[StorageRef, int]] = {}
        self._phases: list[tuple[str, Stamp]] = []
        self._tapes: dict[Tape[Record] | None, int] = {}
        self._in_backward: set[int] = set()
        self._end: Stamp = None
        self._shared = SharedStamp(self.stopwatch)
        self.finished = False
        """The step has ended, and `profile` may be called."""

    @property
    def active(self) -> bool:
        """Whether a step is recorded."""
        return bool(self.running)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Return a context that counts the host's time in it, which only a recorded step takes."""
        since_s = now()
        yield
        self.noted_s += now() - since_s

    # -- while the step runs ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to record a step; drop the last recording."""
        self.forget()
        self.noted_s = 0.0
        self.running.append(None)
        self.stopwatch.begin()

    def saved(self, record: Record, reason: KeepReason | None) -> None:
        """Note a new record, which moves, or stays for a reason. A step is recorded."""
        if len(self._saved) >= MOST_STORAGES:
            self.forget()  # something of this step stays alive for ever, so it never ends
            return
        birth = self.stopwatch.stamp()
        tape = self._tape_of(record.tape, birth)
        kept = "" if reason is None or reason.kind is Kind.CHOSEN else reason.value
        region: RunRegion | None = record.tape.region
        place = region.place if region is not None and region.once else None
        entry = SavedStorage(record.nbytes, birth, kept, tape, record.index, record.saved.module, place)
        if region is not None and not region.once:
            entry.input_of = region  # it runs again: its checkpoint's hooks receive its saves, but for this input
        self._entry_of[record] = entry
        self._saved.append(entry)

    def kept(self, nbytes: int, reason: KeepReason, region: RunRegion | None) -> SavedStorage | None:
        """Note an activation that stays without a record; return its entry, for `kept_died`. ``region``: it runs."""
        if not self.running:
            return None
        stamp = self._shared.birth(nbytes)
        # A checkpoint's hooks receive what a region saves that runs again.
        tape, place = (0, None) if region is None or not region.once else (region.tape, region.place)
        entry = SavedStorage(nbytes, stamp, reason.value, tape, region=place)
        self._saved.append(entry)
        return entry

    def kept_died(self, entry: SavedStorage) -> None:
        """Note the death of such an activation. It may run anywhere."""
        if self.running:
            self._shared.died(entry)

    def needed(self, record: Record, *, alive: bool, evicts_first: bool) -> None:
        """Note that backward has a record's bytes from now on. A step is recorded.

        ``alive``: the program holds the bytes as well; ``evicts_first``: as in `Tier`.
        """
        entry = self._entry_of.get(record)
        if entry is None:
            return
        if entry.need is not None:
            if self._phases[-1][0] == "other":  # a second run of backward over the same forward
                self._reach(entry.tape, self.stopwatch.stamp())
            return
        entry.need = self.stopwatch.stamp()
        entry.let_go = evicts_first and record.waiting <= 0
        run = entry.input_of
        if run is not None and run.held is None and record.handles > 1:
            entry.input_of = None  # another node saved it as well: the bytes stay
        if alive and not entry.kept:
            entry.kept = KeepReason.ALIVE.value  # moving it would free nothing
        self._reach(entry.tape, entry.need)

    def died(self, record: Record) -> None:
        """Note that the last handle of a record died. A step is recorded."""
        entry = self._entry_of.pop(record, None)
        if entry is not None:
            entry.death = self.stopwatch.stamp()
            self._shared.dead_by(entry.death)  # these storages died before it, so it serves them at no further event

    def region_began(self, tape: Tape[Record], place: int, name: str, once: bool) -> RunRegion:
        """Note that a checkpointed region begins to run in this thread."""
        begin = self.stopwatch.stamp()
        region = RunRegion(place, self._tape_of(tape, begin), name, once, begin, collectives=collectives())
        self._regions.append(region)
        return region

    def region_ended(self, region: RunRegion) -> None:
        """Note that the forward of a region has ended."""
        if region in self._regions:
            region.end = self.stopwatch.stamp()
            region.count_collectives()

    def region_saved(
        self, region: RunRegion, nbytes: int, kept: str, outside: torch.UntypedStorage | None = None
    ) -> None:
        """Note a new storage that a second run saves.

        ``kept``: as `RegionSave.kept`; ``outside``: the storage, if the region gets it by keyword or closure.
        """
        if region in self._regions and region.again_end is None:
            number = None
            if outside is not None:  # a weak reference keeps the storage's number its own
                ref = StorageRef(outside)
                _, number = self._outside.setdefault(ref.cdata, (ref, len(self._outside)))
            region.saves.append((self.stopwatch.stamp(), nbytes, kept, number))

    def recomputation_begins(self, region: RunRegion, *, nested: bool) -> SavedStorage | None:
        """Note that backward runs a region, or a checkpoint nested in it, again; return an entry for its bytes."""
        if region not in self._regions:
            return None
        stamp = self.stopwatch.stamp()
        held = SavedStorage(0, stamp, KeepReason.RECOMPUTED.value, region.tape, module=region.name, need=stamp)
        self._recomputations.append(held)
        if not nested and region.held is None:
            region.held, region.collectives = held, collectives()
            # Such a region cannot run once: backward would need a tensor that has changed, which is an error.
            region.changed = any(probe._version != version for probe, version in region.versions)
            region.versions.clear()
        self._reach(region.tape, stamp)
        return held

    def recomputation_ended(self, held: SavedStorage, nbytes: int) -> None:
        """Note that the second run has ended, with ``nbytes`` of its saves alive."""
        held.nbytes = nbytes
        region = next((region for region in self._regions if region.held is held), None)
        if region is not None:
            region.again_end = self.stopwatch.stamp()
            region.count_collectives()

    def computed(self, nbytes: int) -> SavedStorage:
        """Note that backward has computed a storage of ``nbytes`` again; return its entry."""
        stamp = self.stopwatch.stamp()
        held = SavedStorage(nbytes, stamp, KeepReason.DERIVED.value, need=stamp)
        self._recomputations.append(held)
        return held

    def recomputation_left(self, held: SavedStorage) -> None:
        """Note that backward has used all bytes of a recomputation, or a storage that it computed again."""
        if held in self._recomputations and held.death is None:
            held.death = self.stopwatch.stamp()

    def _reach(self, tape: int, stamp: Stamp) -> None:
        """Begin a phase of backward as a run of it reaches a tape for the first time."""
        # Outside of backward, the program only looks at a saved tensor after it.
        again = tape in self._in_backward and self._phases[-1][0] == "other" and self._backward_end.expect()
        if again or tape not in self._in_backward:
            self._in_backward.add(tape)
            self._phases.append(("backward", stamp))
            self._backward_end.expect()

    def _backward_ended(self) -> None:
        if self.running:
            stamp = self.stopwatch.stamp()
            self._phases.append(("other", stamp))
            for held in self._recomputations:
                held.death = held.death or stamp

    def _tape_of(self, tape: Tape[Record] | None, birth: Stamp) -> int:
        if tape not in self._tapes:
            if self._tapes:  # the first forward began with the step
                self._phases.append(("forward", birth))
            self._tapes[tape] = len(self._tapes)
        return self._tapes[tape]

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """End the recording with the step."""
        if self.running:
            self._end = self.stopwatch.stamp()
            self._shared.dead_by(self._end)
            self.running.clear()
            self.finished = True

    @property
    def has_no_record(self) -> bool:
        """Whether no plan could move a storage of the step, not even if a region ran once."""
        return not self._regions and all(entry.index is None for entry in self._saved)

    @property
    def useful(self) -> bool:
        """Whether the recorded step reached backward."""
        return bool(self._in_backward)

    def profile(self, device: str = "cpu") -> Profile | None:
        """Return the profile of the step on this device; None while the device has not reached the step's end."""
        self.finish()
        if not self.stopwatch.end():
            return None
        held = (entry for entry in self._recomputations if entry.nbytes)
        storages = tuple(map(self._storage, [*self._saved, *held]))
        profile = Profile(
            storages=storages,
            regions=tuple(self._region(run, storages) for run in self._regions),
            device=device,
            **self._durations(),
        )
        self.forget()
        return profile

    def _durations(self) -> dict[str, Any]:
        found = {"forward": 0.0, "backward": 0.0, "other": 0.0}
        phase, since_s = "forward", 0.0
        for following, stamp in [*self._phases, ("other", self._end)]:
            time_s = max(since_s, self.stopwatch.seconds(stamp))
            # "Other" is what follows backward, so time between two runs of backward is none of it.
            found[following if following == "backward" and phase == "other" else phase] += time_s - since_s
            phase, since_s = following, time_s
        return {f"{name}_s": seconds for name, seconds in found.items()}

    def _storage(self, entry: SavedStorage) -> Storage:
        seconds = self.stopwatch.seconds
        birth_s = seconds(entry.birth)
        need_s = None if entry.need is None else max(birth_s, seconds(entry.need))
        last_s = max(birth_s, need_s or 0.0, seconds(self._end if entry.death is None else entry.death))
        run = entry.input_of
        cached = False
        if run is not None and run.held is not None and need_s is not None:
            again_s = max(birth_s, seconds(run.held.birth))
            cached = again_s < need_s
            if cached:  # by a selective checkpoint: the second run takes it over, and counts it from its begin on
                need_s = last_s = again_s
        return Storage(
            index=entry.index,
            nbytes=entry.nbytes,
            birth_s=birth_s,
            need_s=need_s,
            last_need_s=last_s,
            module=entry.module,
            tape=entry.tape,
            kept=entry.kept,
            let_go=entry.let_go,
            region=entry.region,
            input_of=run.place if run is not None and (cached or entry.nbytes > run.input_bytes) else None,
        )

    def _region(self, run: RunRegion, storages: Sequence[Storage]) -> Region:
        seconds = self.stopwatch.seconds
        begin_s = seconds(run.begin)
        end_s = max(begin_s, seconds(self._end if run.end is None else run.end))
        found = Region(
            place=run.place,
            name=run.name,
            tape=run.tape,
            begin_s=begin_s,
            end_s=end_s,
            communicates=run.communicates,
            changed=run.changed,
        )
        if run.once and run.tape in self._in_backward:
            mine = run.place, run.tape
            own = (storage.last_need_s for storage in storages if (storage.region, storage.tape) == mine)
            return replace(found, backward_end_s=max(own, default=seconds(self._end)))
        if run.held is None:
            return found
        again_s = max(end_s, seconds(run.held.birth))
        ran_s = max(again_s, seconds(self._end if run.again_end is None else run.again_end))
        return replace(
            found,
            again_s=again_s,
            recompute_s=ran_s - again_s,
            backward_end_s=max(ran_s, seconds(self._end if run.held.death is None else run.held.death)),
            saves=tuple(
                RegionSave(
                    offset_s=min(ran_s - again_s, max(0.0, seconds(stamp) - again_s)),
                    nbytes=nbytes,
                    kept=kept,
                    outside=outside,
                )
                for stamp, nbytes, kept, outside in run.saves
            ),
        )
