"""``codec``: backward computes a product or an activation again, from the operands that autograd saves anyway.

``silu(gate) * up`` saves ``gate``, ``silu(gate)`` and ``up``, and the layer after it saves the product. Two of the four
are elementwise functions of the others, whose saved tensors the graph shows. They are neither moved nor kept: the
program's own memory of them is free as soon as the program drops it. The same holds for the cast of such a function:
norms in float32 save it in bfloat16, adapters in float32.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import SavedTensorModifiedError, StateError
from ..runtime.backward_end import BackwardEnd
from ..runtime.tape import Tape
from ..tiers.device_tier import CAPTURED
from ..tiers.record import Record
from .coded import Coded
from .exclusions import MARKED
from .handles import Handle, check_version, empty, version_probe, view_in
from .hook_stack import OUR_UNPACKS
from .originals import CHANGED, Checked, Original, Originals, source_of
from .tensors import PLAIN_TYPES

Operation = Callable[..., Tensor]
PRODUCT = "MulBackward0"
OPERATIONS: dict[str, tuple[Operation, tuple[str, ...], tuple[str, ...]]] = {
    PRODUCT: (torch.mul, ("self", "other"), ()),
    "SiluBackward0": (torch.nn.functional.silu, ("self",), ()),
    "GeluBackward0": (torch.nn.functional.gelu, ("self",), ("approximate",)),
}
"""By the name of a node: the operation, the tensors that the node saves for it, and its options. On the CPU only a
product has the same bits whatever the number of threads is (but for the payload of a NaN in bfloat16), as the last
elements of each thread's part are computed without vector instructions."""
LEVELS = 2
"""So many operations follow each other at most: a chain of products would hold all its results at once in backward."""
CASTS = 2
"""So many casts in a row may follow: an adapter in float32 casts, and so does autocast."""
HELD = LEVELS + 1
"""So many computed results are held at most: a retained graph would otherwise hold all of them until backward ends."""
PART_BYTES, MOST_PARTS = 8 << 20, 16
"""A comparison takes about so many bytes at a time."""
ONE_IN = 16
"""The results of a module are compared with the program's in the first forward that has them. Then one result of so
many is in each forward, another one each time: a comparison reads and writes as much memory as the operation does. On
the CPU the others are as well, unless their operands have been moved away by then."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class Result:
    """One storage that is computed again: for the handles of all views that one stream saves.

    Args:
        results: notes its use in backward.
        whole: the result of the operation, as the program has it; ``original``: its storage.
        operation: computes it from ``operands``, the handles of saved tensors.
        module: the name of the module that ran, if known.
        beside_bytes: of the largest tensor that is cast, if the result is a cast.

    Attributes:
        region: the tape and the place of the region, run once, that was the last to save it; None: of no such region.
        made: the storage once it is computed, and the stream that has done so.
        like: shape, stride, dtype and device of ``whole``.
        level: how many operations follow each other, also through views.
        room_bytes: that backward needs to compute it; ``at_once_bytes``: with the results that it is computed from.
    """

    results: Results
    whole: InitVar[Tensor]
    original: Original
    operation: Operation
    operands: tuple[Any, ...]
    module: str | None
    beside_bytes: InitVar[int]
    region: tuple[Tape[Record], int] | None = None
    made: tuple[torch.UntypedStorage, Any] | None = None
    like: tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device] = field(init=False)
    level: int = field(init=False)
    room_bytes: int = field(init=False)
    at_once_bytes: int = field(init=False)

    def __post_init__(self, whole: Tensor, beside_bytes: int) -> None:
        self.like = whole.shape, whole.stride(), whole.dtype, whole.device
        before = [operand.result for operand in self.operands if isinstance(operand, Again)]
        self.level = 1 + max((one.level for one in before), default=0)
        self.room_bytes = self.original.nbytes + beside_bytes
        self.at_once_bytes = self.room_bytes + sum(one.at_once_bytes for one in before)
        self.operands = tuple(map(_own, self.operands))

    @property
    def device(self) -> torch.device:
        """Its device."""
        return self.like[3]

    def peek(self, fetch: bool) -> list[Tensor] | None:
        """Return the operands in the forward that saves the result, or None; see `Handle.peek`."""
        operands = [operand.peek(fetch) for operand in self.operands]
        if not all(map(_has_bytes, operands)):
            return None
        copies = self.results.store.tiers.by_device[self.device.type].copies
        if copies is not None:
            for operand in operands:  # it may have been made on another stream, whose allocator may use it again
                copies.device.used_on(operand, self.original.stream)
        return operands

    def storage(self) -> torch.UntypedStorage:
        """Return a storage with the bytes of the original, safe to use on the current stream."""
        shape, stride, dtype, device = self.like
        store = self.results.store
        tier = store.tiers.by_device[device.type]
        current, made = tier.stream_of(device), self.made
        # A storage that another stream computes may not be there yet when this stream reads it.
        if made is None or made[1] != current:
            # Neither a graph nor a call that a mode of the program sees.
            modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
            with torch.no_grad(), modes:
                operands = list(map(_present, self.operands))
                with store.shared.lock:
                    store.regions.leave()  # first: these regions' bytes are room now
                    tier.make_room(self.room_bytes)  # beside the operands, which may be computed again as well

                def compute() -> Tensor:
                    tensor: Tensor = self.operation(*operands)
                    if tensor.stride() == stride:
                        return tensor
                    return empty(dtype, device).new_empty_strided(shape, stride).copy_(tensor)

                made = self.made = tier.with_room(compute).untyped_storage(), current
            store.regions.computed(made[0], self.region)
        return made[0]


def can_compute(node: Any, tensor: Tensor) -> bool:
    """Return whether a plain tensor is a node's result, or a cast of it, and hooks have all that it is computed from.

    ``node``: made the tensor, as `Originals.node_of` returns it.
    """
    if not 0 < _level(node, tensor) <= LEVELS:
        return False
    node, _ = _uncast(node, tensor)
    _, names, _ = OPERATIONS[type(node).__name__]
    return all(getattr(node, f"_raw_saved_{name}").unpack_hook is not None for name in names)


def _own(handle: Any) -> Any:
    """Return another handle of a tensor that moves: it counts, so that the tensor stays until both are unpacked."""
    if not isinstance(handle, Handle):
        return handle
    record, other = handle.record, copy.copy(handle)
    with handle.store.shared.lock:
        record.add_handle()
        other.round = record.round
    return other


def _has_bytes(tensor: Tensor | None) -> bool:
    """Return whether there is a tensor, whose storage its owner has not freed for now."""
    if tensor is None:
        return False
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + reach) * tensor.dtype.itemsize <= tensor.untyped_storage().nbytes()


def _present(handle: Any) -> Tensor:
    """Return the tensor of an operand's handle.

    Raises:
        SavedTensorModifiedError: it was changed in place.
        StorageReadError: it could not be read back.
        StateError: its owner has freed it.
    """
    # Of a tensor that stays only the node that saved it counts as the user: a second use would begin a second backward.
    found: Tensor | None = None if isinstance(handle, (Handle, Again)) else handle.peek(False)
    tensor: Tensor = handle.unpack() if found is None else found
    if not _has_bytes(tensor):
        raise StateError(
            f"backward computes a tensor again from one of shape {list(tensor.shape)}, whose owner has "
            "freed its memory for now. Set codec='none'"
        )
    return tensor


class Again:
    """The handle of one saved view of a `Result`."""

    __slots__ = ("conj", "dtype", "neg", "offset", "probe", "result", "shape", "stride", "version")

    def __init__(self, result: Result, alias: Tensor) -> None:
        self.dtype, self.shape, self.stride = alias.dtype, alias.shape, alias.stride()
        self.offset = alias.storage_offset() * alias.dtype.itemsize
        self.conj = self.neg = False
        self.version = alias._version
        self.probe = version_probe(alias)
        self.result = result

    def unpack(self) -> Tensor:
        """As `Handle.unpack`, also for the tensors that it is computed from.

        Raises:
            StateError: such a tensor was freed by its owner, or a graph is being captured.
        """
        result, store = self.result, self.result.results.store
        if self.probe._version != self.version:
            check_version(self.probe._version, self.version, self.dtype, self.shape, result.module)
        storage = result.original.storage()
        if storage is not None:  # with its present contents, which plain PyTorch would read
            return view_in(self, storage, 0)
        if store.tiers.by_device[result.device.type].capturing(result.device.index):
            raise StateError(CAPTURED)  # no copy of the flag may be enqueued
        try:
            storage = result.storage()
            result.results.used(result)
        except BaseException as error:
            store.abort_if_interrupted(error)
            raise
        return view_in(self, storage, 0)

    def peek(self, fetch: bool) -> Tensor | None:
        """As `Handle.peek`."""
        if self.probe._version != self.version:
            return None
        storage = self.result.original.storage()
        if storage is None:
            operands = self.result.peek(fetch)
            with torch.no_grad():
                storage = None if operands is None else self.result.operation(*operands).untyped_storage()
        return None if storage is None else view_in(self, storage, 0)


class Results:
    """Finds tensors that backward can compute again."""

    def __init__(self, originals: Originals) -> None:
        self.originals = originals
        self.store = originals.store
        self._known: weakref.WeakValueDictionary[int, Result] = weakref.WeakValueDictionary()
        """By the number of the program's storage."""
        self._checked = Checked()
        self._unsure: set[tuple[Any, ...]] = set()
        """The operations in a module of which, on the CPU, not every result was compared."""
        self._forward = self._count = 0
        """The running forward, and its results so far."""
        self._made: list[weakref.ref[Result]] = []
        """The results that hold a computed storage, the latest last. Weak, as a result ends with its last handle."""
        self._backward_end = BackwardEnd(self._drop)

    def handle_of(self, tensor: Tensor, tape: Tape[Record], names: tuple[str | None, str | None]) -> Again | None:
        """Return the handle of a plain tensor, or None if autograd does not save what it is computed from.

        The arguments are those of `Codec.handle_of`.
        """
        store, storage = self.store, tensor.untyped_storage()
        if tensor._version or tensor.is_neg() or 2 * tensor.nbytes < storage.nbytes():  # of a small view its bytes move
            return None
        if store.decision.names.used and store.decision.names.excludes(*names):
            return None
        tier, number = store.tiers.by_device[tensor.device.type], storage._cdata
        stream = tier.stream_of(tensor.device)
        result = self._known.get(number)
        if result is None or not result.original.has_bytes_of(tensor, stream):
            if store.identities.has(storage):  # it has been saved as it is
                return None
            result = self._find(tensor, stream, names[0], len(tape.regions))
            if result is None:
                return None
            self._known[number] = result
            with store.shared.lock:
                store.shared.accounts.derived_bytes += result.original.nbytes
                store.regions.will_compute(result.at_once_bytes)  # its factors may be results as well
        place = tape.runs_once
        result.region = None if place is None else (tape, place)  # the last to save it is the first to need it
        if tier.copies is not None:
            # Plain PyTorch holds the memory until backward. Here the stream that owns it may use it again once the
            # program has dropped the tensor, while this stream still reads it.
            tier.copies.device.used_on(tensor, stream)
        return Again(result, tensor.detach())

    def _find(self, tensor: Tensor, stream: Any, module: str | None, regions: int) -> Result | None:
        # In backward a tensor that the program's own hooks have returned may have a node with other bytes.
        node = self.originals.node_of(tensor) if torch._C._current_graph_task_id() == -1 else None
        if not 0 < _level(node, tensor) <= LEVELS:
            return None
        node, casts = _uncast(node, tensor)
        kind, whole = type(node).__name__, tensor if tensor._base is None else tensor._base
        # With the regions so far, as another plan may let a first or another call of the module run once.
        key = kind, tuple(casts), module, regions, whole.dtype, whole.dim()
        if self._checked.differs(key):
            return None
        operation, names, options = OPERATIONS[kind]
        saved = [getattr(node, f"_raw_saved_{name}") for name in names]
        # A tensor that the node does not save has no hook, and hooks of the program's own may return anything.
        if any(one.unpack_hook not in OUR_UNPACKS for one in saved):
            return None
        handles = tuple(one.data for one in saved)
        if not all(self._is_operand(handle, tensor.device) for handle in handles):
            return None
        if options:
            operation = functools.partial(operation, **{name: getattr(node, f"_saved_{name}") for name in options})
        beside_bytes = 0
        if casts:
            operation = functools.partial(_cast, operation, casts)
            beside_bytes = whole.numel() * max(d.itemsize for d in (node._input_metadata[0].dtype, *casts[:-1]))
        original = self.originals.original(tensor, stream)
        result = Result(self, whole, original, operation, handles, module, beside_bytes)
        return result if result.level <= LEVELS and self._is_right(key, whole, result) else None

    def _is_operand(self, handle: Any, device: torch.device) -> bool:
        """Return whether a handle's tensor is an activation of this store, unchanged, on a result's device.

        A parameter is none: its owner may free or change it between forward and backward (FSDP, ZeRO-3, an optimizer).
        Nor is a tensor that the program has marked with ``keep()``, because its memory is filled again unseen.
        """
        if isinstance(handle, Coded) and not handle.coded.form.exact:  # no comparison would show a change unseen
            return False
        if isinstance(handle, (Handle, Again)):
            store = handle.store if isinstance(handle, Handle) else handle.result.results.store
            return store is self.store and handle.probe._version == handle.version
        stays = handle.peek(False) if hasattr(handle, "peek") else None
        return stays is not None and stays.device == device and stays.untyped_storage()._cdata not in MARKED.by_number

    def _is_right(self, key: tuple[Any, ...], whole: Tensor, result: Result) -> bool:
        """Return whether a result has the program's bits, as far as that is checked in this forward.

        Raises:
            SavedTensorModifiedError: it has not, and others like it were not compared.
        """
        forward, on_cpu = self.store.shared.accounts.steps, whole.is_cpu
        if forward != self._forward:
            self._forward, self._count = forward, 0
        self._count += 1
        known = self._checked.before(key, forward)
        turn = (forward + self._count) % ONE_IN == 0
        if known and not on_cpu and not turn:
            return True
        same = self._has_bits_of(whole, result, fetch=not known or turn, waits=not known or on_cpu)
        if same is None:
            self._unsure.add(key)
        elif not same and key in self._unsure:
            raise SavedTensorModifiedError(CHANGED)
        else:
            self._checked.note(key, forward, same)
        return known if same is None else same

    def _has_bits_of(self, whole: Tensor, result: Result, *, fetch: bool, waits: bool) -> bool | None:
        """Return whether a result has the program's bits: unless the host ``waits``, true until backward learns it.

        Without ``fetch`` it is None if an operand has been moved away by now.
        """
        operands = result.peek(fetch)
        if operands is None:
            return False if fetch else None
        # In parts: a whole result beside the program's own would raise the peak of the forward.
        found: Tensor | None = None
        count = 1 if whole.is_cpu else min(MOST_PARTS, 1 + whole.nbytes // PART_BYTES)
        with torch.no_grad():
            for part, *needed in _parts(count, whole.detach(), *operands):
                made = result.operation(*needed)
                if made.dtype != part.dtype or made.shape != part.shape or type(made) not in PLAIN_TYPES:
                    return False
                bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.dtype.itemsize]
                differs = made.view(bits).ne(part.view(bits)).any()  # bits: a NaN differs from itself
                found = differs if found is None else found.logical_or_(differs)
        assert found is not None, "there is one part or more"
        if waits:
            return not self.originals.read(found, result.original.stream)
        self.originals.note(result.original.stream, found)
        return True

    def used(self, result: Result) -> None:
        """Note that backward uses a result, which is held for the next nodes, and no longer than backward runs."""
        self._drop(result, HELD if self._backward_end.expect() else 0)
        self.originals.used(result.device.type, result.original.stream)

    def _drop(self, last: Result | None = None, most: int = 0) -> None:
        """Drop the computed storages, all but the ``most`` last ones, which ``last`` is one of from now on."""
        with self.store.shared.lock:  # another thread may run backward, too
            held = [one for one in self._made if one() not in (None, last)]
            if last is not None:
                held.append(weakref.ref(last))
            cut = max(len(held) - most, 0)
            dropped, self._made = held[:cut], held[cut:]
        for one in dropped:
            result = one()
            if result is not None:
                result.made = None


