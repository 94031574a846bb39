"""What autograd is handed for each tensor that it saves, and what it gets back for it."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import native_hooks
from .accounts import MANY_NOTES
from .config import OffloadConfig
from .cpu_tier import CpuMover
from .device import Accelerator
from .handles import Handle, Kept, KeptActivation, Stayed, Wrapped
from .identity import PLAIN_TYPES, Counter, byte_span, is_parameter, own_counter
from .marks import MARKED, REGIONS
from .native_known import CPU, hooks_in_c, unpack
from .offloader import Storer
from .policy import KeepReason
from .record import Record
from .schedule import Tape
from .scopes import ModuleScopes, untraced_hook
from .tiers import Mover

_NOTES = {"parameter": KeepReason.PARAMETER, "buffer": KeepReason.BUFFER, "input": KeepReason.INPUT}


class Packer(Storer):
    """A `Storer` with the two functions that autograd calls: pack for each tensor saved, unpack when it is needed.

    Args:
        config: the options.
        accelerator: as of `Storer`.
    """

    def __init__(self, config: OffloadConfig, accelerator: Accelerator | None = None) -> None:
        native = hooks_in_c()  # before the lock is made
        super().__init__(config, accelerator)
        self._scopes = ModuleScopes()
        if native is not None:
            self._make_lane(native)

    @abstractmethod
    def _tape(self) -> Tape[Record]:
        """The tape of the forward that runs in this thread: a new one when backward has walked the last one."""

    def _hooks(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Pack and unpack, in C where that is at hand: the same for what stays, and `_save` for what may move."""
        native = native_hooks.loaded()
        if native is None or self._lane is None:
            return self._pack, unpack
        pack = native.Pack(
            owner=self,
            notes=self.core.accounts.notes,
            by_number=self.notes.by_number,
            marked=MARKED.by_number,
            awaited=self.owners.sharded,
            least=self._least_bytes,
            full=self._pack,
            save=self._save,
            settle=self.settle_notes,
            lane=self._lane,
            many=MANY_NOTES,
        )
        return pack, native.unpack

    def _make_lane(self, native: Any) -> None:
        """What keeps and moves storages in C; told what becomes of them where nothing else is to be done for each."""
        core = self.core
        plain = core.device_budget is None and core.sink is None
        mover = self._movers.get("cpu")
        self._lane = self._latest = native.Lane(
            accounts=core.accounts,
            notes=core.accounts.notes,
            recording=self.recorder.running,
            entries=self._identities.entries,
            phases=self._prefetch.phases,
            dropped=self._dropped,
            to_warn=core.to_warn,
            lock=core.lock,
            waiters=core.changed.waiters,
            watched={device: mover.watched for device, mover in self._movers.items()},
            captures={
                device: untraced_hook(mover.capturing)
                for device, mover in self._movers.items()
                if type(mover).capturing is not Mover.capturing
            },
            running=untraced_hook(self._scopes.innermost),
            named=self._scopes.watched,
            modules=sys.modules,
            core=core,
            mover=mover if plain and isinstance(mover, CpuMover) else None,
            pattern=Record(None, 0, 0, 0, CPU),
            bounded=core.device_budget is not None,
        )
        if plain:
            self._placement.attach(self._lane)

    @untraced_hook
    def _pack(self, tensor: Tensor, counters: tuple[Counter, ...] = ()) -> Any:
        if type(tensor) not in PLAIN_TYPES:
            return self._pack_subclass(tensor, counters)
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
            return self._keep(tensor, KeepReason.LAYOUT, 0)
        if tensor._is_zerotensor():  # it has no memory
            return self._keep(tensor, KeepReason.LAYOUT, 0)
        storage = tensor.untyped_storage()
        nbytes, storage_bytes = tensor.nbytes, storage.nbytes()
        reason = self._why_static(tensor, storage)
        if reason is not None:
            return self._keep(tensor, reason, min(nbytes, storage_bytes))
        if nbytes == storage_bytes and tensor.is_contiguous():
            begin, end = 0, nbytes
        else:
            begin, end = byte_span(tensor, storage_bytes) if nbytes else (0, 0)
        return self._save(tensor, storage, begin, end, counters)

    @untraced_hook
    def _save(
        self,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        begin: int,
        end: int,
        counters: tuple[Counter, ...] = (),
    ) -> Any:
        """What becomes of a tensor that needs those bytes of its storage, and that nothing but its size may keep."""
        reason = self.why_unfit("cpu" if tensor.is_cpu else tensor.device.type, end - begin)
        if reason is not None:
            return self._keep(tensor, reason, end - begin)
        counters = counters or own_counter(tensor)
        alias = tensor.detach()
        conj, neg = alias.is_conj(), alias.is_neg()
        if conj:
            alias = alias.conj()
        if neg:
            alias = alias._neg_view()
        tape = self._tape()
        record = self.admit(alias, (begin, end), storage, tape, self._scopes.innermost(), counters)
        if record.handles == 1 and tape.bursts.saved(torch._C._autograd._get_sequence_nr(), record.nbytes):
            with self.core.lock:  # the node holds all that it saves until it has saved the last of it
                self.core.accounts.at_once(tape.bursts.node_bytes)
        if record.stays and not conj and not neg:
            return Stayed(self, record, alias)
        return Handle(self, record, alias, conj, neg)

    def _why_static(self, tensor: Tensor, storage: torch.UntypedStorage) -> KeepReason | None:
        number = storage._cdata
        if is_parameter(tensor):
            if number not in self.notes.by_number:
                self.notes.add(tensor, "parameter")
            return KeepReason.PARAMETER
        note = self.notes.by_number.get(number)
        if note is None and self.owners.sharded and self.owners.note_gathered(self.notes):
            note = self.notes.by_number.get(number)
        if note is not None:
            return _NOTES[note[1]]
        if number in MARKED.by_number:
            return KeepReason.MARKED
        if REGIONS.depth:
            return KeepReason.REGION
        if torch._C._current_graph_task_id() != -1:
            return KeepReason.IN_BACKWARD  # a recompute: its own backward follows at once
        return None

    def _keep(self, tensor: Tensor, reason: KeepReason, nbytes: int) -> Kept:
        static = reason is KeepReason.PARAMETER or reason is KeepReason.BUFFER or reason is KeepReason.INPUT
        if static or not nbytes:
            self.kept_static(reason, nbytes)
            # A leaf itself, as autograd does: it makes no cycle, and its `.data` may be swapped.
            itself = reason is KeepReason.PARAMETER and tensor.is_leaf
            return Kept(tensor if itself else tensor.detach(), itself=itself)
        handle = KeptActivation(tensor.detach(), self, nbytes, reason._value_)
        self.kept(handle, reason, tensor.device)
        return handle

    def _pack_subclass(self, tensor: Tensor, outer: tuple[Counter, ...]) -> Any:
        if is_parameter(tensor):
            self.notes.add(tensor, "parameter")
            return self._keep(tensor, KeepReason.PARAMETER, 0)
        counter = Wrapped.hollow(tensor) if is_traceable_wrapper_subclass(tensor) else None
        if counter is not None:
            counters = (*outer, counter)
            return Wrapped(tensor, counter, lambda inner: self._pack(inner, counters))
        return self._keep(tensor, KeepReason.SUBCLASS, 0)


def tell(pack: Any, tape: Tape[Record]) -> None:
    """Tell a pack hook which forward runs in its thread; the one in Python asks for it instead."""
    if not isinstance(pack, MethodType):
        pack.tape = None if type(tape) is Tape else tape
