"""In which order backward will want the records of a forward, and how far ahead to fetch. Pure: no torch, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import accumulate
from typing import Any, Generic, TypeVar

from .saved_by_node import SavedByNode

R = TypeVar("R")

GROWTH = 1.5
"""A window that was too small grows by this factor ..."""
GROWTH_LIMIT = 8
"""... up to so many times its first size."""
FOR_EVER = 1 << 62
"""Bytes that no forward saves."""
FIRST = 1 / 16
"""Backward has just begun while it was given no more than this share of what a forward saved."""
MOST = 1 / 4
"""Nor does it reach further than over this share of what a forward saved: else all of it would be back at once."""


class LearnedOrders:
    """The orders in which backward really walked earlier tapes, by the tape's signature; the oldest are forgotten."""

    def __init__(self, capacity: int = 64) -> None:
        self._orders: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._capacity = capacity

    def get(self, signature: int) -> tuple[int, ...] | None:
        """The order seen for this signature, or None."""
        return self._orders.get(signature)

    def put(self, signature: int, order: tuple[int, ...]) -> None:
        """Remember the order seen."""
        self._orders[signature] = order
        self._orders.move_to_end(signature)
        if len(self._orders) > self._capacity:
            self._orders.popitem(last=False)


class Window:
    """How far ahead of backward to fetch, in bytes of what it will ask for.

    It grows when backward had to wait, unless the user fixed it or a plan is followed: the plan weighed what waits for
    what a wider window holds in memory, and is made anew where there are more waits than it expected. Unless the
    user or a plan said how wide it is, it is also bounded by what the forward saved: with little, nothing would be
    away.
    """

    def __init__(self, first_bytes: int, *, fixed: bool = False) -> None:
        self.nbytes = first_bytes
        self._first_bytes = first_bytes
        self._most_bytes = first_bytes * GROWTH_LIMIT
        self._fixed = fixed
        self._planned = False

    def over(self, saved_bytes: int) -> int:
        """How far ahead to fetch, in bytes, where a forward saved so many."""
        return self.nbytes if self._fixed or self._planned else min(self.nbytes, int(MOST * saved_bytes))

    def follow(self, nbytes: int) -> None:
        """Fetch so many bytes ahead from now on, as a plan says. Does nothing where the user fixed it."""
        if not self._fixed:
            self.nbytes = nbytes
            self._planned = True

    def start_over(self) -> None:
        """There is no plan any more: begin with the first size again, and grow."""
        self.nbytes = self._first_bytes
        self._planned = False

    def waited(self) -> None:
        """Backward had to wait for a fetch that the window had not begun in time."""
        if not self._fixed and not self._planned:
            self.nbytes = min(self._most_bytes, int(self.nbytes * GROWTH))

    def halve(self) -> None:
        """The device had no memory for what was fetched ahead: fetch half as far from now on, whoever fixed it."""
        self.nbytes = self._most_bytes = max(1, self.nbytes // 2)


class Tape(Generic[R]):
    """The records of one forward in the order in which autograd saved them, and backward's way through them.

    It has more than fifteen attributes, as the order of saving and backward's place in it change together.

    Attributes:
        records: by index; None once released, and for a storage that stays without a record.
        live: records that are not released.
        total_bytes: of all records.
        signature: equal for forwards that saved storages of the same sizes in the same order.
        in_backward: backward has begun on it.
        built: a backward that builds a graph saves it, so that it grows while that backward walks another tape.
        number: which micro-batch it is, from 1; 0 before it has saved anything.
        given_bytes: what backward was given of the records that had moved.
        by_node: what each autograd node saved.
        regions: of each checkpointed region that has begun, in order, whether it runs once; ``ran_again``: backward has
            run one of them again.
        decisions: what was decided of each record, as the store notes it; outlives the records.
        planned: by index, the bytes of a storage that the plan keeps without a record, or -1.
        order: the indices in the order in which backward is expected to come.
    """

    def __init__(self) -> None:
        self.records: list[R | None] = []
        self.live = 0
        self.total_bytes = 0
        self.signature = 0
        self.in_backward = False
        self.built = False
        self.number = 0
        self.given_bytes = 0
        self.by_node = SavedByNode()
        self.regions: list[bool] = []
        self.ran_again = False
        self.decisions: list[Any] = []
        self.planned: tuple[int, ...] = ()
        self._sizes: list[int] = []
        self.order: tuple[int, ...] = ()
        self._position: dict[int, int] = {}
        self._reach: list[int] = [0]
        self._prepared = 0
        self._cursor = 0
        self._frontier = 0
        self._ahead: dict[int, int] = {}
        self._ahead_bytes = 0
        self._seen: list[int] = []
        self._was_seen: set[int] = set()
        self._idle = (-1, 0)

    def __len__(self) -> int:
        return len(self.records)

    def append(self, record: R | None, nbytes: int) -> int:
        """Add a record of so many bytes, or None for a storage that stays without one; returns its index."""
        self._sizes.append(nbytes)
        self.records.append(record)
        self.live += 1
        self.total_bytes += nbytes
        self.signature = hash((self.signature, nbytes))
        return len(self.records) - 1

    def idle_until(self, changes: int, nbytes: int) -> None:
        """There is nothing to look for until a phase begins or this forward has saved so many bytes.

        Args:
            changes: of `Phases`, as they are now.
            nbytes: bytes; `FOR_EVER` when only a phase can change it.
        """
        self._idle = changes, nbytes

    def idle(self, changes: int) -> bool:
        """Whether that still holds; ``changes`` as they are now."""
        return changes == self._idle[0] and self.total_bytes < self._idle[1]

    def forget(self, index: int) -> None:
        """The record at ``index`` was released."""
        if self._sizes[index]:
            self._sizes[index] = 0
            self.records[index] = None
            self.live -= 1
        self._uncount(index)

    def learned(self) -> tuple[int, ...] | None:
        """The order in which backward walked, if it walked at all."""
        return tuple(self._seen) if self._seen else None

    def advance(self, index: int, orders: LearnedOrders) -> bool:
        """Backward has reached the record at ``index``; return whether for the first time."""
        self.prepare(orders)
        self.in_backward = True
        self._uncount(index)
        is_first = index not in self._was_seen
        self.see(index)
        position = self._position.get(index)
        if position is not None:
            self._cursor = max(self._cursor, position + 1)
            self._frontier = max(self._frontier, self._cursor)
        return is_first

    def see(self, index: int) -> None:
        """Backward has come to a storage, and there is nothing to fetch."""
        if index not in self._was_seen:
            self._was_seen.add(index)
            self._seen.append(index)

    def prepare(self, orders: LearnedOrders) -> None:
        """The forward has ended: choose the order in which backward will want the records, unless that was done."""
        count = len(self.records)
        if count == self._prepared:
            return
        self._prepared = count
        self._cursor = self._frontier = 0
        order = orders.get(self.signature)
        self.order = order if order is not None else tuple(range(count - 1, -1, -1))
        self._position = {index: position for position, index in enumerate(self.order)}
        self._reach = [0, *accumulate(self._sizes[index] for index in self.order)]

    def rewind(self) -> None:
        """Backward starts over (``retain_graph``): the same order again. What is ahead stays ahead."""
        self._cursor = self._frontier = 0

    def fetch_ahead(self, window_bytes: int, fetch: Callable[[R, bool], int | None], refill_below: float = 1.0) -> bool:
        """Fetch the records that backward will want within the next ``window_bytes``.

        Records that are in memory count for that distance: the one that is needed last is fetched last, also where it
        is the only one that is away.

        Args:
            window_bytes: how far ahead to look, and how much to have under way at most (one record at least).
            fetch: begins to bring a record, unless it is away and the second argument says that it is too early;
                returns the bytes that makes (0 when it was near already), or None when it did nothing.
            refill_below: do nothing while this share of the window, or more, is under way.

        Returns:
            Whether it has looked for records.
        """
        if self._ahead_bytes >= refill_below * window_bytes:
            return False
        while self._frontier < len(self.order) and self._ahead_bytes < window_bytes:
            index = self.order[self._frontier]
            record = self.records[index]
            if record is not None and index not in self._ahead:
                early = self._reach[self._frontier] - self._reach[self._cursor] >= window_bytes
                nbytes = fetch(record, early)
                if nbytes is None:
                    break
                self._ahead[index] = nbytes
                self._ahead_bytes += nbytes
            self._frontier += 1
        return True

    @property
    def is_first(self) -> bool:
        """Whether what backward asks for now is among what it asks for first."""
        return self.given_bytes <= FIRST * self.total_bytes

    @property
    def exhausted(self) -> bool:
        """Whether nothing of this tape is left to fetch."""
        return self._frontier >= len(self.order)

    def bytes_up_to(self, index: int) -> int:
        """Bytes that backward asks for up to the record at ``index``, that one included."""
        return self._reach[self._position[index] + 1] if index in self._position else 0

    @property
    def left_bytes(self) -> int:
        """Bytes that lie before backward on this tape; what was released unused counts until it is passed."""
        return self._reach[-1] - self._reach[self._cursor]

    def _uncount(self, index: int) -> None:
        self._ahead_bytes -= self._ahead.pop(index, 0)
