"""The pack hook: turns each tensor that autograd saves into the handle that the graph holds in its place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..policy import STATIC, KeepReason
from ..runtime.identity import Counter
from ..runtime.store import ActivationStore
from ..runtime.tape import Tape
from ..runtime.untraced import untraced
from ..tiers.accounts import MANY_DEFERRED
from ..tiers.record import Record
from . import native
from .codec import Codec
from .exclusions import MARKED, Exclusions, is_filled_later
from .handles import (
    Attributed,
    Handle,
    Kept,
    KeptActivation,
    Planned,
    Stayed,
    Wrapped,
    is_plain_value,
    sharing_counters,
    unpack,
    watch_functions,
)
from .module_names import ModuleScopes
from .tensor_names import name_of
from .tensors import PLAIN_TYPES, byte_span, is_parameter, own_counter

ATTRIBUTES = (
    "a saved tensor has the attribute {!r}, which backward does not find: numbers and texts alone are kept of a "
    "tensor's attributes; pass what backward needs by ctx, or have the tensor left alone by no saved-tensor hook"
)
CPU_MIN_BYTES = 128 << 10
DEVICE_MIN_BYTES = 1 << 20
_PROXY = torch._C._TorchDispatchModeKey.PROXY


class Forwards(threading.local):
    """The entries of an offloader's context in this thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._without_entry: Tape[Record] = Tape()

    @property
    def innermost_hook(self) -> Any:
        """The pack hook of the innermost entry in this thread; None where no context is open, or its hooks are off."""
        stack = self.stack
        return stack[-1].hooks.pack_hook if stack and stack[-1].hooks is not None else None

    @property
    def runs_once(self) -> bool:
        """Whether this thread is in a checkpointed region that runs once."""
        region = self.stack[-1].region if self.stack else None
        return region is not None and region.once

    @property
    def tape(self) -> Tape[Record]:
        """The tape of the running forward. A new one begins once backward has reached the previous one."""
        if not self.stack:  # PyTorch carries the hooks to its autograd threads, where no context was entered
            self._without_entry = _open(self._without_entry)
            return self._without_entry
        tape: Tape[Record] = _open(self.stack[-1].tape)
        self.stack[-1].tape = tape
        return tape


def _open(tape: Tape[Record]) -> Tape[Record]:
    # A recomputation may be backward's first event on a tape, before it unpacks any record. If all records of a tape
    # have died, it belongs to a freed graph.
    return Tape() if tape.in_backward or tape.walk.ran_again or (tape.live == 0 and len(tape)) else tape


