"""The life of each saved storage between pack and the death of its last handle; hooks and views are unknown here."""

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
from ..errors import OffloaderClosedError, StateError
from ..events import EventKind, now
from ..planning.plan import Plan, decided
from ..policy import KeepReason
from ..tiers.accelerator import Accelerator
from ..tiers.accounts import MANY_DEFERRED
from ..tiers.cpu_tier import CpuTier
from ..tiers.device_tier import CAPTURED
from ..tiers.interrupts import aborts_when_interrupted, is_interrupt
from ..tiers.record import Record, Saved, State
from ..tiers.shared import Shared
from ..tiers.statistics import Statistics
from ..tiers.storage_ref import StorageRef
from ..tiers.tier import Tier
from ..tiers.tiers import Tiers
from .backward_end import BackwardEnd
from .decision import OffloadDecision
from .identity import Counter, IdentityMap
from .kept_place import KeptPlace, PlaceRef
from .out_of_memory import OutOfMemory
from .pipeline import Hint, Phases
from .prefetch import Prefetch, first_window
from .profiler import Profiler, SavedStorage
from .regions import Regions
from .run_so_far import RunSoFar
from .tape import Tape
from .trace import Recorder, trace_path

SHORT_WAIT_S = 1e-4  # a wait for room is an event of its own only above this
_node_number = torch._C._autograd._get_sequence_nr  # of the autograd node that is made next


