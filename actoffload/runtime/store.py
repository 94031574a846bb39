"""What happens to each saved storage between pack and the death of its last handle. Knows no hooks and no views."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config import OffloadConfig
from ..errors import OffloaderClosedError
from ..events import EventKind, now
from ..interrupts import aborts_when_interrupted, is_interrupt
from ..planning.plan import Plan, decided
from ..policy import KeepReason
from ..statistics import Statistics
from ..tiers.accelerator import Accelerator
from ..tiers.accounts import MANY_DEFERRED
from ..tiers.cpu_tier import CpuTier
from ..tiers.record import Record, State
from ..tiers.shared import Shared
from ..tiers.tier import Tier
from ..tiers.tiers import Tiers
from .backward_end import BackwardEnd
from .decision import OffloadDecision
from .identity import Counter, IdentityMap
from .kept_place import KeptPlace
from .out_of_memory import OutOfMemory
from .pipeline import Hint, Phases
from .prefetch import Prefetch, first_window
from .profiler import Profiler, SavedStorage
from .regions import Regions
from .run_so_far import RunSoFar
from .tape import Tape
from .trace import Recorder, trace_path

CPU_MIN_BYTES = 128 << 10
DEVICE_MIN_BYTES = 1 << 20
SHORT_WAIT_S = 1e-4
"""A wait for room is an event of its own only above this."""


class ActivationStore:
    """Take storages in, move them, and hand them back: the offloader without its hooks.

    Handles own the records. A handle that dies calls `drop`, which may run anywhere, as a finalizer does: it notes the
    death in a list, and whoever holds the lock, or finds it free, counts it.

    An interrupt (Ctrl-C, or whatever a signal's handler raises) inside of it may leave records and counts half changed.
    So whoever catches an exception calls `abort_if_interrupted`: the store ends, what its handles still need is lost,
    and the offloader makes another store. It has more than fifteen attributes, as the parts of a step meet here.

    Args:
        config: the options.
        accelerator: drives the tensors' device; None picks by device type. Tests pass a simulated one.

    Attributes:
        shared: the lock, the counts, the budget and the reporter.
        tiers: the spool, the host memory and a tier for each type of device.
        prefetch: brings back what backward needs next.
        decision: says what stays; ``regions``: which checkpointed regions run once.
        profiler: notes a step while one is recorded.
        identities: the live records by storage.
        trace: takes down the steps; None when nobody asks for a file of them.
        closed: nothing more is taken; ``forked``: this process is a fork and has none of the threads.
        interrupted: it was aborted by an interrupt.
        run: when it began, and what it found.
        out_of_memory: the errors of the device's allocator.
    """

    def __init__(self, config: OffloadConfig, accelerator: Accelerator | None = None) -> None:
        self.shared = Shared(config, config.trace if callable(config.trace) else None)
        self.closed = self.forked = self.interrupted = False
        self.identities = IdentityMap()
        self.run = RunSoFar(self.shared.accounts)
        self._dropped: deque[tuple[Record | KeptPlace, int]] = self.shared.lock.noted
        self._decisions: list[tuple[int, KeepReason | None, str | None]] = []
        self._following_bytes: int | None = None
        self._backward_end = BackwardEnd(self._backward_ended)
        self._swallowed: BaseException | None = None
        path = trace_path(config)  # before anything is opened
        self.shared.lock.after_release = weakref.WeakMethod(self._count_dropped_if_free)
        self.tiers = Tiers(self.shared, accelerator)
        self.out_of_memory = OutOfMemory(config, self.shared.accounts, self.tiers)
        self.profiler = Profiler(self.tiers.stopwatch())
        window = first_window(config, on_cpu=isinstance(self.tiers.by_device.get("cpu"), CpuTier))
        phases = Phases()
        self.prefetch = Prefetch(self.shared, self.tiers.by_device, window, phases)
        self.decision = OffloadDecision(config, window, phases)
        self.regions = Regions(self, self._backward_end)
        self.trace = None if path is None else Recorder(path, self.shared, self.tiers)

    # -- forward ------------------------------------------------------------------------------------------------------

    @aborts_when_interrupted
    def begin_forward(self, *, first: bool) -> None:
        """A context is entered; ``first``: nothing is alive, so that a step begins with it."""
        accounts = self.shared.accounts
        with self.shared.lock:
            self._count_dropped()
            self.run.count_optimizer_steps()
            self.prefetch.begin_forward()
            for tier in self.tiers.by_device.values():
                tier.begin_forward()
            if first:
                accounts.begin_step()
            self.run.forward_begins(self.tiers, first=first)
            if first and (self.profiler.running or self.shared.config.device_memory is not None):
                self.run.begin_looking(self.tiers, recorded=bool(self.profiler.running))
            accounts.steps += 1

    @property
    def min_bytes(self) -> dict[str, int]:
        """The size of the smallest tensor that moves, by the types of device from which something moves."""
        size = self.shared.config.size
        least = {"cpu": CPU_MIN_BYTES}
        return {
            device: max(1, size("min_bytes", least.get(device, DEVICE_MIN_BYTES))) for device in self.tiers.by_device
        }

    def admit(
        self,
        tensor: Tensor,
        span: tuple[int, int],
        storage: Any,
        tape: Tape[Record],
        names: tuple[str | None, str | None],
        counters: tuple[Counter, ...] = (),
    ) -> Record:
        """Return a handle's record for a span of a storage: an earlier one that holds the same bytes, else a new one.

        Args:
            tensor: the tensor being saved, without conjugate and negative bits.
            span: the bytes of the storage that it needs.
            storage: its storage.
            tape: the forward that it is saved in.
            names: of the module that is running, and of the tensor, where they are known.
            counters: of the wrapper subclasses around the tensor, outermost first.
        """
        shared, accounts = self.shared, self.shared.accounts
        self.speak()
        begin, end = span
        with shared.lock:
            self._count_dropped()
            tier = self.tiers.by_device[tensor.device.type]
            tier.notice_resized()
            accounts.packed_tensors += 1
            accounts.packed_bytes += end - begin
            record = self.identities.find(storage, tensor, span, counters)
            if record is not None:
                accounts.deduplicated_bytes += end - begin
                tier.saved_again(record, tensor)
                record.handles += 1
                record.waiting += 1
                if names[1] is not None and record.name is None:
                    self.decision.named_late(record, names[1])
                return record
            record = Record(storage, storage.data_ptr(), begin, end, tensor.device)
            record.module, record.name = names
            record.has_gaps = tensor.nbytes < record.nbytes
            self.identities.add(record, tensor, counters)
            accounts.add_record(record.nbytes)
            if not len(tape):
                accounts.microbatches += 1
                tape.built = torch._C._current_graph_task_id() != -1
                tape.number = accounts.microbatches
                self.prefetch.phases.begin_forward(tape)
            record.tape, record.index = tape, tape.append(record, record.nbytes)
            record.handles = record.waiting = 1  # before anything that may let go of the lock
            shared.events += 1
            try:
                self._place(record, tensor, tape, tier)
            except BaseException:  # a policy's error: no handle will own the record
                self._dropped.append((record, record.round))
                raise
            if not record.index and shared.budget.limit_bytes is None and shared.reporter.sink is None:
                tape.planned = self.decision.planned_sizes()
            self._saved_by_node(tape, record.nbytes)
        return record

    def _saved_by_node(self, tape: Tape[Record], nbytes: int) -> None:
        if tape.by_node.saved(torch._C._autograd._get_sequence_nr(), nbytes):
            # The node holds all that it saves until it saved the last.
            self.shared.accounts.resident_at_once(tape.by_node.node_bytes)

    def keep_planned(self, nbytes: int, kind: str, tape: Tape[Record], module: str | None) -> KeptPlace | None:
        """Count a storage that the plan keeps, and that needs no record; None where `admit` has to decide.

        Args:
            nbytes: its size, all of which is saved.
            kind: the type of its device.
            tape: the forward that it is saved in.
            module: that is running, if that is known.
        """
        shared, index = self.shared, len(tape.records)
        if index >= len(tape.planned) or tape.planned[index] != nbytes or shared.stopped or self.closed:
            return None
        self.speak()
        accounts, reason = shared.accounts, self.decision.why_planned
        with shared.lock:
            accounts.deferred.append((reason._value_, nbytes, True))
            if len(accounts.deferred) >= MANY_DEFERRED:
                self._count_dropped()
            accounts.live_records += 1
            tape.append(None, nbytes)
            tape.decisions.append((nbytes, reason, module))
            self._saved_by_node(tape, nbytes)
            shared.events += 1
            if shared.largest_moved_bytes:  # others move under this plan
                tier = self.tiers.by_device[kind]
                with tier.watched():
                    tier.notice_resized()
                    tier.poll()
                    self.prefetch.during_forward(tape)
                    tier.release_due()
        return KeptPlace(self, tape, index, nbytes, kind, module)

    def _place(self, record: Record, tensor: Tensor, tape: Tape[Record], tier: Tier) -> None:
        """Decide what becomes of a new record, and begin it."""
        shared = self.shared
        tier.poll()
        tier.count_resident(record)
        shared.reporter.event(EventKind.PACK, record, record.module or "")
        if self.forked:
            reason: KeepReason | None = KeepReason.FORKED
        elif self.closed or shared.stopped:
            reason = KeepReason.DEGRADED
        else:
            reason = self.decision.why_keep(record, tensor, tape)
            if reason is KeepReason.LAST and not shared.budget.has_room_early(0):
                reason = None  # what stays for convenience must not take the room of what a step cannot do without
        with tier.watched():
            if reason is None:
                reason = tier.offload(record)
            budget = shared.budget
            budget.largest_bytes = max(budget.largest_bytes, record.nbytes)
            if budget.limit_bytes is not None:
                # Whether this one stays or not, there must be room for the next: it exists before it is saved.
                self._following_bytes = self.decision.following_bytes(record)
                waited_s = self._make_room(tier)
                if waited_s > SHORT_WAIT_S:
                    shared.reporter.event(EventKind.PACK_WAIT, record, since_s=now() - waited_s)
            if reason is None:
                shared.accounts.moved_bytes += record.nbytes
                shared.largest_moved_bytes = max(shared.largest_moved_bytes, record.nbytes)
            else:
                record.stays = True
                shared.accounts.kept_bytes[reason._value_] += record.nbytes
                shared.reporter.event(EventKind.KEEP, record, reason._value_)
            if self.profiler.running:
                self.profiler.saved(record, reason)
                self.run.look_at_memory(self.tiers)
            self.prefetch.during_forward(tape)
            tier.release_due()  # last: the storage that was saved existed before this hook could release anything
        tape.decisions.append((record.nbytes, reason, record.module))
        self._decisions = tape.decisions
        if not tape.built:
            self.regions.last = tape.regions

    def _make_room(self, tier: Tier) -> float:
        """Keep the budget before the next storage comes; return the seconds that this thread waited."""
        following = self.shared.budget.largest_bytes if self._following_bytes is None else self._following_bytes
        waited_s = tier.make_room(following)
        self.shared.accounts.pack_wait_s += waited_s
        return waited_s

    def keep_static(self, reason: KeepReason, nbytes: int) -> None:
        """Count a tensor that stays and is no activation."""
        deferred = self.shared.accounts.deferred
        deferred.append((reason._value_, nbytes, False))
        if len(deferred) >= MANY_DEFERRED:
            self.count_deferred()

    @aborts_when_interrupted
    def count_deferred(self) -> None:
        """Count what stays without a record."""
        with self.shared.lock:
            self._count_dropped()

    def keep_activation(self, nbytes: int, reason: KeepReason, device: torch.device) -> SavedStorage | None:
        """Make room for an activation that stays without a record; return what the profiler notes of it.

        Its handle has appended it to ``Accounts.deferred``.
        """
        shared, limited = self.shared, self.shared.budget.limit_bytes is not None
        if not limited and not self.profiler.running and len(shared.accounts.deferred) < MANY_DEFERRED:
            return None
        with shared.lock:
            self._count_dropped()
            tier = self.tiers.by_device.get(device.type)
            if limited and reason is not KeepReason.IN_BACKWARD and tier is not None:
                self._make_room(tier)
            return self.profiler.kept(nbytes, reason)

    def speak(self) -> None:
        """Say what is to be said, on a thread of the user's: warnings, or the interrupt that a finalizer swallowed."""
        if self.shared.reporter.unsaid:
            self.shared.reporter.warn()
        if self._swallowed is not None:
            error, self._swallowed = self._swallowed, None
            raise error

    # -- backward -----------------------------------------------------------------------------------------------------

    @aborts_when_interrupted
    def obtain(self, record: Record, round_: int) -> tuple[torch.UntypedStorage, int, int]:
        """Return the storage with a record's bytes, the byte of the original at which it begins, and the next round.

        Blocks until the bytes are there.

        Args:
            record: what to bring back.
            round_: how often this handle was unpacked before, as `obtain` said.

        Raises:
            StorageReadError: the only copy could not be read back.
            OffloaderClosedError: the copy went with ``abort()``, or belongs to the parent of a forked process.
        """
        tier = self.tiers.by_device[record.kind]
        self.speak()
        with self.shared.lock, tier.watched():
            self._reach(record, round_, tier)
            first, on_device, since_s, waited_s = record.state, record.on_device, now(), 0.0
            storage, begin = record.original(), 0
            if storage is not None:
                tier.original_taken(record)
            else:
                if not on_device and not record.counted:
                    tier.make_room(record.nbytes)
                try:
                    storage = self._fetch_now(record, tier)
                except torch.OutOfMemoryError as error:
                    self.out_of_memory.note(error, () if record.tape is None else record.tape.decisions)
                    raise
                begin = record.data_begin
                if not on_device and first in (State.FETCHING, State.SPILLED):
                    waited_s = now() - since_s
                    self.shared.accounts.unpack_wait_s += waited_s
                    self.shared.reporter.event(EventKind.UNPACK_WAIT, record, since_s=since_s)
                    self.prefetch.window.waited()
            self.prefetch.given(record, waited_s)
            next_round = self._pass(record, round_, tier)
            if record.waiting <= 0:
                tier.evict(record)
            return storage, begin, next_round

    @aborts_when_interrupted
    def passed(self, record: Record | KeptPlace, round_: int) -> int:
        """Note that backward takes a storage that stays; return the handle's next round, as `obtain` does."""
        self.speak()
        with self.shared.lock:
            tier = self.tiers.by_device[record.kind]
            with tier.watched():
                self._reach(record, round_, tier)
                return self._pass(record, round_, tier)

    def _reach(self, record: Record | KeptPlace, round_: int, tier: Tier) -> None:
        """Backward has come to a record."""
        self._count_dropped()
        tier.notice_resized()
        tier.poll()
        if self.regions.hold:
            self.regions.passed()
        self.prefetch.reach(record, round_)
        if self.trace is not None and record.tape is not None:
            self.trace.backward(record.tape.number)

    def _pass(self, record: Record | KeptPlace, round_: int, tier: Tier) -> int:
        """Backward has the bytes, and goes on; return the handle's next round."""
        again = round_ > record.round  # a second unpack of this handle: everybody may ask again
        record.round = max(record.round, round_)
        if isinstance(record, Record):
            record.waiting = record.handles - 1 if again else record.waiting - 1
            if self.profiler.running:
                self.profiler.needed(record, alive=record.alive or record.held_elsewhere())
                self.run.look_at_memory(self.tiers)
        self.prefetch.during_backward(record.tape)
        tier.release_due()  # last: a copy that backward takes instead of its original would be for nothing
        self._backward_end.expect()
        return record.round + 1

    @aborts_when_interrupted
    def _backward_ended(self) -> None:
        """Hold no device memory of dead records: the optimizer's step comes next."""
        with self.shared.lock:
            self._count_dropped()
            self.regions.passed()
            if not self.shared.stopped:
                for tier in self.tiers.by_device.values():
                    tier.release_dead()
                if self.profiler.running or self.shared.config.device_memory is not None:
                    self.run.backward_ends(self.tiers, recorded=bool(self.profiler.running))

    def _fetch_now(self, record: Record, tier: Tier) -> torch.UntypedStorage:
        record.error = None  # a prefetch that failed is tried once more
        while True:
            if not record.on_device and (self.forked or (self.shared.stopped and not tier.recover(record))):
                where = "in a forked process" if self.forked else "after abort()"
                raise OffloaderClosedError(f"a saved tensor of {record.nbytes} bytes was asked for {where}")
            tier.fetch(record, urgent=True)
            storage = tier.ready(record)
            if storage is not None:
                return storage
            if self.forked:  # the engine thread that was bringing it back is the parent's
                raise OffloaderClosedError(f"a saved tensor of {record.nbytes} bytes was asked for in a forked process")
            self.shared.changed.wait()
            if record.error is not None:
                error, record.error = record.error, None
                # A copy: the engine's own is in a cycle with the engine's frames, which would hold the handle as well.
                raise copy.copy(error) from error

    @aborts_when_interrupted
    def expect(self, hint: Hint) -> None:
        """A schedule says that a forward or a backward is about to begin."""
        with self.shared.lock:
            self._count_dropped()
            self.prefetch.expect(hint)

    # -- the end of a handle ------------------------------------------------------------------------------------------

    def drop(self, record: Record | KeptPlace, round_: int) -> None:
        """Note that a handle died. It may be called anywhere, also with our own lock held: it never blocks."""
        if self.interrupted:
            return
        try:
            self._dropped.append((record, round_))
            if self.closed or not isinstance(record, KeptPlace):  # which holds nothing; the next save counts it
                self._count_dropped_if_free()
        except BaseException as error:
            self._tell_later(error)

    def drop_kept(self, nbytes: int, entry: SavedStorage | None) -> None:
        """Note that a kept tensor without a record died. It may be called anywhere."""
        try:
            if entry is not None:
                self.profiler.kept_died(entry)
            self.shared.accounts.deferred.append(nbytes)
        except BaseException as error:
            self._tell_later(error)

    def _tell_later(self, error: BaseException) -> None:
        """Keep what was raised in a finalizer for `speak`, as Python would only print it."""
        self.abort_if_interrupted(error)
        self._swallowed = error

    def _count_dropped_if_free(self) -> None:
        while self._dropped:
            last = self.shared.lock.run_if_free(self._count_dropped_and_look)
            if last is None:
                return  # whoever releases the lock goes on
            if last:  # closing joins threads, and this may be one of them
                threading.Thread(target=self._shut, kwargs={"wait": True}, name="actoffload-close", daemon=True).start()

    def _count_dropped_and_look(self) -> bool:
        """Count the dead handles; return whether that was the last one after `close`, so that nothing more comes."""
        self._count_dropped()
        return self.closed and self.shared.accounts.live_records == 0 and not self.shared.stopped

    def _count_dropped(self) -> None:
        """Count the handles that died. The lock is held."""
        accounts = self.shared.accounts
        if accounts.deferred:
            accounts.count_deferred()
        while self._dropped:
            record, round_ = self._dropped.popleft()
            if isinstance(record, KeptPlace):
                accounts.remove_resident(record.nbytes)
                self._leave(record)
                continue
            record.handles -= 1
            if round_ <= record.round:
                record.waiting -= 1
            if record.handles == 0:
                self._release(record)
            elif record.waiting <= 0:
                self.tiers.by_device[record.kind].evict(record)
        if self.regions.hold and accounts.baseline_bytes == accounts.recomputed_bytes:
            self.regions.passed()  # backward is over

    def _release(self, record: Record) -> None:
        self.tiers.by_device[record.kind].release(record)
        if self.profiler.running:
            self.profiler.died(record)
        self.identities.remove(record)
        self._leave(record)
        self.shared.reporter.event(EventKind.RELEASE, record)
        self.shared.changed.notify_all()

    def _leave(self, record: Record | KeptPlace) -> None:
        """A storage has no handles any more: its place on the tape is free."""
        if record.tape is not None:
            record.tape.forget(record.index)
            self.prefetch.learn(record.tape)
        self.shared.accounts.remove_record(record.nbytes)

    @aborts_when_interrupted
    def nothing_is_alive(self) -> bool:
        """Whether no record is, those of handles that died just now counted out."""
        with self.shared.lock:
            self._count_dropped()
            return self.shared.accounts.live_records == 0

    # -- the end of the store -----------------------------------------------------------------------------------------

    @aborts_when_interrupted
    def synchronize(self) -> None:
        """Wait until nothing is on its way out: every copy and write that was begun has ended."""
        shared = self.shared
        with shared.lock:
            self._count_dropped()
            self.tiers.flush()
            while shared.pending_bytes > 0 and not shared.stopped:
                shared.changed.wait()
                self.tiers.flush()  # what came meanwhile may wait for others
            self.tiers.count_alive()
        shared.reporter.warn()

    @aborts_when_interrupted
    def close(self) -> None:
        """Take no more work and wait for what is under way. Idempotent.

        What is still alive stays usable: backward can still read it, and the disk space goes when its last handle dies.
        """
        if self.forked:
            return
        self.closed = True
        self.synchronize()
        if self.nothing_is_alive():
            self._shut(wait=True)

    def abort(self) -> None:
        """Stop at once: cancel what is queued and give everything back; what is not in memory is lost. Idempotent."""
        self.closed = True
        if not self.forked:
            self._shut(wait=False)

    def abort_if_interrupted(self, error: BaseException) -> bool:
        """Abort from whatever an interrupt has left, on the thread that was interrupted; return whether it was one."""
        if not is_interrupt(error):
            return False
        self.interrupted = self.shared.interrupted = self.shared.stopped = True
        self.shared.lock.abandon()
        try:
            with self.shared.lock:
                self._dropped.clear()
                self.identities = IdentityMap()
                self.prefetch.phases.forget()
                self.tiers.abandon()
        finally:
            self.abort()
        return True

    def _shut(self, *, wait: bool) -> None:
        with self.shared.lock:
            self.shared.stopped = True
            self.shared.changed.notify_all()
        if self.trace is not None:
            self.trace.close(wait=wait, ask=not self.interrupted)
        self.tiers.close(wait=wait)

    def after_fork_in_child(self) -> None:
        """Keep what is saved in the child and give up what is not in memory: it has none of our threads."""
        self.forked = True
        self.profiler.forget()
        if self.trace is not None:
            self.trace.after_fork_in_child()
            self.trace = None
        self.shared.after_fork_in_child()
        self.tiers.after_fork_in_child()

    # -- what was done ------------------------------------------------------------------------------------------------

    @aborts_when_interrupted
    def statistics(self) -> Statistics:
        """Return what was done since the store began."""
        self.shared.reporter.warn()
        self.tiers.count_waits()
        elsewhere = {**self.tiers.counts(), "process_before_bytes": self.run.process_before_bytes}
        elsewhere |= {"regions": len(self.regions.last), "regions_once": sum(self.regions.last)}
        with self.shared.lock:
            self._count_dropped()
            self.run.count_optimizer_steps()
            statistics = self.shared.accounts.freeze(**elsewhere)
            last = self.closed and statistics.live_records == 0 and not self.shared.stopped
        if last:
            self._shut(wait=True)
        return statistics

    @property
    def plan(self) -> Plan:
        """What was decided in the last forward, as data; given as ``policy=``, it is followed."""
        regions = self.regions.last
        once = tuple(place for place, runs_once in enumerate(regions) if runs_once)
        return replace(decided(self._decisions), once=once, regions=len(regions))
