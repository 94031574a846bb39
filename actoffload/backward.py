"""Handing records back: what happens between backward's asking for a storage and its having the bytes."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from .errors import OffloaderClosedError
from .events import EventKind, now
from .prefetch import Prefetch
from .record import Record, State
from .recorder import Recorder
from .schedule import Tape
from .scopes import untraced_hook
from .tiers import Core, Mover


class Backward(ABC):
    """The half of a `Storer` that backward meets.

    Attributes:
        core: the lock, the counts and the way to report.
        recorder: notes the step while one is recorded.
        forked: this process is a fork, and has none of the threads.
    """

    core: Core
    recorder: Recorder
    forked: bool
    _movers: Mapping[str, Mover]
    _prefetch: Prefetch

    @abstractmethod
    def _drain(self) -> None:
        """Work off what finalizers have noted. The lock is held."""

    @untraced_hook
    def obtain(self, record: Record, round_: int) -> tuple[torch.UntypedStorage, int, int]:
        """The storage with a record's bytes, the byte of the original at which it begins, and the handle's next round.

        Blocks until the bytes are there.

        Args:
            record: what to bring back.
            round_: how often this handle was unpacked before, as `obtain` said.

        Raises:
            StorageReadError: the only copy could not be read back.
            OffloaderClosedError: the copy went with ``abort()``, or belongs to the parent of a forked process.
        """
        mover = self._movers[record.kind]
        if self.core.to_warn:
            self.core.warn()
        with self.core.lock:
            self._reach(record, round_, mover)
            first = record.state
            near = record.near
            since_s = now()
            if not near and not record.counted:
                mover.make_room(record.nbytes)
            storage = self._fetch_now(record, mover)
            if not near:
                self._count_wait(record, since_s, first)
            begin = record.data_begin
            next_round = self._pass(record, round_)
            if record.waiting <= 0:
                mover.settle(record)
            return storage, begin, next_round

    @untraced_hook
    def fetch_ahead(self, tape: Tape[Record]) -> None:
        """Backward has gone on along a tape: for what C keeps."""
        with self.core.lock:
            self._prefetch.during_backward(tape)

    @untraced_hook
    def passed(self, record: Record, round_: int) -> int:
        """Backward takes a record that stays, which needs nothing from here; the handle's next round, as `obtain`."""
        if self.core.to_warn:
            self.core.warn()
        with self.core.lock:
            self._reach(record, round_, self._movers[record.kind])
            return self._pass(record, round_)

    def _reach(self, record: Record, round_: int, mover: Mover) -> None:
        """Backward has come to a record."""
        self._drain()
        mover.notice_resized()
        mover.pump()
        if self.core.accounts.recomputed_bytes:
            self.core.accounts.recomputed(0)  # backward is done with the block that it recomputed last
        self._prefetch.walk(record, round_)

    def _pass(self, record: Record, round_: int) -> int:
        """Backward has its bytes, and goes on; the handle's next round."""
        if self.recorder.running:
            self.recorder.needed(record)
        if round_ <= record.round:
            record.waiting -= 1
        else:  # a second unpack of this handle: everybody may ask again
            record.round = round_
            record.waiting = record.handles - 1
        if record.tape is not None:
            self._prefetch.during_backward(record.tape)
        return record.round + 1

    def _fetch_now(self, record: Record, mover: Mover) -> torch.UntypedStorage:
        record.error = None  # a prefetch that failed is tried once more
        while True:
            if not record.near and (self.core.inert or self.forked):
                where = "in a forked process" if self.forked else "after abort()"
                raise OffloaderClosedError(f"a saved tensor of {record.nbytes} bytes was asked for {where}")
            mover.bring(record, urgent=True)
            storage = mover.ready(record)
            if storage is not None:
                return storage
            self.core.changed.wait()
            if record.error is not None:
                error, record.error = record.error, None
                # A copy: the engine's own is in a cycle with the engine's frames, which would hold the handle as well.
                raise copy.copy(error) from error

    def _count_wait(self, record: Record, since_s: float, first: State) -> None:
        if first in (State.FETCHING, State.SPILLED):
            self.core.accounts.unpack_wait_s += now() - since_s
            self.core.event(EventKind.UNPACK_WAIT, record, since_s=since_s)
            self._prefetch.window.waited()
