"""What happens to each saved storage between pack and the death of its last handle. Knows no hooks and no views."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .accounts import MANY_NOTES
from .assembly import Tiers
from .backward import Backward
from .config import OffloadConfig
from .cpu_tier import CpuMover
from .device import Accelerator
from .events import EventKind, now, open_sink
from .handles import KeptActivation
from .identity import Counter, IdentityMap, ModuleOwners, StorageSet, live_modules
from .phases import Phases
from .placement import Latest, Placement
from .planner import Plan, decided
from .policy import KeepReason
from .prefetch import Prefetch
from .record import Record
from .recorder import Recorder, SavedStorage
from .schedule import Tape, Window
from .scopes import untraced_hook
from .statistics import Statistics
from .summary import render_report
from .tiers import Core, Mover

CPU_MIN_BYTES = 128 << 10
DEVICE_MIN_BYTES = 1 << 20
CPU_PREFETCH_BYTES = 64 << 20
DEVICE_PREFETCH_BYTES = 128 << 20


class Storer(Backward):
    """Takes storages in, moves them, hands them back: the offloader without its hooks.

    Args:
        config: the options.
        accelerator: drives the tensors' device; None picks by device type. Tests pass a simulated one.
    """

    def __init__(self, config: OffloadConfig, accelerator: Accelerator | None = None) -> None:
        self.config = config
        self.core = Core(config, open_sink(config.trace))
        self.notes = StorageSet()
        self.owners = ModuleOwners()
        self.closed = self.forked = False
        self._lane: Any = None
        self._began_s = now()
        self._identities: IdentityMap[Record] = IdentityMap()
        self._dropped: deque[tuple[Record, int]] = self.core.lock.noted
        self._least_bytes: dict[str, int] = {}
        self._latest = Latest()
        self._following_bytes: int | None = None
        self.core.lock.after_release = weakref.WeakMethod(self._drain_if_free)
        self.tiers = Tiers(self.core, accelerator)
        self._movers = self.tiers.movers
        for device in self._movers:
            least = CPU_MIN_BYTES if device == "cpu" else DEVICE_MIN_BYTES
            self._least_bytes[device] = max(1, config.size("min_bytes", least))
        self.recorder = Recorder(self.tiers.stopwatch())
        first = CPU_PREFETCH_BYTES if isinstance(self._movers.get("cpu"), CpuMover) else DEVICE_PREFETCH_BYTES
        window = Window(config.size("prefetch_bytes", first), fixed=config.prefetch_bytes is not None)
        if isinstance(config.policy, Plan):
            if config.policy.prefetch_bytes is not None:
                window.follow(config.policy.prefetch_bytes)
            for mover in self._movers.values():
                mover.expect_pending(config.policy.pending_bytes)
        phases: Phases[Tape[Record]] = Phases()
        self._prefetch = Prefetch(self.core, self._movers, window, phases)
        self._placement = Placement(config, window, phases)

    # -- forward ------------------------------------------------------------------------------------------------------

    def learn(self, model: nn.Module | None) -> None:
        """Note the parameters and buffers of a model, or of every live module when there is none."""
        modules: Iterable[nn.Module] = live_modules() if model is None else model.modules()
        self.owners.add(modules)

    def admit(
        self,
        tensor: Tensor,
        span: tuple[int, int],
        storage: Any,
        tape: Tape[Record],
        module: str | None,
        counters: tuple[Counter, ...] = (),
    ) -> Record:
        """A handle's record for a span of a storage: an earlier one where it holds the same bytes, else a new one.

        Args:
            tensor: the tensor being saved, without conjugate and negative bits.
            span: the bytes of the storage that it needs.
            storage: its storage.
            tape: the forward that it is saved in.
            module: the name of the module that is running, if names are known.
            counters: of the wrapper subclasses around the tensor, outermost first.
        """
        core = self.core
        if core.to_warn:
            core.warn()
        address = storage.data_ptr()
        begin, end = span
        with core.lock:
            self._drain()
            self._movers[tensor.device.type].notice_resized()
            core.accounts.packed_tensors += 1
            core.accounts.packed_bytes += end - begin
            record = self._identities.find(storage, address, tensor, begin, end, counters)
            new = record is None
            if record is not None:
                core.accounts.deduplicated_bytes += end - begin
                self.recorder.saved_again(record)
            else:
                record = Record(storage, address, begin, end, tensor.device)
                record.module = module
                record.identity = self._identities.add(storage, address, tensor, begin, end, record, counters)
                core.accounts.born(record.nbytes)
                if not len(tape):
                    self._prefetch.phases.begin_forward(tape)
                record.tape, record.index = tape, tape.append(record)
            record.handles += 1  # before anything that may let go of the lock
            record.waiting += 1
            if new:
                try:
                    self._place(record, tensor, tape)
                except BaseException:  # a policy's, or an interrupt: no handle will own it
                    self._dropped.append((record, record.round))
                    self._drain()
                    raise
        return record

    @untraced_hook
    def _place(self, record: Record, tensor: Tensor, tape: Tape[Record]) -> None:
        """Decide what becomes of a new record, and begin it."""
        mover = self._movers[record.kind]
        mover.pump()
        mover.count_near(record)
        if self.core.sink is not None:
            self.core.event(EventKind.PACK, record, record.module or "")
        if self.forked:
            reason: KeepReason | None = KeepReason.FORKED
        elif self.closed or self.core.inert:
            reason = KeepReason.DEGRADED
        else:
            reason = self._placement.why_keep(record, tensor, tape)
        if reason is None:
            reason = mover.begin(record)
        if record.nbytes > self.core.largest_bytes:
            self.core.largest_bytes = record.nbytes
        if self.core.device_budget is not None:
            # Whether this one stays or not, room for the next: it exists before it is saved.
            self._following_bytes = self._placement.following_bytes(record)
            self._make_room(mover)
        if reason is None:
            self.core.accounts.moved_bytes += record.nbytes
            if record.nbytes > self.core.largest_moved_bytes:
                self.core.largest_moved_bytes = record.nbytes
        else:
            self._stay(record, reason)
        if self.recorder.running:
            self.recorder.saved(record, reason)
        self._prefetch.during_forward(tape)
        self._note_decision(record, reason, tape)

    def _stay(self, record: Record, reason: KeepReason) -> None:
        record.stays = True
        self.core.accounts.kept_bytes[reason._value_] += record.nbytes
        if self.core.sink is not None:
            self.core.event(EventKind.KEEP, record, reason.value)

    def _note_decision(self, record: Record, reason: KeepReason | None, tape: Tape[Record]) -> None:
        self._latest.decisions = tape.decisions
        tape.decisions.append((record.nbytes, reason, record.module))

    @untraced_hook
    def begin_alone(self, record: Record) -> bool:
        """Begin to move what is known to move, for C, which does the rest; True: it stays, and all was done."""
        reason = self._movers[record.kind].begin(record)
        if reason is None:
            return False
        assert record.tape is not None, "C has given it one"
        if record.nbytes > self.core.largest_bytes:
            self.core.largest_bytes = record.nbytes
        self._stay(record, reason)
        self._note_decision(record, reason, record.tape)
        return True

    def _make_room(self, mover: Mover) -> None:
        following = self.core.largest_bytes if self._following_bytes is None else self._following_bytes
        self.core.accounts.pack_wait_s += mover.make_room(following)

    @untraced_hook
    def look_at(self, device: str) -> None:
        """Look at what must be looked at whenever something is saved: for what C keeps."""
        with self.core.lock:
            self._drain()
            self._movers[device].notice_resized()
            self._movers[device].pump()

    @untraced_hook
    def look_ahead(self, tape: Tape[Record]) -> None:
        """Whether the forward is near its end, and another's backward wants to be begun: for what C keeps."""
        with self.core.lock:
            self._prefetch.during_forward(tape)

    def kept_static(self, reason: KeepReason, nbytes: int) -> None:
        """Count a tensor that stays and is no activation."""
        notes = self.core.accounts.notes
        notes.append((reason._value_, nbytes, False))
        if len(notes) >= MANY_NOTES:
            self.settle_notes()

    @untraced_hook
    def settle_notes(self) -> None:
        """Count what has been noted since it was last done."""
        with self.core.lock:
            self._drain()

    def kept(self, handle: KeptActivation, reason: KeepReason, device: torch.device) -> None:
        """An activation stays without a record, and its handle has noted it: make room for it, and record it."""
        if self.core.device_budget is None and not self.recorder.running and len(self.core.accounts.notes) < MANY_NOTES:
            return
        with self.core.lock:
            self._drain()
            mover = self._movers.get(device.type)
            if self.core.device_budget is not None and reason is not KeepReason.IN_BACKWARD and mover is not None:
                self._make_room(mover)
            handle.entry = self.recorder.kept(handle.nbytes, reason)

    def why_unfit(self, device: str, nbytes: int) -> KeepReason | None:
        """Why a tensor of this device and size stays, or None."""
        least = self._least_bytes.get(device)
        if least is None:
            return KeepReason.DEVICE
        if nbytes < least:
            return KeepReason.SMALL
        return KeepReason.CAPTURE if self._movers[device].capturing() else None

    # -- the end of a handle ------------------------------------------------------------------------------------------

    def drop(self, record: Record, round_: int) -> None:
        """A handle died. May be called anywhere, also inside our own lock: never blocks."""
        self._dropped.append((record, round_))
        self._drain_if_free()

    def drop_kept(self, nbytes: int, entry: SavedStorage | None) -> None:
        """A kept tensor without a record died. May be called anywhere."""
        if entry is not None:
            self.recorder.kept_died(entry)
        self.core.accounts.notes.append(nbytes)

    def _drain_if_free(self) -> None:
        while self._dropped:
            last = self.core.lock.run_if_free(self._drain_and_look)
            if last is None:
                return  # who gives the lock back goes on
            if last:  # closing joins threads, and this may be one of them
                threading.Thread(target=self._shut, kwargs={"wait": True}, name="actoffload-close", daemon=True).start()

    def _drain_and_look(self) -> bool:
        """Work off the notes; whether it was the last handle after `close`, so that nothing more will come."""
        self._drain()
        return self.closed and self.core.accounts.live_records == 0 and not self.core.inert

    def nothing_is_alive(self) -> bool:
        """Whether no record is, those of handles that died just now counted out."""
        with self.core.lock:
            self._drain()
            return self.core.accounts.live_records == 0

    @untraced_hook
    def drain(self) -> None:
        """Work off what finalizers have noted, for C. The lock is held."""
        self._drain()

    def _drain(self) -> None:
        accounts = self.core.accounts
        if accounts.notes:
            accounts.settle()
        while self._dropped:
            record, round_ = self._dropped.popleft()
            record.handles -= 1
            if round_ <= record.round:
                record.waiting -= 1
            if record.handles == 0:
                self._release(record)
            elif record.waiting <= 0:
                self._movers[record.kind].settle(record)
        if accounts.recomputed_bytes and not accounts.baseline_bytes:
            accounts.recomputed(0)  # backward is over

    def _release(self, record: Record) -> None:
        self._movers[record.kind].release(record)
        if self.recorder.running:
            self.recorder.died(record)
        if record.identity is not None:
            self._identities.remove(record.identity, record)
        tape = record.tape
        if tape is not None:
            tape.forget(record.index)
            self._prefetch.learn(tape)
        self.core.accounts.died(record.nbytes)
        if self.core.sink is not None:
            self.core.event(EventKind.RELEASE, record)
        self.core.changed.notify_all()

    # -- life ---------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until nothing is on its way out: every copy and write begun has ended."""
        with self.core.lock:
            self._drain()
            self._flush()
            while self.core.pending_bytes > 0 and not self.core.inert:
                self.core.changed.wait()
                self._flush()  # what came meanwhile may wait for others
        self.core.warn()

    def _flush(self) -> None:
        for mover in () if self.core.inert else self._movers.values():
            mover.flush()

    def close(self) -> None:
        """Take no more work and wait for what is under way. Idempotent.

        What is still alive stays usable: backward can still read it, and the disk space goes when its last handle dies.
        """
        if self.forked:
            return
        self._take_no_more()
        self.synchronize()
        if self.nothing_is_alive():
            self._shut(wait=True)

    def abort(self) -> None:
        """Stop at once: cancel what is queued and give everything back; what is not in memory is lost. Idempotent."""
        self._take_no_more()
        if not self.forked:
            self._shut(wait=False)

    def _take_no_more(self) -> None:
        self.closed = True
        if self._lane is not None:
            self._lane.close()

    def _shut(self, *, wait: bool) -> None:
        with self.core.lock:
            self.core.inert = True
            self.core.changed.notify_all()
        self.tiers.close(wait=wait)
        closer = getattr(self.core.sink, "close", None)
        if closer is not None:
            closer()

    def after_fork_in_child(self) -> None:
        """The child has none of our threads: it keeps what it saves and gives up what is not in memory."""
        self.forked = True
        if self._lane is not None:
            self._lane.close()
        self.recorder.active = False
        self.core.after_fork_in_child()
        self.tiers.after_fork_in_child()

    # -- reports ------------------------------------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """What was done since the offloader began."""
        self.core.warn()
        self.tiers.count_waits()
        elsewhere = self.tiers.counts()
        with self.core.lock:
            self._drain()
            statistics = self.core.accounts.freeze(**elsewhere)
            last = self.closed and statistics.live_records == 0 and not self.core.inert
        if last:
            self._shut(wait=True)
        return statistics

    def report(self) -> str:
        """What was done and why, for a person."""
        spool = self.tiers.spool
        notes = [*self.tiers.notes, *self.core.advice.values()]
        spooled = spool.statistics() if spool else None
        return render_report(self.config, self.statistics(), spooled, notes, now() - self._began_s)

    @property
    def plan(self) -> Plan:
        """What was decided in the last forward, as data; given as ``policy=``, it is followed."""
        return decided(self._latest.decisions or ())
