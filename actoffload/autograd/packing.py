"""The pack hook: turns each tensor that autograd saves into the handle that the graph holds in its place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..policy import KeepReason
from ..runtime.identity import PLAIN_TYPES, Counter, byte_span, is_parameter, own_counter
from ..runtime.kept import keep, may_keep
from ..runtime.store import ActivationStore
from ..runtime.tape import Tape
from ..runtime.untraced import compiling, untraced, untraced_frame
from ..tiers.record import Record
from .exclusions import MARKED, Exclusions, is_filled_later
from .handles import (
    Attributed,
    Handle,
    Kept,
    Wrapped,
    counters_are_apart,
    is_plain_value,
    sharing_counters,
    unpack,
    watch_functions,
)
from .module_names import ModuleScopes
from .tensor_names import name_of

ATTRIBUTES = (
    "a saved tensor has the attribute {!r}, which backward does not find: numbers and texts alone are kept of a "
    "tensor's attributes; pass what backward needs by ctx, or have the tensor left alone by no saved-tensor hook"
)
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_count_modes = torch._C._len_torch_dispatch_stack
_PARAMETER, _INPUT = KeepReason.PARAMETER.value, KeepReason.INPUT.value


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
    return Tape() if tape.in_backward or tape.ran_again or (tape.live == 0 and len(tape)) else tape


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
        self._min_bytes = store.min_bytes
        self._static = exclusions.static.by_number
        self._only_boundaries = store.shared.config.boundaries == "only"
        self._names_count = store.decision.uses_names

    def hooks(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Return the two hooks: pack and unpack."""
        watch_functions()
        return self.pack, unpack

    @untraced_frame
    def pack(self, tensor: Tensor) -> Any:
        """Return the handle of a tensor that autograd saves: the pack hook."""
        if compiling() is not None or counters_are_apart():
            return self._pack_elsewhere(tensor)
        return self._pack_whole(tensor)

    @untraced
    def _pack_elsewhere(self, tensor: Tensor) -> Any:
        """Do the same inside of a compiled function, or below autograd."""
        with sharing_counters():
            return self._pack_whole(tensor)

    def _pack_whole(self, tensor: Tensor) -> Any:
        try:
            handle = self._pack(tensor, ())
            # A subclass uses attributes for its own parts (inner tensors, layout): only a plain tensor is checked.
            if type(tensor) not in PLAIN_TYPES or not vars(tensor):
                return handle
            return self._with_attributes(tensor, handle)
        except BaseException as error:
            self._store.abort_if_interrupted(error)
            raise

    def _pack(self, tensor: Tensor, counters: tuple[Counter, ...]) -> Any:
        """Return the handle of a tensor, or of one inside the wrapper subclasses whose counters these are."""
        # An aborted store takes nothing, yet contexts entered before the interrupt are still open. Under `make_fx`
        # tensors have no bytes to move.
        if self._store.interrupted or (_count_modes() and torch._C._get_dispatch_mode(_PROXY) is not None):
            return Kept(tensor.detach())
        if type(tensor) not in PLAIN_TYPES:
            return self._pack_subclass(tensor, counters)
        if tensor.layout is not torch.strided:
            return self._keep(tensor, KeepReason.LAYOUT, 0)
        storage = tensor.untyped_storage()
        # First, before all other questions: most saved tensors are parameters.
        known = self._static.get(storage._cdata)
        if known is None or tensor.is_nested:
            return self._pack_activation(tensor, storage, counters)
        return self._pack_static(tensor, storage, known[1])

    def _pack_static(self, tensor: Tensor, storage: torch.UntypedStorage, note: str) -> Kept:
        """Return the handle of a parameter, buffer or input, or of a view of one."""
        nbytes, storage_bytes = tensor.nbytes, storage.nbytes()
        if note != _PARAMETER and is_parameter(tensor):
            note = _PARAMETER
        self._store.keep_static(note, nbytes if nbytes < storage_bytes else storage_bytes)
        # Keep a parameter or buffer that is a leaf as the object itself, as autograd does: backward then sees its
        # attributes and a swapped `.data`, and a leaf closes no cycle. A model's input can: an in-place operation may
        # make it the output of this graph.
        if note != _INPUT and tensor.is_leaf:
            return Kept(tensor, True)
        return Kept(tensor.detach())

    def _pack_activation(self, tensor: Tensor, storage: torch.UntypedStorage, counters: tuple[Counter, ...]) -> Any:
        """Return the handle of a strided tensor whose storage is not known to be static."""
        if tensor.is_nested or tensor.is_quantized or tensor.is_meta or tensor._is_zerotensor():  # all without memory
            return self._keep(tensor, KeepReason.LAYOUT, 0)
        note = self._exclusions.newly_static(tensor, storage)
        if note is not None:
            return self._pack_static(tensor, storage, note)
        nbytes, storage_bytes = tensor.nbytes, storage.nbytes()
        reason = self._exclusions.why_stays(storage)
        if reason is not None:
            return self._keep(tensor, reason, nbytes if nbytes < storage_bytes else storage_bytes)
        if 2 * nbytes >= storage_bytes and tensor.is_contiguous() and nbytes:
            begin, end = 0, storage_bytes  # usually: `byte_span` would find the same
        else:
            begin, end = byte_span(tensor, storage_bytes) if nbytes else (0, 0)
        reason = self._why_unfit(tensor, end - begin)
        if reason is not None:
            return self._keep(tensor, reason, end - begin)
        with self._store.tiers.hook:  # one query per device for a graph capture serves the whole hook
            if self._store.tiers.by_device["cpu" if tensor.is_cpu else tensor.device.type].is_of_a_graph(tensor):
                return self._keep(tensor, KeepReason.CAPTURE, end - begin)
            if is_filled_later(tensor):
                return self._keep(tensor, KeepReason.FILLED_LATER, end - begin)
            return self._save(tensor, storage, (begin, end), counters or own_counter(tensor))

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
        """Return why saving this activation in a forward would make no record, or None if it would."""
        if type(tensor) not in PLAIN_TYPES:
            return None if is_traceable_wrapper_subclass(tensor) else KeepReason.SUBCLASS
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
            return KeepReason.LAYOUT
        storage = tensor.untyped_storage()
        if storage._cdata in MARKED.by_number:
            return KeepReason.MARKED
        begin, end = byte_span(tensor, storage.nbytes()) if tensor.nbytes else (0, 0)
        reason = self._why_unfit(tensor, end - begin)
        if reason is None and self._store.tiers.by_device[tensor.device.type].is_of_a_graph(tensor):
            return KeepReason.CAPTURE
        return KeepReason.FILLED_LATER if reason is None and is_filled_later(tensor) else reason

    def _why_unfit(self, tensor: Tensor, nbytes: int) -> KeepReason | None:
        """Return why a tensor that needs ``nbytes`` stays because of its device or size, or None."""
        kind = "cpu" if tensor.is_cpu else tensor.device.type
        least = self._min_bytes.get(kind)
        if least is None:
            return KeepReason.DEVICE
        return KeepReason.SMALL if nbytes < least else None

    def tape(self) -> Tape[Record]:
        """The tape of the running forward, after counting handles that died: with the last one its tape is over."""
        if self._store.shared.lock.noted:
            self._store.count_deferred()
        return self._forwards.tape

    def _save(
        self, tensor: Tensor, storage: torch.UntypedStorage, span: tuple[int, int], counters: tuple[Counter, ...]
    ) -> Any:
        """Return the handle of a tensor that may move, after the store has decided whether it does."""
        store, tape, module = self._store, self.tape(), self._module_names.innermost()
        alias = tensor.detach()
        if not counters and may_keep(store, storage._cdata, span[1] - span[0], tape):
            kept = Kept(alias)
            hold = keep(store, kept, alias, span, storage, tape, module)
            if hold is not None:
                kept.begin(store, hold)
                return kept
        # The record holds bytes. Conjugation and negation are lazy bits of the view, which the handle restores.
        conj, neg = alias.is_conj(), alias.is_neg()
        if conj:
            alias = alias.conj()
        if neg:
            alias = alias._neg_view()
        name = name_of(storage, only_boundaries=self._only_boundaries) if self._names_count else None
        handle = Handle(alias, conj=conj, neg=neg)
        handle.begin(store, store.admit(handle, alias, span, storage, tape, (module, name), counters), alias)
        return handle

    def _keep(self, tensor: Tensor, reason: KeepReason, nbytes: int) -> Kept:
        """Return the handle of a tensor that stays for a reason that the store does not decide on."""
        kept = Kept(tensor.detach())
        if nbytes:
            self._store.keep_activation(kept, nbytes, reason, tensor)
        else:
            self._store.keep_static(reason._value_, 0)
        return kept

    def _pack_subclass(self, tensor: Tensor, outer: tuple[Counter, ...]) -> Any:
        if is_parameter(tensor):
            self._exclusions.static.add(tensor, _PARAMETER)
            self._store.keep_static(_PARAMETER, 0)
            return Kept(tensor, True) if tensor.is_leaf else Kept(tensor.detach())
        counter = Wrapped.hollow(tensor) if is_traceable_wrapper_subclass(tensor) else None
        if counter is not None:
            counters = (*outer, counter)
            return Wrapped(tensor, counter, lambda inner: self._pack(inner, counters))
        return self._keep(tensor, KeepReason.SUBCLASS, 0)
