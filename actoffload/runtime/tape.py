"""The order in which backward will need the records of a forward, and how far ahead to fetch. No torch, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar

R = TypeVar("R")

GROWTH = 1.5
"""A window that was too small grows by this factor ..."""
GROWTH_LIMIT = 8
"""... up to this multiple of its first size."""
FOR_EVER = 1 << 62
"""More bytes than any forward saves."""
MOST = 1 / 4
"""The window spans at most this share of the bytes that a forward saved: else all would be back at once."""
MANY = 8
"""PyTorch's own operations save fewer storages than this; a compiled graph saves all its storages in one node."""


class LearnedOrders(OrderedDict[int, tuple[int, ...]]):
    """The orders in which backward walked earlier tapes, by signature; the oldest are dropped."""

    def __init__(self, capacity: int = 64) -> None:
        super().__init__()
        self._capacity = capacity

    def put(self, signature: int, order: tuple[int, ...]) -> None:
        """Store an observed order."""
        self[signature] = order
        self.move_to_end(signature)  # assigning to a present key leaves it in its old place
        if len(self) > self._capacity:
            self.popitem(last=False)


class Window:
    """The prefetch window: how many bytes ahead of backward to fetch.

    It grows when backward had to wait, unless the user or a plan set it. A plan has weighed its waits against the
    memory of a wider window, and is replaced if there are more waits than it expected. A window that neither has set
    is also bounded by a share of the forward's bytes: without the bound, all of a small forward would be back at once.
    """

    def __init__(self, first_bytes: int, *, fixed: bool = False) -> None:
        self.nbytes = first_bytes
        self._first_bytes = first_bytes
        self._most_bytes = first_bytes * GROWTH_LIMIT
        self._fixed = fixed
        self._planned = False

    def over(self, saved_bytes: int) -> int:
        """Return the window in bytes over a forward that saved ``saved_bytes``."""
        return self.nbytes if self._fixed or self._planned else min(self.nbytes, int(MOST * saved_bytes))

    def follow(self, nbytes: int) -> None:
        """Use the window of a plan from now on, unless the user fixed it."""
        if not self._fixed:
            self.nbytes = nbytes
            self._planned = True

    def start_over(self) -> None:
        """Return to the first size, and grow again, as there is no plan any more."""
        self.nbytes = self._first_bytes
        self._planned = False

    def waited(self) -> None:
        """Grow, as backward had to wait for a fetch that began too late."""
        if not self._fixed and not self._planned:
            self.nbytes = min(self._most_bytes, int(self.nbytes * GROWTH))

    def halve(self) -> None:
        """Halve the window and its bound, even if the user or a plan set it: the device had no memory to prefetch."""
        self.nbytes = self._most_bytes = max(1, self.nbytes // 2)


class Walk(Generic[R]):
    """Backward's way along a tape: the order of the records, the position in it, and how far ahead they are fetched."""

    def __init__(self) -> None:
        self.length = 0  # of the tape as the order was chosen
        # The number of regions that had begun before the last save of the record that backward has come to.
        self.mark = 0
        self.ran_again = False  # backward has run a region again
        # Nothing to prefetch while `Phases.changes` is this number and the forward has saved less than these bytes.
        self.idle = (-1, 0)
        self.ahead: dict[int, int] = {}  # by index, the bytes of each record that was fetched ahead and not reached
        self.ahead_bytes = 0
        self.seen: dict[int, None] = {}  # the indices that backward reached, in order
        self._order: tuple[int, ...] = ()
        self._position: dict[int, int] = {}
        self._reach: list[int] = [0]
        self._cursor = self._frontier = 0

    def begin(self, order: tuple[int, ...], sizes: Sequence[int], length: int) -> None:
        """Begin to walk along an order of indices; ``sizes``: the bytes at each index of the tape."""
        self.length, self._order = length, order
        self._position = {index: position for position, index in enumerate(order)}
        self._reach = [0, *accumulate(sizes[index] for index in order)]
        self._cursor = self._frontier = 0

    def reach(self, index: int) -> bool:
        """Note that backward has reached the record at ``index``; return whether for the first time."""
        is_first = index not in self.seen
        self.seen[index] = None  # a known one stays in its place
        self.ahead_bytes -= self.ahead.pop(index, 0)
        position = self._position.get(index)
        if position is not None:
            if position >= self._cursor:  # never back: backward may reach records out of this order
                self._cursor = position + 1
            if self._cursor > self._frontier:  # no fetch of a record that backward has passed
                self._frontier = self._cursor
        return is_first

    def rewind(self) -> None:
        """Start again at the first record of the order (``retain_graph``)."""
        # `ahead` stays: those records are still in memory for backward, and take room in the window.
        self._cursor = self._frontier = 0

    def fetch_ahead(
        self,
        records: Sequence[R | None],
        window_bytes: int,
        fetch: Callable[[R, bool], int | None],
        refill_below: float = 1.0,
    ) -> bool:
        """Fetch the records that backward will need within the next ``window_bytes``; return whether it looked for any.

        Records in memory count for that distance. So the record that backward needs last is fetched last, even if all
        records before it are in memory.

        Args:
            records: of the tape.
            window_bytes: how far ahead to look, and how many bytes to have under way at most (one record at least).
            fetch: begins to fetch a record; if the second argument is true, it is too early for a record that has left.
                Returns the bytes that this brings (0 for a record in memory), or None if it did nothing.
            refill_below: do nothing while at least this share of the window is under way.
        """
        if self.ahead_bytes >= refill_below * window_bytes:
            return False
        while self._frontier < len(self._order) and self.ahead_bytes < window_bytes:
            index = self._order[self._frontier]
            record = records[index]
            if record is not None and index not in self.ahead:  # else released, or fetched before a `rewind`
                early = self._reach[self._frontier] - self._reach[self._cursor] >= window_bytes
                nbytes = fetch(record, early)
                if nbytes is None:
                    break  # `_frontier` stays here, so that the next call tries this record again
                self.ahead[index] = nbytes
                self.ahead_bytes += nbytes
            self._frontier += 1
        return True

    @property
    def exhausted(self) -> bool:
        """Whether every record of the order was fetched or passed."""
        return self._frontier >= len(self._order)

    @property
    def left_bytes(self) -> int:
        """Bytes that backward has yet to pass on this tape, with records that were released unused."""
        return self._reach[-1] - self._reach[self._cursor]


class SavedByNode:
    """The saves of one forward by autograd node: no storage of a node can leave while the node runs."""

    def __init__(self) -> None:
        self.node_bytes = 0  # saved so far by the node that saved last
        self.largest_bytes = 0  # the most that one node with `MANY` storages or more has saved
        self._node = -1
        self._count = 0

    def saved(self, node: int, nbytes: int) -> bool:
        """Count a new storage; return whether its node has saved `MANY` or more.

        ``node``: a number that differs between consecutive nodes.
        """
        if node != self._node:
            self._node, self._count, self.node_bytes = node, 1, nbytes
            return False
        self._count += 1
        self.node_bytes += nbytes
        if self._count < MANY:
            return False
        self.largest_bytes = max(self.largest_bytes, self.node_bytes)
        return True

    def most_of(self, total_bytes: int) -> int:
        """Return the bytes of the node that saved more than half of a forward's ``total_bytes``; 0 if none has."""
        return self.largest_bytes if 2 * self.largest_bytes > total_bytes else 0


class Tape(Generic[R]):
    """The records of one forward in the order in which autograd saved them."""

    def __init__(self) -> None:
        self.records: list[R | None] = []  # None once released, and for a storage that stays without a record
        self.live = 0  # places that are not released
        self.total_bytes = 0  # of all records
        self.signature = 0  # equal for forwards that saved storages of the same sizes in the same order
        self.number = 0  # of its micro-batch, from 1
        self.built = False  # saved by a backward that builds a graph: it grows while that walks another tape
        self.by_node = SavedByNode()
        self.regions: list[bool] = []  # whether each checkpointed region that has begun runs once
        self.region: Any = None  # the profiler's entry of the region that runs, while a step is recorded
        self.decisions: list[Any] = []  # on each record, as the store appends them; they outlive the records
        self.planned: tuple[int, ...] = ()  # the bytes of each storage that the plan keeps without a record, or -1
        self.walk: Walk[R] = Walk()
        self._sizes: list[int] = []
        self.began_before: list[int] = []  # how many regions had begun before the last save of each record
        self._ends: list[int] = []

    def __len__(self) -> int:
        return len(self.records)

    def append(self, record: R | None, nbytes: int) -> int:
        """Append a record of ``nbytes``, or None for a storage that stays without a record; return its index."""
        self._sizes.append(nbytes)
        self.began_before.append(len(self.regions))
        self.records.append(record)
        self.live += 1
        self.total_bytes += nbytes
        self.signature = hash((self.signature, nbytes))
        return len(self.records) - 1

    def forget(self, index: int) -> None:
        """Free the place of a released record."""
        if self._sizes[index]:  # 0: it was freed before, and `live` counts each place once
            self._sizes[index] = 0
            self.records[index] = None
            self.live -= 1
        self.walk.ahead_bytes -= self.walk.ahead.pop(index, 0)  # a record that dies unused takes no room in the window

    @property
    def in_backward(self) -> bool:
        """Whether backward has begun on it."""
        return bool(self.walk.seen)

    def advance(self, index: int, orders: LearnedOrders) -> bool:
        """Note that backward has reached the record at ``index``; return whether for the first time."""
        self.prepare(orders)  # first: the way is along the order that it chooses
        return self.walk.reach(index)

    def region_begins(self, once: bool) -> None:
        """Note that a checkpointed region begins; ``once``: it runs once."""
        self.regions.append(once)
        self._ends.append(FOR_EVER)

    def region_ends(self, place: int) -> None:
        """Note that the region at ``place`` has ended."""
        self._ends[place] = len(self.records)

    def saved_again(self, tape: object, index: int) -> None:
        """Note that this forward saves a record of ``tape`` again, for which backward needs it first."""
        if tape is self:
            self.began_before[index] = len(self.regions)

    @property
    def runs_once(self) -> int | None:
        """The place of the region, run once, whose forward runs; None outside of such regions."""
        place = len(self.regions) - 1
        return place if place >= 0 and self.regions[place] and self._ends[place] == FOR_EVER else None

    def come_to(self, index: int) -> int | None:
        """Note that backward comes to the record at ``index``.

        Return the place of the region, run once, that was the last to save it, so that backward is in it; or None.
        """
        self.walk.mark = self.began_before[index]
        place = self.walk.mark - 1
        return place if place >= 0 and self.regions[place] and index < self._ends[place] else None

    def prepare(self, orders: LearnedOrders) -> None:
        """Choose the order in which backward will need the records, unless no save came since the last choice."""
        length = len(self.records)
        if length != self.walk.length:
            order = orders.get(self.signature)  # else the reverse of saving, which backward usually follows
            self.walk.begin(tuple(range(length - 1, -1, -1)) if order is None else order, self._sizes, length)
