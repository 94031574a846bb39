"""``codec``: storages of the program's for which something else is saved, and checks that it has their bits."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ..errors import SavedTensorModifiedError
from ..locks import renewed_in_child
from ..runtime.backward_end import BackwardEnd
from ..runtime.identity import same_counter
from ..runtime.store import ActivationStore
from ..runtime.tape import Tape
from ..tiers.copy_streams import CopyStreams
from ..tiers.record import Record
from ..tiers.storage_ref import StorageRef
from .handles import version_probe

MOST = 5_000
"""The nodes of so many saves are read at most while saved tensors are alive. To read one gives it a Python object, and
PyTorch frees a chain of such nodes recursively: one of 20,000 is freed, one of 60,000 ends the process (a stack of
8 MiB)."""
_checking, _noting = renewed_in_child(threading.Lock()), renewed_in_child(threading.Lock())
CHANGED = (
    "a tensor was saved as the tensor that it was cast from, or computed again as the product or the activation that "
    "it is. It had been changed before it was saved, and no version counter showed it (a change through .data, or by a "
    "kernel of the program's own): the gradients of this backward are wrong. Set codec='none'"
)


def source_of(node: Any) -> tuple[Any, Any] | None:
    """Return the node of the tensor that a node casts, and the dtype and device of it; None if the node is no cast."""
    if type(node).__name__ != "ToCopyBackward0":
        return None
    source, number = node.next_functions[0]
    metadata = getattr(source, "_input_metadata", ())
    return (source, metadata[number]) if len(metadata) > number else None


def node_of(tensor: Tensor) -> Any:
    """Return the node that made the whole storage of a plain tensor; None if it was changed since, or is a leaf's.

    Args:
        tensor: is about to be saved: the result of the node, or a view of it.
    """
    whole = tensor if tensor._base is None else tensor._base
    if tensor.dtype is not whole.dtype or whole._version or tensor._version or tensor.is_neg() or tensor.is_conj():
        return None
    if whole.nbytes != whole.untyped_storage().nbytes():
        return None
    node = whole.grad_fn
    return node if type(node).__module__ == "builtins" else None  # else a custom Function, of any name


class Original:
    """A storage of the program's, for which something else is saved.

    Args:
        tensor: a view of it, as it is saved first.
        stream: that saves it; None on the CPU.
    """

    __slots__ = ("__weakref__", "_address", "_identity", "_probe", "_thread", "_version", "dtype", "nbytes", "stream")

    def __init__(self, tensor: Tensor, stream: Any) -> None:
        storage = tensor.untyped_storage()
        self._identity = StorageRef(storage)  # pins the storage's number, by which others find this object
        self._address = storage.data_ptr()
        self._probe, self._version = version_probe(tensor.detach()), tensor._version
        self._thread = threading.get_ident()
        self.dtype, self.nbytes = tensor.dtype, storage.nbytes()
        self.stream = stream

    def has_bytes_of(self, tensor: Tensor, stream: Any) -> bool:
        """Return whether a tensor in a storage with this one's number has the bytes of the first save, in its type.

        Args:
            tensor: is about to be saved.
            stream: that saves it. Another one than the first has not waited for the kernels of what is saved instead.
        """
        return (
            self.stream == stream
            and (self._version, self.dtype) == (tensor._version, tensor.dtype)
            and self._address == tensor.untyped_storage().data_ptr()  # else it was resized and has moved: other bytes
            and self._thread == threading.get_ident()  # another thread might see the bump of `same_counter`
            and same_counter(self._probe, tensor)
        )

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage if the program still holds it, and its owner has not freed it for now."""
        storage = self._identity.lock()
        return storage if storage is not None and storage.nbytes() >= self.nbytes else None


class Checked:
    """The keys (of an operation, a module) whose tensors the first forward with that key has compared.

    In that forward the host waits for each comparison, so a tensor that differs costs no training. A later one may not
    be compared: once one differs, all of its key are saved as they are.
    """

    def __init__(self) -> None:
        self._first: dict[Hashable, float] = {}
        """The first forward with each key; infinite once a tensor was different."""

    def differs(self, key: Hashable) -> bool:
        """Return whether a tensor of this key was different."""
        return self._first.get(key) == math.inf

    def before(self, key: Hashable, forward: int) -> bool:
        """Return whether a forward before this one has compared tensors of this key."""
        return self._first.get(key, forward) < forward

    def note(self, key: Hashable, forward: int, same: bool) -> None:
        """Note the result of a comparison that the host has waited for."""
        self._first[key] = self._first.get(key, forward) if same else math.inf