def _level(node: Any, tensor: Tensor, most: int = LEVELS + 1) -> int:
    """Return how many operations compute a node's result from tensors that are saved, or ``most`` if there are more.

    It is 0 if the node is of no operation. No more nodes are read than needed: see `originals.MOST`.
    """
    node, _ = _uncast(node, tensor)
    kind = type(node).__name__
    if kind not in OPERATIONS or (tensor.is_cpu and kind != PRODUCT):
        return 0
    operands = [following for following, _ in node.next_functions]
    # A leaf: see `Results._is_operand`. Without a node an operand needs no gradient, so its node does not save another.
    if any(operand is None or type(operand).__name__ == "AccumulateGrad" for operand in operands):
        return 0
    return 1 + max(_level(operand, tensor, most - 1) for operand in operands) if most > 1 else 1


def _uncast(node: Any, tensor: Tensor) -> tuple[Any, list[torch.dtype]]:
    """Return the node behind a tensor's casts, and the dtypes of these; None for the node if a bit may differ.

    On the CPU only casts without rounding have the same bits whatever the number of threads is: the last elements of
    each thread's part round a NaN otherwise.
    """
    casts: list[torch.dtype] = []
    while len(casts) < CASTS and (found := source_of(node)) is not None:
        source, before = found
        dtype = node._input_metadata[0].dtype
        widened = before.dtype is torch.bfloat16 and dtype is torch.float32
        if before.device != tensor.device or not (widened or (before.dtype.is_floating_point and not tensor.is_cpu)):
            return None, []
        casts.insert(0, dtype)
        node = source
    return node, casts


def _cast(operation: Operation, casts: list[torch.dtype], *operands: Tensor) -> Tensor:
    """Return an operation's result, cast."""
    result = operation(*operands)
    for dtype in casts:
        result = result.to(dtype)
    return result


def _parts(count: int, whole: Tensor, *operands: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield a tensor and the operands that it is computed from, in at most ``count`` parts of the tensor's memory."""
    place = max(range(whole.dim()), key=lambda one: (whole.shape[one] > 1, whole.stride(one)), default=None)
    if place is None or count == 1:
        yield whole, *operands
        return
    size, back = whole.shape[place], whole.dim() - place
    step = -(-size // count)
    for begin in range(0, size, step):
        length = min(step, size - begin)
        yield tuple(
            # An operand that is broadcast has no such dimension, or one of size 1.
            one.narrow(-back, begin, length) if one.dim() >= back and one.shape[-back] == size else one
            for one in (whole, *operands)
        )
