"""Memory that is registered with an io_uring: its pages are looked up once, not in every transfer.

The pool that owns the memory says what comes and what goes, in any thread; the thread that the ring belongs to carries
it out between its transfers. What has been told is known before any transfer that was asked for later is started, so
that no transfer ever goes by a registration of memory that has been unmapped, and mapped anew, since.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

from .ring import Ring

PLACES = 4096
"""Pieces that are registered at once, at most; the kernel's own limit is 16,384."""
MAX_PIECE_BYTES = 1 << 30
"""Of one registration: the kernel's limit. A transfer that reaches over the end of a piece goes as any other does."""

Change = tuple[bool, int, int]
"""Whether memory comes or goes, its address and its length in bytes."""


class Registered:
    """What memory is registered with a ring, and where. What does not say otherwise is for the ring's own thread.

    Args:
        ring: The ring; not enabled yet.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._told: deque[Change] = deque()
        self._pieces: list[tuple[int, int, int]] = []  # address, end and place, in order
        self._places: list[int] = []  # those that are free
        self._refused: list[tuple[int, int, str]] = []  # address, end and why
        self._reason = ""  # what holds to the end
        try:
            ring.make_places(PLACES)
        except OSError as exc:
            self._reason = f"this kernel registers no memory one by one ({exc.strerror})"
        else:
            self._places += range(PLACES - 1, -1, -1)

    @property
    def nbytes(self) -> int:
        """Bytes that are registered. From any thread."""
        return sum(end - begin for begin, end, _ in tuple(self._pieces))

    @property
    def refusal(self) -> str:
        """Why some memory is not registered, or an empty text. From any thread."""
        return self._reason or next((reason for _, _, reason in tuple(self._refused)), "")

    def told(self, comes: bool, address: int, nbytes: int) -> None:
        """Takes a note that memory comes, or goes; nothing uses it at that moment. From any thread."""
        self._told.append((comes, address, nbytes))

    def take_notes(self) -> Sequence[Change]:
        """The notes since the last time: to be called after the requests were taken that are started next."""
        notes = []
        while self._told:
            notes.append(self._told.popleft())
        return notes

    def carry_out(self, notes: Sequence[Change]) -> None:
        """Does what the notes say. What cannot be registered is used as it is, and so is everything after an error."""
        try:
            self._carry_out(notes)
        except BaseException as exc:  # a note that is lost would leave memory known that is there no more
            self._pieces.clear()
            self._places.clear()
            self._reason = f"given up after {type(exc).__name__}"

    def _carry_out(self, notes: Sequence[Change]) -> None:
        coming: list[tuple[int, int]] = []
        for comes, address, nbytes in notes:
            begin, end = address, address + nbytes
            coming = [piece for piece in coming if piece[1] <= begin or end <= piece[0]]  # it has gone meanwhile
            self._remove(begin, end)  # nothing lies in two pieces: one of them would be of memory that is gone
            if comes:
                coming.append((begin, end))
        for begin, end in coming:
            for part in range(begin, end, MAX_PIECE_BYTES):
                self._add(part, min(part + MAX_PIECE_BYTES, end))

    def place_of(self, address: int, nbytes: int) -> int | None:
        """Where memory is registered; None: it is not, or not in one piece."""
        index = bisect_right(self._pieces, (address, 1 << 64, 0)) - 1
        if index < 0:
            return None
        _, end, place = self._pieces[index]
        return place if address + nbytes <= end else None

    def _add(self, begin: int, end: int) -> None:
        if not self._places:
            if not self._reason:
                self._refused.append((begin, end, f"{PLACES} pieces are registered already"))
            return
        try:
            self._ring.put(self._places[-1], begin, end - begin)
        except OSError as exc:
            reason = f"the kernel refused {end - begin} bytes: {exc.strerror}; see `ulimit -l`"
            self._refused.append((begin, end, reason))
            return
        self._pieces.insert(bisect_right(self._pieces, (begin, 0, 0)), (begin, end, self._places.pop()))

    def _remove(self, begin: int, end: int) -> None:
        self._refused = [piece for piece in self._refused if piece[1] <= begin or end <= piece[0]]
        for piece in [piece for piece in self._pieces if piece[0] < end and begin < piece[1]]:
            self._pieces.remove(piece)
            try:
                self._ring.put(piece[2], 0, 0)
            except OSError as exc:  # its pages stay held until the ring is closed, and nobody goes by it any more
                self._reason = f"the kernel keeps {piece[1] - piece[0]} bytes: {exc.strerror}"
            else:
                self._places.append(piece[2])


__all__ = ["MAX_PIECE_BYTES", "PLACES", "Registered"]