class Originals:
    """Reads the graph for tensors of which something else can be saved, and checks that it has their bits.

    An accelerator's host waits for a comparison in the first forward of a module alone. Later it collects one flag for
    each stream, and learns what it says before backward returns.

    Args:
        store: has the tiers.
    """

    def __init__(self, store: ActivationStore) -> None:
        self.store = store
        self._alive: weakref.WeakSet[Original] = weakref.WeakSet()
        """The originals of which a handle is alive."""
        self._tape: Callable[[], Any] = lambda: None
        """The forward that began while no saved tensor was alive, and how many nodes have been read since."""
        self._nodes = 0
        self._differs: dict[Any, Tensor] = {}
        """For each stream, whether a tensor had been changed: two streams must not write to one flag at once."""
        self._flags: list[tuple[Any, Any, Tensor]] = []
        """Copies of such flags to the host: the device, the event after the copy, and the copy."""
        self._unused: list[Tensor] = []
        """Page-locked memory for such copies."""
        self._failed = False
        """A tensor had been changed, and one saved before that may be alive: no backward of these may return."""
        self._backward_end = BackwardEnd(self._check)

    def begin_save(self, tape: Tape[Record]) -> None:
        """Note that a forward saves a tensor: the nodes of earlier ones are freed if its tape has all that is alive."""
        if tape is not self._tape() and not self._alive and self.store.shared.accounts.live_records <= tape.live:
            self._tape = weakref.ref(tape)
            self._nodes, self._failed = 0, False

    def original(self, tensor: Tensor, stream: Any) -> Original:
        """Return the original of a tensor that this stream saves."""
        original = Original(tensor, stream)
        self._alive.add(original)
        return original

    def node_of(self, tensor: Tensor) -> Any:
        """Return the node of a tensor, as `node_of`; None also if too many were read, or a mode of the program runs."""
        # A mode of the program would see our kernels, and its second run of a region would lack them.
        if self._nodes >= MOST or torch._C._len_torch_dispatch_stack():
            return None
        node = node_of(tensor)
        self._nodes += node is not None
        return node

    def read(self, flag: Tensor, stream: Any) -> bool:
        """Return what a flag says that this stream has computed. On an accelerator the host waits for the kernels."""
        copies = self.store.tiers.by_device[flag.device.type].copies
        if copies is None:
            return bool(flag)
        event, host = self._copied(flag, stream, copies)
        copies.device.synchronize(event)
        differs = bool(host)
        self._unused.append(host)  # last: from now on another thread may have a flag copied to it
        return differs

    def _copied(self, flag: Tensor, stream: Any, copies: CopyStreams) -> tuple[Any, Tensor]:
        try:
            host = self._unused.pop()
        except IndexError:  # asked only now, as another thread may have taken the last
            host = torch.zeros((), dtype=torch.bool, device="cpu").pin_memory()
        return copies.copy_flag(flag, stream, host), host

    def note(self, stream: Any, differs: Tensor) -> None:
        """Note that a tensor differs from what is saved for it if ``differs``, computed on this stream, says so."""
        with _noting:  # another thread on this stream may note a flag, or collect them, meanwhile
            before = self._differs.get(stream)
            self._differs[stream] = differs if before is None else before.logical_or_(differs)

    def used(self, kind: str, stream: Any) -> None:
        """Note that backward uses what was saved on a stream of a device of this type.

        Before it returns, it learns whether any tensor that the stream had saved by then differs.

        Raises:
            SavedTensorModifiedError: one does, and the program reads the saved tensor outside of backward.
        """
        copies = self.store.tiers.by_device[kind].copies
        if copies is None or copies.inert:
            return
        with _noting:
            differs = self._differs.pop(stream, None)
        if differs is not None:
            self._flags.append((copies.device, *self._copied(differs, stream, copies)))
        # Also without a flag: another thread may have taken it, and `_check` waits for what that thread learns.
        if not self._backward_end.expect():
            self._check()

    def _check(self) -> None:
        """Wait for the copies of the flags: the device has work until backward's end, so it does not wait.

        Raises:
            SavedTensorModifiedError: a tensor had been changed.
        """
        try:
            with _checking:  # a backward of another thread may have taken this one's flags, and must know first
                flags, self._flags = self._flags, []
                for device, event, host in flags:
                    device.synchronize(event)
                    self._failed |= bool(host.item())
                    self._unused.append(host)
        except BaseException as error:
            self.store.abort_if_interrupted(error)
            raise
        if self._failed:
            raise SavedTensorModifiedError(CHANGED)