class Packer:
    """Makes the handle of each tensor that autograd saves.

    Args:
        store: takes the storages that may move.
        exclusions: the tensors that never move.
        module_names: knows the running module.
        forwards: knows this thread's running forward.
    """

    def __init__(
        self, store: ActivationStore, exclusions: Exclusions, module_names: ModuleScopes, forwards: Forwards
    ) -> None:
        self._store = store
        self._exclusions = exclusions
        self._module_names = module_names
        self._forwards = forwards
        size = store.shared.config.size
        least = {kind: CPU_MIN_BYTES if kind == "cpu" else DEVICE_MIN_BYTES for kind in store.tiers.by_device}
        self._min_bytes = {kind: max(1, size("min_bytes", nbytes)) for kind, nbytes in least.items()}
        """The bytes of the smallest tensor that moves, for each type of device from which tensors move."""
        self._only_boundaries = store.shared.config.boundaries == "only"
        self._names_count = store.decision.names.used
        config = store.shared.config
        self._codes_all = config.codec == "exact" or bool(config.fp8)
        self._is_chosen = config.codec == "exact" and config.policy == "auto"
        self._codec = None if config.codec == "none" and not config.fp8 else Codec(store)

    def hooks(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Return pack and unpack: the compiled ones if there are any, else `pack` and `unpack` in Python."""
        watch_functions()
        module = native.load()
        if module is None:
            return self.pack, unpack
        shared = self._store.shared
        pack = module.Pack(
            notes=shared.accounts.deferred,
            settle=self._store.count_deferred,
            fallback=self.pack,
            save=self.save_plain,
            static=self._exclusions.static.by_number,
            marked=MARKED.by_number,
            awaited=self._exclusions.sharded,
            # Under a budget every activation that stays needs room, which only the Python hook makes.
            least=self._min_bytes if shared.budget.limit_bytes is None else {},
            recording=self._store.profiler.running,
            many=MANY_DEFERRED,
        )
        return pack.pack, module.unpack

    @untraced
    def pack(self, tensor: Tensor) -> Any:
        """Return the handle of a tensor that autograd saves: the pack hook."""
        try:
            with self._store.tiers.hook, sharing_counters():
                handle = self._pack(tensor, ())
                # A subclass uses attributes for its own parts (inner tensors, layout): only a plain tensor is checked.
                special = type(tensor) in PLAIN_TYPES and vars(tensor)
                return self._with_attributes(tensor, handle) if special else handle
        except BaseException as error:
            self._store.abort_if_interrupted(error)
            raise

    @untraced
    def save_plain(self, tensor: Tensor, nbytes: int) -> Any:
        """Return the handle of a plain tensor that may move: the part of `pack` that the compiled hooks leave to it.

        Args:
            tensor: neither excluded nor small. It stands for its whole storage.
            nbytes: the size of that storage.
        """
        try:
            store, kind = self._store, "cpu" if tensor.is_cpu else tensor.device.type
            if store.shared.interrupted:
                return Kept(tensor.detach())  # no parameter and no buffer: the compiled hooks keep those themselves
            with store.tiers.hook:  # one query per device for a graph capture serves the whole hook
                if store.tiers.by_device[kind].is_of_a_graph(tensor):
                    return self._keep(tensor, KeepReason.CAPTURE, nbytes)
                if is_filled_later(tensor):
                    return self._keep(tensor, KeepReason.FILLED_LATER, nbytes)
                with sharing_counters():
                    return self._save(tensor, tensor.untyped_storage(), (0, nbytes))
        except BaseException as error:
            self._store.abort_if_interrupted(error)
            raise

    def _pack(self, tensor: Tensor, counters: tuple[Counter, ...]) -> Any:
        # An aborted store takes nothing, yet contexts entered before the interrupt are still open. Under `make_fx`
        # tensors have no bytes to move.
        if self._store.shared.interrupted or torch._C._get_dispatch_mode(_PROXY) is not None:
            return self._keep_uncounted(tensor)
        if type(tensor) not in PLAIN_TYPES:
            return self._pack_subclass(tensor, counters)
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
            return self._keep(tensor, KeepReason.LAYOUT, 0)
        if tensor._is_zerotensor():  # without memory
            return self._keep(tensor, KeepReason.LAYOUT, 0)
        storage = tensor.untyped_storage()
        nbytes, storage_bytes = tensor.nbytes, storage.nbytes()
        reason = self._exclusions.why_stays(tensor, storage)
        if reason is not None:
            return self._keep(tensor, reason, min(nbytes, storage_bytes))
        begin, end = byte_span(tensor, storage_bytes) if nbytes else (0, 0)
        reason = self._why_unfit(tensor, end - begin)
        if reason is None and is_filled_later(tensor):
            reason = KeepReason.FILLED_LATER
        if reason is not None:
            return self._keep(tensor, reason, end - begin)
        return self._save(tensor, storage, (begin, end), counters)

    def _coded(self, tensor: Tensor) -> Any:
        """Return the handle of a plain tensor that is saved in another form, or None."""
        # A region that runs again would compute all of its tensors again: to compute a few costs less than it saves.
        if self._codec is None or not (self._codes_all or self._forwards.runs_once):
            return None
        if self._is_chosen:
            if not len(self.tape()):  # first: the planner may choose otherwise for this forward
                self._store.decision.begins_with(tensor.untyped_storage().nbytes())
            if not (self._forwards.runs_once or self._codec.everywhere):
                return None
        with sharing_counters():
            names = self._names_for(tensor)
            return self._codec.handle_of(tensor, self.tape(), names, once=self._forwards.runs_once)

    def _with_attributes(self, tensor: Tensor, handle: Any) -> Any:
        """Return a handle that restores the tensor's Python attributes, as autograd does without hooks."""
        is_output = not tensor.is_leaf and tensor.grad_fn._sequence_nr() == torch._C._autograd._get_sequence_nr() - 1  # type: ignore[union-attr]
        if is_output or (type(handle) is Kept and handle.itself):
            return handle  # autograd rebuilds a node's own output as a new object, without attributes
        attributes = {name: value for name, value in vars(tensor).items() if is_plain_value(value)}
        # `torch.compile` marks tensors for itself; backward reads no such mark.
        lost = sorted(name for name in vars(tensor).keys() - attributes.keys() if not name.startswith("_dynamo"))
        if lost:
            self._store.shared.reporter.advise("attributes", ATTRIBUTES.format(lost[0]))
        return Attributed(handle, attributes) if attributes else handle

    def why_unrecorded(self, tensor: Tensor) -> KeepReason | None:
        """Return why saving this activation in a forward would make no record that may move, or None if it would."""
        if type(tensor) not in PLAIN_TYPES:
            return None if is_traceable_wrapper_subclass(tensor) else KeepReason.SUBCLASS
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
            return KeepReason.LAYOUT
        storage = tensor.untyped_storage()
        if storage._cdata in MARKED.by_number:
            return KeepReason.MARKED
        begin, end = byte_span(tensor, storage.nbytes()) if tensor.nbytes else (0, 0)
        reason = self._why_unfit(tensor, end - begin)
        if reason is None and is_filled_later(tensor):
            return KeepReason.FILLED_LATER
        if reason is None and self._names_count:  # a plan on paper must not move it either
            name = name_of(storage, only_boundaries=self._only_boundaries)
            excluded = self._store.decision.names.excludes(self._module_names.innermost(), name)
            return KeepReason.EXCLUDED if excluded else None
        return reason

    def has_record(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a saved tensor of this storage has a record; a coded one has none."""
        return storage._cdata in self._store.identities.records

    def bytes_recorded(self, tensor: Tensor, nbytes: int, tape: Tape[Record]) -> int:
        """Return how many of the bytes of a region's activation a record would have if it ran once; 0 for no record."""
        if self._codec is None or type(tensor) not in PLAIN_TYPES:
            return nbytes
        return self._codec.bytes_of(tensor, nbytes, tape, self._names_for(tensor))

    def _why_unfit(self, tensor: Tensor, nbytes: int) -> KeepReason | None:
        """Return why a tensor that needs ``nbytes`` stays because of its device or size, or None."""
        kind = "cpu" if tensor.is_cpu else tensor.device.type
        least = self._min_bytes.get(kind)
        if least is None:
            return KeepReason.DEVICE
        if nbytes < least:
            return KeepReason.SMALL
        return KeepReason.CAPTURE if self._store.tiers.by_device[kind].is_of_a_graph(tensor) else None

    def tape(self) -> Tape[Record]:
        """The tape of the running forward, after counting handles that died: with the last one its tape is over."""
        if self._store.shared.lock.noted:
            self._store.count_deferred()
        return self._forwards.tape

    def _save(
        self,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        span: tuple[int, int],
        counters: tuple[Counter, ...] = (),
    ) -> Any:
        """Return the handle of a tensor that may move: coded, kept by the plan, or of a record."""
        store, alias, counters = self._store, tensor.detach(), counters or own_counter(tensor)
        if not counters:
            # First: a storage that is kept without a record is neither coded nor counted a second time.
            place = store.identities.find_kept(storage, alias) if store.identities.kept else None
            if place is not None:
                store.shared.accounts.deferred.append(("", span[1] - span[0], False))
                return Planned(place, alias)
            coded = self._coded(tensor)
            if coded is not None:
                return coded
        tape, module = self.tape(), self._module_names.innermost()
        if tape.planned and not counters:
            place = store.keep_planned(alias, span[1] - span[0], storage, tape, module)
            if place is not None:
                return Planned(place, alias)
        # The record holds bytes. Conjugation and negation are lazy bits of the view, which the handle restores.
        conj, neg = alias.is_conj(), alias.is_neg()
        if conj:
            alias = alias.conj()
        if neg:
            alias = alias._neg_view()
        name = self._name_of(storage) if self._names_count else None
        record = store.admit(alias, span, storage, tape, (module, name), counters)
        if record.stays and not conj and not neg:
            return Stayed(store, record, alias)
        return Handle(store, record, alias, conj, neg)

    def _names_for(self, tensor: Tensor) -> tuple[str | None, str | None]:
        return self._module_names.innermost(), self._name_of(tensor.untyped_storage())

    def _name_of(self, storage: torch.UntypedStorage) -> str | None:
        return name_of(storage, only_boundaries=self._only_boundaries) if self._names_count else None

    def _keep(self, tensor: Tensor, reason: KeepReason, nbytes: int) -> Kept:
        if reason._value_ in STATIC or not nbytes:
            self._store.keep_static(reason, nbytes)
            # Keep a parameter or buffer that is a leaf as the object itself, as autograd does: backward then sees its
            # attributes and a swapped `.data`, and a leaf closes no cycle. A model's input can: an in-place operation
            # may make it the output of this graph.
            itself = reason in (KeepReason.PARAMETER, KeepReason.BUFFER) and tensor.is_leaf
            return Kept(tensor if itself else tensor.detach(), itself=itself)
        handle = KeptActivation(tensor.detach(), self._store, nbytes, reason._value_)
        stack = self._forwards.stack
        tape = stack[-1].tape if stack else None
        handle.entry = self._store.keep_activation(nbytes, reason, tensor.device.type, tape)
        return handle

    def _keep_uncounted(self, tensor: Tensor) -> Kept:
        """Return the handle of a tensor that stays, of any layout. The store counts nothing for it."""
        # As in `_keep`: with an alias, backward would read the contents from before a swap of the parameter's `.data`.
        itself = tensor.is_leaf and (is_parameter(tensor) or self._exclusions.is_of_module(tensor))
        return Kept(tensor if itself else tensor.detach(), itself=itself)

    def _pack_subclass(self, tensor: Tensor, outer: tuple[Counter, ...]) -> Any:
        if is_parameter(tensor):
            self._exclusions.static.add(tensor, "parameter")
            return self._keep(tensor, KeepReason.PARAMETER, 0)
        counter = Wrapped.hollow(tensor) if is_traceable_wrapper_subclass(tensor) else None
        if counter is not None:
            counters = (*outer, counter)
            return Wrapped(tensor, counter, lambda inner: self._pack(inner, counters))
        return self._keep(tensor, KeepReason.SUBCLASS, 0)