class ActivationStore:
    """Admit storages, move them, and return them to backward: the offloader without its hooks.

    Handles own the records. A handle that dies calls `drop`, which may run anywhere, as finalizers do: it appends the
    death to a list. The thread that holds the lock counts it on release; if the lock is free, `drop` counts it itself.

    An interrupt (Ctrl-C, or any exception of a signal handler) may leave records and counts half changed. A method that
    catches an exception passes it to `abort_if_interrupted`: the store ends, its handles lose their bytes, and the
    offloader makes another store.

    Args:
        config: the options.
        accelerator: drives the tensors' device; None selects it by device type. Tests pass a simulated one.

    Attributes:
        shared: the lock, the counts, the budget and the reporter.
        tiers: the spool, the host memory and a tier for each type of device.
        prefetch: fetches the records that backward needs next; ``profiler``: records a step for the planner.
        decision: decides which storages stay; ``regions``: which checkpointed regions run once.
        identities: the live records by storage; ``trace``: records the steps in a file, or None.
        closed: it admits nothing more; ``forked``: this process is a fork and has none of the threads.
        run: when the run began, and the memory that it found; ``out_of_memory``: the errors of the device's allocator.
    """

    def __init__(self, config: OffloadConfig, accelerator: Accelerator | None = None) -> None:
        self.shared = Shared(config, config.trace if callable(config.trace) else None)
        self.closed = self.forked = False
        self.identities = IdentityMap()
        self.run = run = RunSoFar(self.shared.accounts)
        self._dropped: deque[tuple[Record, int] | PlaceRef] = self.shared.lock.noted
        self._backward_end = BackwardEnd(self._backward_ended)
        self._swallowed: BaseException | None = None
        path = trace_path(config)  # may raise: before a file is opened or a thread starts
        self.shared.lock.after_release = weakref.WeakMethod(self._count_dropped_if_free)  # no cycle with the lock
        self.tiers = Tiers(self.shared, accelerator)
        self.out_of_memory = OutOfMemory(config, self.shared.accounts, self.tiers)
        self.profiler = Profiler(self.tiers.stopwatch())
        window = first_window(config, on_cpu=isinstance(self.tiers.by_device.get("cpu"), CpuTier))
        phases = Phases()
        self.prefetch = Prefetch(self.shared, self.tiers.by_device, window, phases)
        self.decision = OffloadDecision(config, window, phases)
        self.regions = Regions(self.tiers, self.profiler, run.beside, self._backward_end, self.abort_if_interrupted)
        self.trace = None if path is None else Recorder(path, self.shared, self.tiers)

    # -- forward ------------------------------------------------------------------------------------------------------

    @aborts_when_interrupted
    def begin_forward(self, *, first: bool) -> None:
        """Note that a context is entered; ``first``: nothing is alive, so that a step begins with it."""
        with self.shared.lock:
            self._count_dropped()
            self.run.optimizer.count()
            self.prefetch.begin_forward()
            for tier in self.tiers.by_device.values():
                tier.begin_forward()
            if first:
                self.regions.taken.turn_ends()  # of a forward whose loss was dropped
                self.shared.accounts.begin_step()
            self.run.forward_begins(self.tiers, first=first)
            if first and (self.profiler.running or self.shared.config.device_memory is not None):
                self.run.beside.begin_step(self.tiers, apart=bool(self.profiler.running) and self.regions.bound)
            self.shared.accounts.steps += 1

    def admit(
        self,
        tensor: Tensor,
        span: tuple[int, int],
        storage: Any,
        tape: Tape[Record],
        names: tuple[str | None, str | None],
        counters: tuple[Counter, ...] = (),
    ) -> Record:
        """Return the record of a span of a storage: a live one that holds the same bytes, else a new one.

        Args:
            tensor: the tensor being saved, without conjugate and negative bits.
            span: the bytes of the storage that it needs.
            storage: its storage.
            tape: of the forward that saves it.
            names: of the module that runs, and of the tensor, where they are known.
            counters: of the wrapper subclasses around the tensor, outermost first.
        """
        shared, accounts = self.shared, self.shared.accounts
        self.speak()
        (begin, end), device, tier = span, tensor.device, self.tiers.by_device[tensor.device.type]
        with shared.lock, tier.watched():
            self._count_dropped()
            tier.notice_resized()
            accounts.packed_tensors += 1
            accounts.packed_bytes += end - begin
            record = self.identities.find(storage, tensor, span, counters)
            if record is not None:
                accounts.deduplicated_bytes += end - begin
                tier.saved_again(record, tensor)  # perhaps on another stream, which uses its memory from now on
                record.add_handle()
                tape.saved_again(record.tape, record.index)
                if names[1] is not None and record.saved.name is None:
                    self.decision.names.named_late(record, names[1])
                return record
            saved = Saved(StorageRef(storage), storage.data_ptr(), begin, device)
            saved.module, saved.name = names
            saved.has_gaps = tensor.nbytes < end - begin
            record = Record(saved, storage, end - begin, device.type)
            self.identities.add(record, tensor, counters)
            accounts.add_record(record.nbytes)
            if not len(tape):
                accounts.microbatches += 1
                tape.built = torch._C._current_graph_task_id() != -1
                tape.number = accounts.microbatches
                self.prefetch.phases.begin_forward(tape)
            record.tape, record.index = tape, tape.append(record, record.nbytes)
            record.handles = record.waiting = 1  # first: `_place` may wait, which releases the lock
            shared.events += 1
            try:
                self._place(record, tensor, tape, tier)
            except BaseException:  # of a policy, say: no handle will own the record, so its death is noted here
                self._dropped.append((record, record.round))
                raise
            # After `_place` selects a plan. Budgets and sinks see every save; a tape of backward may outlive a plan.
            if not (record.index or tape.built or shared.budget.limit_bytes is not None or shared.reporter.sink):
                tape.planned = self.decision.planned_sizes()
            self._saved_by_node(tape, record.nbytes)
        return record

    def _saved_by_node(self, tape: Tape[Record], nbytes: int) -> None:
        if tape.by_node.saved(_node_number(), nbytes):
            # A node holds all its saves until the last one, so these bytes are resident together.
            self.shared.accounts.resident_at_once(tape.by_node.node_bytes)

    def keep_planned(
        self, alias: Tensor, nbytes: int, storage: torch.UntypedStorage, tape: Tape[Record], module: str | None
    ) -> KeptPlace | None:
        """Count a storage that the plan keeps without a record; return None where `admit` has to decide."""
        shared, index = self.shared, len(tape.records)  # without the lock: only this thread appends to the tape
        if index >= len(tape.planned) or tape.planned[index] != nbytes or shared.stopped or self.closed:
            return None
        if self.profiler.running:  # a recorded step needs records
            return None
        self.speak()
        accounts, reason = shared.accounts, self.decision.why_planned
        with shared.lock:  # first: two threads may save one storage, and of two places only the last could be found
            if nbytes != storage.nbytes() or self.identities.has(storage):  # a part, or another version
                return None
            accounts.deferred.append((reason._value_, nbytes, True))
            if len(accounts.deferred) >= MANY_DEFERRED:
                self._count_dropped()
            accounts.live_records += 1
            tape.append(None, nbytes)
            tape.decisions.append((nbytes, reason, module))
            self._saved_by_node(tape, nbytes)
            shared.events += 1
            place = KeptPlace(self, tape, index, alias, storage.data_ptr(), nbytes, module)
            self.identities.add_kept(place, storage._cdata, self._dropped.append)  # its death counts from here on
            if shared.largest_moved_bytes:  # other storages move under this plan, and this save is a position for them
                with (tier := self.tiers.by_device[place.kind]).watched():
                    tier.notice_resized()
                    tier.poll()
                    self.prefetch.during_forward(tape)
                    tier.release_due()
        return place

    def _place(self, record: Record, tensor: Tensor, tape: Tape[Record], tier: Tier) -> None:
        """Decide whether a new record moves, and begin its move."""
        shared, budget = self.shared, self.shared.budget
        tier.poll()
        tier.count_resident(record)
        shared.reporter.event(EventKind.PACK, record, record.saved.module or "")
        if self.forked:
            reason: KeepReason | None = KeepReason.FORKED
        elif self.closed or shared.stopped:
            reason = KeepReason.DEGRADED
        else:
            self.decision.note(record)
            reason = self.decision.why_keep(record, tensor, tape)
            full = reason is KeepReason.LAST and not budget.has_room_early(0)
            if reason is KeepReason.FITS and self.decision.could_move(record):  # a plan may be wrong about the room
                full = budget.excess_bytes(self._following_bytes(record) - tier.leaving_bytes) > 0
            # Staying saves time only, and this room is for bytes that the step needs at once.
            reason = None if full else reason
        if reason is None:
            reason = tier.offload(record)
        budget.largest_bytes = max(budget.largest_bytes, record.nbytes)
        if budget.limit_bytes is not None:
            # Room for the next storage now, whether this one stays or not: it is allocated before its save.
            budget.following_bytes = self._following_bytes(record)
            if (waited_s := self._make_room(tier)) > SHORT_WAIT_S:
                shared.reporter.event(EventKind.PACK_WAIT, record, since_s=now() - waited_s)
        if reason is None:
            shared.accounts.moved_bytes += record.nbytes
            shared.largest_moved_bytes = max(shared.largest_moved_bytes, record.nbytes)
        else:
            record.stays = True
            shared.accounts.kept_bytes[reason._value_] += record.nbytes
            shared.reporter.event(EventKind.KEEP, record, reason._value_)
        if self.profiler.running:
            with self.profiler.noting():
                self.profiler.saved(record, reason)
        self.prefetch.during_forward(tape)
        tier.release_due()  # late, at no loss: the saved storage was allocated before this hook ran
        self.regions.look_at_memory(born=record.nbytes)  # last: the hook has moved all that it moves
        tape.decisions.append((record.nbytes, reason, record.saved.module))
        self.decision.last = tape.decisions
        if not tape.built:
            self.regions.last = tape.regions

    def _following_bytes(self, record: Record) -> int:
        """Return the room that the storage saved after this one needs."""
        nbytes = self.shared.budget.next_bytes(self.decision.following_bytes(record))
        return nbytes - self.regions.has_room_for(nbytes, record.tape, record.index)

    def _make_room(self, tier: Tier) -> float:
        """Make room in the budget for the next storage; return the seconds that this thread waited."""
        waited_s = tier.make_room(self.shared.budget.next_bytes(self.shared.budget.following_bytes))
        self.shared.accounts.pack_wait_s += waited_s
        return waited_s

    def keep_static(self, reason: KeepReason, nbytes: int) -> None:
        """Count a tensor that stays and is not an activation."""
        deferred = self.shared.accounts.deferred
        deferred.append((reason._value_, nbytes, False))  # atomic, so it needs no lock
        if len(deferred) >= MANY_DEFERRED:
            self.count_deferred()

    @aborts_when_interrupted
    def count_deferred(self) -> None:
        """Count the tensors that stay without a record."""
        with self.shared.lock:
            self._count_dropped()

    def keep_activation(self, nbytes: int, reason: KeepReason, kind: str, tape: Any) -> SavedStorage | None:
        """Make room for an activation that stays without a record, on this kind of device; return its profiler entry.

        Its handle has appended it to ``Accounts.deferred``. ``tape``: of the context open in this thread, or None.
        """
        shared, limited = self.shared, self.shared.budget.limit_bytes is not None
        if not limited and not self.profiler.running and len(shared.accounts.deferred) < MANY_DEFERRED:
            return None
        with shared.lock:
            self._count_dropped()
            tier = self.tiers.by_device.get(kind)
            if limited and reason is not KeepReason.IN_BACKWARD and tier is not None:
                self._make_room(tier)
            return self.profiler.kept(nbytes, reason, None if tape is None else tape.region)

    def speak(self) -> None:
        """Log pending warnings, and raise the interrupt that a finalizer caught. Runs on a thread of the user's."""
        if self.shared.reporter.unsaid:
            self.shared.reporter.warn()
        if self._swallowed is not None:
            error, self._swallowed = self._swallowed, None
            raise error

    # -- backward -----------------------------------------------------------------------------------------------------

    @aborts_when_interrupted
    def obtain(self, record: Record, round_: int) -> tuple[torch.UntypedStorage, int]:
        """Return the storage with a record's bytes, and the next round.

        Args:
            record: the call blocks until its bytes are there.
            round_: how often this handle was unpacked before, as `obtain` returned it.

        Raises:
            StorageReadError: the only copy could not be read.
            OffloaderClosedError: ``abort()`` dropped the copy, or it belongs to the parent of a forked process.
        """
        tier = self.tiers.by_device[record.kind]
        self.speak()
        with self.shared.lock, tier.watched():
            self._reach(record, round_, tier)
            first, on_device, since_s = record.state, record.on_device, now()
            storage = record.original()  # first, copy or not: plain PyTorch would read its present contents
            if storage is not None:
                tier.original_taken(record)
            else:
                if not on_device and not record.counted:
                    tier.make_room(record.nbytes)
                try:
                    storage = self.fetch_now(record, tier)
                except torch.OutOfMemoryError as error:
                    self.out_of_memory.note(error, record.tape.decisions)
                    raise
                if not on_device and first in (State.FETCHING, State.SPILLED):
                    self.shared.accounts.unpack_wait_s += now() - since_s
                    self.shared.reporter.event(EventKind.UNPACK_WAIT, record, since_s=since_s)
                    self.prefetch.window.waited()
            next_round = self._pass(record, round_, tier)
            if record.waiting <= 0:  # `storage` holds the bytes for this unpack, later ones have the weak reference
                tier.evict(record)
            tier.make_room_to_save()
            self.regions.look_at_memory(used=0 if record.counted else record.nbytes)
            return storage, next_round

    @aborts_when_interrupted
    def passed(self, record: Record | KeptPlace, round_: int) -> int:
        """Note that backward uses a storage that stays; return the handle's next round, as `obtain` does."""
        tier = self.tiers.by_device[record.kind]
        self.speak()
        with self.shared.lock, tier.watched():
            self._reach(record, round_, tier)
            next_round = self._pass(record, round_, tier)
            self.regions.look_at_memory()
            return next_round

    def _reach(self, record: Record | KeptPlace, round_: int, tier: Tier) -> None:
        """Note that backward has reached a record."""
        self._count_dropped()  # first: dead records give their room to the fetches that follow
        tier.notice_resized()
        tier.poll()
        self.regions.reach(record, round_)
        self.prefetch.reach(record, round_)
        if self.trace is not None:
            self.trace.backward(record.tape.number)

    def _pass(self, record: Record | KeptPlace, round_: int, tier: Tier) -> int:
        """Note that backward has the bytes and continues; return the handle's next round."""
        again = round_ > record.round  # a second unpack of this handle: every handle may be unpacked again
        if again:
            record.round = round_
        if isinstance(record, Record):
            record.waiting = record.handles - 1 if again else record.waiting - 1
            if self.profiler.running:
                with self.profiler.noting():
                    alive = record.saved.alive or record.held_elsewhere()
                    self.profiler.needed(record, alive=alive, evicts_first=tier.evicts_first)
            if tier.evicts_first and record.waiting <= 0:  # the next fetch has its room in the budget
                tier.evict(record)
        self.prefetch.during_backward(record.tape)
        tier.release_due()  # last: a fetch above may still take an original that is due, without a copy
        self._backward_end.expect()
        return record.round + 1

    @aborts_when_interrupted
    def _backward_ended(self) -> None:
        """Release the device memory of dead records before the optimizer's step."""
        with self.shared.lock:
            self._count_dropped()
            self.regions.backward_ended()
            if not self.shared.stopped:
                self.run.backward_ends(self.tiers)  # first: the optimizer's time begins here
                for tier in self.tiers.by_device.values():
                    tier.release_dead()
                if self.profiler.running or self.shared.config.device_memory is not None:
                    self.run.beside.backward_ends(self.tiers, recorded=bool(self.profiler.running))

    def fetch_now(self, record: Record, tier: Tier) -> torch.UntypedStorage:
        """Return the storage with a record's bytes, once it has them. The lock is held."""
        while True:
            if not record.on_device and (self.forked or (self.shared.stopped and not tier.recover(record))):
                where = "in a forked process" if self.forked else "after abort()"
                raise OffloaderClosedError(f"a saved tensor of {record.nbytes} bytes was asked for {where}")
            if record.state is not State.RESIDENT and not tier.fetch(record, urgent=True) and tier.capturing():
                raise StateError(CAPTURED)
            if (storage := tier.ready(record)) is not None:
                return storage
            if self.forked:  # a thread of the parent reads it, so no thread here would end this wait
                raise OffloaderClosedError(f"a saved tensor of {record.nbytes} bytes was asked for in a forked process")
            self.shared.changed.wait()  # gives up the lock, which the engine's thread needs to complete the read
            if record.disk is not None and record.disk.error is not None:
                error, record.disk.error = record.disk.error, None
                # A copy: the engine's error is in a cycle with the engine's frames, and would hold this handle as well.
                raise copy.copy(error) from error

    @aborts_when_interrupted
    def expect(self, hint: Hint) -> None:
        """Note that a schedule begins a forward or a backward next."""
        with self.shared.lock:
            self._count_dropped()
            self.prefetch.expect(hint)

    # -- the end of a handle ------------------------------------------------------------------------------------------

    def drop(self, record: Record, round_: int) -> None:
        """Note that a handle died. It may run anywhere, even in a thread that holds our lock: it never blocks."""
        if self.shared.interrupted:
            return  # the abort has dropped every record
        try:
            self._dropped.append((record, round_))  # atomic, so it needs no lock
            self._count_dropped_if_free()
        except BaseException as error:
            self._tell_later(error)

    def drop_kept(self, nbytes: int, entry: SavedStorage | None) -> None:
        """Note that a kept tensor without a record died. It may run anywhere."""
        try:
            if entry is not None:
                self.profiler.kept_died(entry)
            self.shared.accounts.deferred.append(nbytes)
        except BaseException as error:
            self._tell_later(error)

    def _tell_later(self, error: BaseException) -> None:
        """Keep an exception of a finalizer for `speak`, as Python would only print it."""
        self.abort_if_interrupted(error)
        self._swallowed = error

    def _count_dropped_if_free(self) -> None:
        while self._dropped:
            last = self.shared.lock.run_if_free(self._count_dropped_and_look)
            if last is None:
                return  # a thread holds the lock, and counts them when it releases it
            # In another thread: closing joins the engine's threads, and this thread may be one of them.
            if last and not self.shared.stopped:
                threading.Thread(target=self._shut, kwargs={"wait": True}, name="actoffload-close", daemon=True).start()

    def _count_dropped_and_look(self) -> bool:
        """Count the dead handles; return whether the store was closed and has no record left, so that it can shut."""
        self._count_dropped()
        # Storages that a plan keeps need nothing of ours, and nothing runs as the last of them dies.
        return self.closed and self.shared.accounts.live_records == len(self.identities.kept)

    def _count_dropped(self) -> None:
        """Count the handles that died. The lock is held."""
        accounts = self.shared.accounts
        if accounts.deferred:
            accounts.count_deferred()  # first: it has the births of tensors whose deaths may be noted below
        while self._dropped:  # not a `for`: finalizers may append meanwhile
            dropped = self._dropped.popleft()
            if isinstance(dropped, PlaceRef):
                if not self.shared.interrupted:  # else the abort has dropped it
                    self.identities.remove_kept(dropped)
                    accounts.remove_resident(dropped.nbytes)
                    self._leave(dropped)
                continue
            record, round_ = dropped
            record.handles -= 1
            if round_ <= record.round:  # else it was unpacked in this round, and waits no more
                record.waiting -= 1
            if record.handles == 0:
                self._release(record)
            elif record.waiting <= 0:
                self.tiers.by_device[record.kind].evict(record)
        if self.regions.held and accounts.baseline_bytes == accounts.recomputed_bytes:
            self.regions.leave(all_runs=True)  # only recomputations hold bytes: backward is over

    def _release(self, record: Record) -> None:
        self.tiers.by_device[record.kind].release(record)
        self.regions.released(record)
        if self.profiler.running:
            self.profiler.died(record)
        self.identities.remove(record)
        self._leave(record)
        self.shared.reporter.event(EventKind.RELEASE, record)
        self.shared.changed.notify_all()  # a thread may wait for the room that this freed

    def _leave(self, record: Record | PlaceRef) -> None:
        """Free the place on the tape of a storage without handles."""
        record.tape.forget(record.index)
        if not record.tape.live:
            self.prefetch.learn(record.tape)
        self.shared.accounts.remove_record(record.nbytes)

    @aborts_when_interrupted
    def nothing_is_alive(self) -> bool:
        """Return whether no record is alive, after counting the handles that have died."""
        with self.shared.lock:
            self._count_dropped()
            return self.shared.accounts.live_records == 0

    # -- the end of the store -----------------------------------------------------------------------------------------

    @aborts_when_interrupted
    def synchronize(self) -> None:
        """Wait until every copy and write that was begun has ended."""
        shared = self.shared
        with shared.lock:
            self._count_dropped()
            self.tiers.flush()
            while shared.pending_bytes > 0 and not shared.stopped:
                shared.changed.wait()
                self.tiers.flush()  # again: another thread may have begun a batch that would wait to be filled
            self.tiers.count_alive()
        shared.reporter.warn()

    @aborts_when_interrupted
    def close(self) -> None:
        """Admit nothing more and wait for running transfers. Idempotent.

        Backward can still read the records that are alive; their disk space is freed when the last handle dies.
        """
        if self.forked:
            return
        self.closed = True  # before the wait: from now on, no save begins a move that would prolong it
        self.synchronize()
        with self.shared.lock:
            over = self._count_dropped_and_look()
        if over:  # also if another thread shuts it: each call waits
            self._shut(wait=True)

    def abort(self) -> None:
        """Stop at once: cancel queued transfers, release everything, lose bytes that are not in memory. Idempotent."""
        self.closed = True
        if not self.forked:
            self._shut(wait=False)

    def abort_if_interrupted(self, error: BaseException) -> bool:
        """Abort on the interrupted thread, in any state that an interrupt left; return whether ``error`` is one."""
        if not is_interrupt(error):
            return False
        # Before the lock is free: completions that take it next must not touch records that are half changed.
        self.shared.interrupted = self.shared.stopped = True
        self.shared.lock.abandon()
        try:
            with self.shared.lock:
                self._dropped.clear()  # counts are half changed as well, so no death can be counted
                self.identities = IdentityMap()
                self.prefetch.phases.forget()
                self.tiers.abandon()
        finally:
            self.abort()
        return True

    def _shut(self, *, wait: bool) -> None:
        with self.shared.lock:
            self.shared.stopped = True
            self.shared.changed.notify_all()  # threads that wait for bytes or room must see `stopped`
        if self.trace is not None:
            self.trace.close(wait=wait, ask=not self.shared.interrupted)
        self.tiers.close(wait=wait)  # without the lock: it joins threads that take it

    def after_fork_in_child(self) -> None:
        """Keep the saved tensors that are in memory, and lose the rest: the child has none of our threads."""
        self.forked = True
        self.profiler.forget()
        if self.trace is not None:
            self.trace.after_fork_in_child()
            self.trace = None
        self.shared.after_fork_in_child()
        self.tiers.after_fork_in_child()

    # -- results ------------------------------------------------------------------------------------------------------

    @aborts_when_interrupted
    def statistics(self) -> Statistics:
        """Return the counts since the store began."""
        self.shared.reporter.warn()
        self.tiers.count_waits()
        elsewhere = {**self.tiers.counts(), "process_before_bytes": self.run.process_before_bytes}
        elsewhere |= {"regions": len(self.regions.last), "regions_once": sum(self.regions.last)}
        with self.shared.lock:
            over = self._count_dropped_and_look()
            self.run.optimizer.count()
            statistics = self.shared.accounts.freeze(**elsewhere)
        if over and not self.shared.stopped:  # without the lock, as in `_shut`
            self._shut(wait=True)
        return statistics

    @property
    def plan(self) -> Plan:
        """The decisions of the last forward as data; pass it as ``policy=`` to follow it."""
        once = tuple(place for place, runs_once in enumerate(self.regions.last) if runs_once)
        return replace(decided(self.decision.last), once=once, regions=len(self.regions.last), coded=self.shared.coded)
