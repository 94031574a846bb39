"""Which checkpointed regions of a forward run once, which run again in backward, and what those hold there."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import ConfigError
from ..interrupts import aborts_when_interrupted
from ..tiers.record import Record
from ..tiers.storage_ref import StorageRef
from .tape import Tape

if TYPE_CHECKING:
    from .backward_end import BackwardEnd
    from .profiler import RunRegion, SavedStorage
    from .store import ActivationStore


class Region:
    """One run of a checkpointed region in a forward.

    Attributes:
        tape: the forward; ``place``: the number of the region in it, from 0.
        once: it does not run again in backward.
        recorded: what the profiler notes of it; None while no step is recorded.
    """

    __slots__ = ("once", "place", "recorded", "tape")

    def __init__(self, tape: Tape[Record], once: bool) -> None:
        self.tape = tape
        self.place = len(tape.regions)
        self.once = once
        self.recorded: RunRegion | None = None


class Recomputation:
    """The storages that one recomputation has saved, and those of them that are alive still.

    Attributes:
        region: that runs again, or in which a nested checkpoint does.
        key: of all recomputations of its kind: the region's place, or less than 0 for what is nested in it.
        saved: each storage with its bytes. The weak reference keeps its number from being another storage's.
        held: what the profiler notes of what is saved; None while no step is recorded.
    """

    __slots__ = ("held", "key", "region", "saved")

    def __init__(self, region: Region, nested: bool) -> None:
        self.region = region
        self.key = -1 - region.place if nested else region.place
        self.saved: dict[int, tuple[StorageRef, int]] = {}
        self.held: SavedStorage | None = None

    def alive_bytes(self) -> int:
        """Bytes of the storages that are alive."""
        self.saved = {number: entry for number, entry in self.saved.items() if not entry[0].gone()}
        return sum(nbytes for _, nbytes in self.saved.values())


class Regions:
    """The choice that a plan makes of the checkpointed regions. A region is known by its place in its forward.

    What a recomputation saves goes past our hooks, to those of the checkpoint. It is on the device all the same, so it
    is counted as resident and has room made for it.

    Args:
        store: has the counts; ``backward_end``: calls it when a run of backward ends.

    Attributes:
        once: the places of the regions that run once. Every other region runs again in backward, as its program says.
        last: of each region of the last forward, whether it ran once.
        any_once: some region of this process has run once.
        expected: how many regions the first forward has to have, under a plan that the user gave.
    """

    any_once: ClassVar[bool] = False

    def __init__(self, store: ActivationStore, backward_end: BackwardEnd) -> None:
        self.once: frozenset[int] = frozenset()
        self.last: list[bool] = []
        self.expected: int | None = None
        self.tiers = store.tiers
        self._store = weakref.ref(store)
        self._shared, self._profiler, self._backward_end = store.shared, store.profiler, backward_end
        self._bytes: dict[int, int] = {}
        """The most that each region held when it ran again, by `Recomputation.key`."""
        self._held: list[Recomputation] = []
        self._most = 0
        """The most regions that a forward had."""

    def follow(self, once: frozenset[int]) -> None:
        """Run these regions once from the next forward on."""
        self.once = once
        self._reserve()

    def abort_if_interrupted(self, error: BaseException) -> None:
        """As of the store, which knows what to do."""
        store = self._store()
        if store is not None:
            store.abort_if_interrupted(error)

    # -- forward ------------------------------------------------------------------------------------------------------

    @aborts_when_interrupted
    def begin(self, tape: Tape[Record], name: str) -> Region:
        """A region begins in a forward.

        Raises:
            ConfigError: the user gave a plan of fewer regions.
        """
        region = Region(tape, len(tape.regions) in self.once)
        if self.expected is not None and region.place >= self.expected:
            self._refuse(f"more than {self.expected}")
        Regions.any_once |= region.once
        with self._shared.lock:
            self.last = tape.regions
            tape.regions.append(region.once)
            self._most = max(self._most, len(tape.regions))
            if self._profiler.running:
                region.recorded = self._profiler.region_began(tape, region.place, name, region.once)
        return region

    @aborts_when_interrupted
    def end(self, region: Region) -> None:
        """The forward of a region has ended."""
        if region.recorded is not None:
            with self._shared.lock:
                self._profiler.region_ended(region.recorded)

    def forward_ended(self, tape: Tape[Record]) -> None:
        """A forward has ended.

        Raises:
            ConfigError: the user gave a plan of more regions.
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
        """A region is about to run again: make room for what it will hold, as far as writes under way give any.

        Args:
            region: the region.
            nested: what runs again is a checkpoint inside of it.
        """
        shared, recomputation = self._shared, Recomputation(region, nested)
        with shared.lock:
            region.tape.ran_again = True
            self.passed()
            expected = self._bytes.get(recomputation.key, 0)
            for tier in self.tiers.by_device.values():
                shared.accounts.unpack_wait_s += tier.make_room(expected)
            self._look_at_memory()
            if region.recorded is not None:
                recomputation.held = self._profiler.recomputation_begins(region.recorded, nested=nested)
        self._backward_end.expect()
        return recomputation

    @aborts_when_interrupted
    def ran_again(self, recomputation: Recomputation) -> None:
        """It has run: what it saved is held until backward has used it."""
        key = recomputation.key
        with self._shared.lock:
            self._held.append(recomputation)
            nbytes = recomputation.alive_bytes()
            if recomputation.held is not None:
                self._profiler.recomputation_ended(recomputation.held, nbytes)
            self._bytes[key] = max(nbytes, self._bytes.get(key, 0))
            self._reserve()
            self.passed()
            self._look_at_memory()

    def _look_at_memory(self) -> None:
        """While a step is recorded: a recomputation is between two looks, and backward through its region as well."""
        store = self._store()
        if store is not None and self._profiler.running:
            store.run.look_at_memory(self.tiers)

    def passed(self) -> None:
        """Something else happens: count what recomputations hold still. The lock is held."""
        nbytes, held = 0, []
        for recomputation in self._held:
            alive = recomputation.alive_bytes()
            nbytes += alive
            if alive:
                held.append(recomputation)
            elif recomputation.held is not None:
                self._profiler.recomputation_left(recomputation.held)
        self._held = held
        if nbytes != self._shared.accounts.recomputed_bytes:
            self._shared.accounts.recomputed(nbytes)

    @property
    def hold(self) -> bool:
        """Whether a recomputation was seen to hold something."""
        return bool(self._held)

    def _reserve(self) -> None:
        """Leave what is fetched ahead no room that a recomputation needs at once."""
        again = (nbytes for place, nbytes in self._bytes.items() if place not in self.once)
        self._shared.budget.recompute_bytes = max(again, default=0)


def collectives() -> int | None:
    """How many collectives this process has enqueued so far, over all groups; None where a backend does not count."""
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return 0
    try:
        return sum(int(group._get_sequence_number_for_group()) for group in distributed._world.pg_map)
    except (RuntimeError, AttributeError):
        return None
