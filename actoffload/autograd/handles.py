"""The handles that the autograd graph holds in place of saved tensors, and the unpack hook.

A handle never holds the tensor it was made from: an output holds its graph, so that would be a cycle. It holds the
version counter, and for a tensor that stays an alias of it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ..errors import SavedTensorModifiedError
from ..locks import renewed_in_child
from ..runtime.identity import Counter, same_counter
from ..runtime.regions import Region
from ..runtime.untraced import untraced
from ..tiers.record import State
from .tensors import inner_names, storages

if TYPE_CHECKING:
    from ..runtime.kept_place import KeptPlace
    from ..runtime.profiler import SavedStorage
    from ..runtime.store import ActivationStore
    from ..tiers.record import Record

NOTHING: dict[tuple[torch.dtype, torch.device], Tensor] = {}
"""The tensors that `empty` returns, by type and device."""
_filling = renewed_in_child(threading.RLock())
"""Held while a wrapper's alias has its inner tensors. Reentrant, because code of the subclass runs under it."""
_SHARES = torch._C.DispatchKey.ADInplaceOrView
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def counters_are_shared() -> bool:
    """Return whether an alias shares its tensor's version counter here anyway, so that `sharing_counters` is no use."""
    return not torch._C._dispatch_tls_is_dispatch_key_excluded(_SHARES)


def sharing_counters() -> AbstractContextManager[None]:
    """Return a context in which an alias shares the version counter of its tensor, also below autograd.

    Dispatch modes run below autograd, and PyTorch's selective checkpoints (from 2.14 on) call hooks from one. There an
    alias would get a version counter of its own, and a change of the original would go unseen.
    """
    if counters_are_shared():
        return nullcontext()
    guard: AbstractContextManager[None] = torch._C._SetExcludeDispatchKeyGuard(_SHARES, False)
    return guard


def version_probe(alias: Tensor) -> Tensor:
    """Turn an alias (``t.detach()``) into an empty tensor that still shares the version counter of ``t``.

    ``Tensor.data =`` swaps the contents and keeps the counter, so the probe sees every in-place change of the original
    without holding its memory.
    """
    alias.data = empty(torch.float32, alias.device)
    return alias


def empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor without elements: the same one each time, unless a mode makes another kind of tensor."""
    found = NOTHING.get((dtype, device))
    if found is None:
        with torch.inference_mode(False):
            found = torch.empty(0, dtype=dtype, device=device)
        # A fake, wrapped or functional tensor belongs to the mode or transform that made it and must not outlive it.
        if type(found) is Tensor and not (_is_wrapped(found) or torch._is_functional_tensor(found)):
            NOTHING[dtype, device] = found
    return found


RAN_ONCE = (
    " If a checkpointed region saved it: the region ran once, as the plan says, where a second run would have computed "
    "it anew; checkpoints='leave' lets every region run again."
)


def check_version(now: int, then: int, dtype: torch.dtype, shape: tuple[int, ...], module: str | None) -> None:
    """Raise autograd's error if a saved tensor was changed in place since it was saved.

    Raises:
        SavedTensorModifiedError: the versions differ.
    """
    if now == then:
        return
    where = f", which was saved inside {module}," if module else ""
    raise SavedTensorModifiedError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{str(dtype).removeprefix('torch.')} tensor {list(shape)}]{where} is at version {now}; expected version "
        f"{then} instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
        f"with torch.autograd.set_detect_anomaly(True).{RAN_ONCE if Region.any_once else ''}"
    )


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor; () for a strided nested tensor, which has none."""
    return () if tensor.is_nested and tensor.layout is torch.strided else tuple(tensor.shape)


class _Held(list[Tensor]):
    """The tensors that one backward returned to custom Functions. A callback of that backward owns the list.

    So the list dies with the backward, even one that raises.
    """


class _HandedOut(threading.local):
    """This thread's `_Held` lists, by the number of the backward (autograd's graph task)."""

    def __init__(self) -> None:
        self.by_task: weakref.WeakValueDictionary[int, _Held] = weakref.WeakValueDictionary()
        self.reading = False
        """A Function reads its saved tensors now. PyTorch still collects them, so the Function holds none yet."""


_handed_out = _HandedOut()


def _holders(held: list[Tensor], index: int) -> int:
    """Return the number of references to a tensor, in Python and in C++ together."""
    tensor = held[index]
    return sys.getrefcount(tensor) + tensor._use_count()  # type: ignore[attr-defined,no-any-return]


_ALONE = _holders([torch.empty(0)], 0)
"""The count for a tensor that only the list holds: measured, as interpreters count their own references differently."""


def let_go() -> bool:
    """Release the tensors that only the list holds: the Function has returned, and not returned them as gradients.

    Returns:
        Whether this thread may still hold a tensor, for any backward.
    """
    # Not `len` and `values` of the dictionary, which are Python functions: this runs for each saved tensor.
    lists: dict[Any, Any] = _handed_out.by_task.data  # type: ignore[attr-defined]
    if not lists or _handed_out.reading:
        return _handed_out.reading
    held = _handed_out.by_task.get(torch._C._current_graph_task_id())
    if held:
        held[:] = [held[index] for index in range(len(held)) if _holders(held, index) > _ALONE]
    return bool(held) or len(lists) > (held is not None)  # another backward's list, in which this one is nested


def hand_out(tensor: Tensor) -> Tensor:
    """Return a tensor, and hold it until the first unpack after the custom Function that receives it has returned.

    The Function may return it as the gradient of a leaf. Autograd steals a gradient with one owner instead of copying
    it, and this one shares its memory with the saved tensor. The second owner makes autograd copy.
    """
    task = torch._C._current_graph_task_id()
    if task != -1 and not _asked_by_pytorch():
        let_go()
        held = _handed_out.by_task.get(task)
        if held is None:
            held = _handed_out.by_task[task] = _Held()
            # The callback ends the hold as backward ends. Its reference keeps the list alive until then.
            torch.autograd.Variable._execution_engine.queue_callback(held.clear)
        held.append(tensor)
    return tensor


def _asked_by_pytorch() -> bool:
    """Return whether PyTorch's engine or one of its own Functions unpacks. These never return a saved tensor itself."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        if name not in _BETWEEN:
            return str(name).startswith("torch.") and name != _OF_FUNCTIONS
        frame = frame.f_back  # type: ignore[assignment]  # the thread's first frame has none
    return True


@untraced
def saved_tensors(ctx: Any) -> tuple[Tensor | None, ...]:
    """``ctx.saved_tensors`` of a custom Function, with the very leaves that it saved, as without hooks.

    Under hooks PyTorch makes a new object for each tensor that requires a gradient, which for a leaf lacks the leaf's
    attributes and ``.grad``. A new object that shares memory with a saved tensor is held, for the reason in `hand_out`.
    """
    let_go()  # before `reading`, which keeps this read's own unpacks from releasing each other's tensors
    before, _handed_out.reading = _handed_out.reading, True
    try:
        found: tuple[Tensor | None, ...] = _saved_tensors(ctx)
    finally:
        _handed_out.reading = before
    if not any(tensor is not None and tensor.requires_grad for tensor in found):
        return found
    held = _handed_out.by_task.get(torch._C._current_graph_task_id())
    return tuple(tensor if tensor is None or not tensor.requires_grad else _as_saved(tensor, held) for tensor in found)


def _as_saved(tensor: Tensor, held: list[Tensor] | None) -> Tensor:
    """Return the leaf for which PyTorch made this new object. Else return the tensor itself, and hold it if needed."""
    if tensor._use_count() > 1:  # type: ignore[attr-defined]  # it has other owners, so no hook made it
        return tensor
    memory = _memory(tensor)
    if not memory or _is_wrapped(tensor):
        return tensor
    if tensor.is_leaf:
        leaf = _leaf_of(tensor)
        # Hooks of the program's own may have returned other memory, which is what the Function has to read.
        return leaf if leaf is not None and _memory(leaf) == memory else tensor
    handed = next((one for one in reversed(held or ()) if _memory(one) == memory), None)
    if handed is not None and held is not None:
        vars(tensor).update(vars(handed))
        held.append(tensor)
    return tensor


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors with the same elements in the same memory; empty if that is unknown."""
    numbers = tuple(storage._cdata for storage in storages(tensor))
    if not numbers:
        return ()
    place = () if hasattr(tensor, "__tensor_flatten__") else (tensor.data_ptr(), tensor.stride())
    return numbers, tensor.dtype, tensor.shape, place


def _leaf_of(tensor: Tensor) -> Tensor | None:
    """Return the leaf whose ``.grad`` accumulates the gradients of a tensor, or None if autograd does not show it."""
    # The node of a view leads to the tensor's own gradient edge, which for a leaf is its `AccumulateGrad`.
    with torch.enable_grad(), contextlib.suppress(AttributeError, NotImplementedError, RuntimeError, TypeError):
        return tensor.view_as(tensor).grad_fn.next_functions[0][0].variable  # type: ignore[union-attr,no-any-return]
    return None


_saved_tensors = BackwardCFunction.saved_tensors.__get__  # type: ignore[attr-defined]


def watch_functions() -> None:
    """Replace ``ctx.saved_tensors`` of custom Functions by `saved_tensors`."""
    BackwardCFunction.saved_tensors = property(saved_tensors)  # type: ignore[assignment]


_BETWEEN = (__name__, untraced.__module__, "torch._dynamo.eval_frame")
"""Modules with frames between the reader of a saved tensor and this module (the last one: in compiled code)."""
_OF_FUNCTIONS = "torch._functorch.autograd_function"
"""This module of PyTorch runs the program's own Functions, under `torch.func.vmap`."""


@untraced
def unpack(handle: Any) -> Tensor:
    """Return the tensor that a handle stands for: the unpack hook."""
    return hand_out(unpack_only(handle))


def unpack_only(handle: Any) -> Tensor:
    """Return the tensor that a handle stands for, without holding it for a custom Function."""
    let_go()  # first: a Function that has returned frees its tensors before this one needs memory
    if counters_are_shared():
        return handle.unpack()  # type: ignore[no-any-return]
    with sharing_counters():
        return handle.unpack()  # type: ignore[no-any-return]


class Handle:
    """One saved view of a record."""

    __slots__ = ("conj", "dtype", "neg", "offset", "probe", "record", "round", "shape", "store", "stride", "version")

    def __init__(self, store: ActivationStore, record: Record, alias: Tensor, conj: bool, neg: bool) -> None:
        self.record = record
        self.dtype = alias.dtype
        self.shape = alias.shape
        self.stride = alias.stride()
        self.offset = alias.storage_offset() * self.dtype.itemsize
        self.conj = conj
        self.neg = neg
        self.version = alias._version
        self.round = record.round
        self.probe = version_probe(alias)
        self.store = store  # last: its death counts from here on

    def unpack(self) -> Tensor:
        """Return the saved view, bit for bit.

        Raises:
            SavedTensorModifiedError: it was changed in place.
            StorageReadError: it could not be read back.
        """
        record = self.record
        # The check comes first, as `obtain` may return the original storage with its present contents.
        if self.probe._version != self.version:
            check_version(self.probe._version, self.version, self.dtype, self.shape, record.saved.module)
        storage, self.round = self.store.obtain(record, self.round)
        return view_in(self, storage, record.begin_in(storage))

    def peek(self, fetch: bool) -> Tensor | None:
        """Return the saved view, unless it was changed in place; this is no use by backward.

        ``fetch``: wherever its bytes are. Otherwise None is returned if they are not on their device.
        """
        if self.probe._version != self.version:
            return None
        found = present(self.record, self.store, fetch=fetch)
        return None if found is None else view_in(self, found, self.record.begin_in(found))

    def __del__(self) -> None:
        store = getattr(self, "store", None)
        if store is not None:
            store.drop(self.record, self.round)


def present(record: Record, store: ActivationStore, *, fetch: bool) -> torch.UntypedStorage | None:
    """Return the storage with a record's bytes; this is no use by backward.

    ``fetch``: wherever they are. Otherwise None is returned if they are not on the device.
    """
    tier = store.tiers.by_device[record.kind]
    with store.shared.lock, tier.watched():
        storage = record.original()
        if storage is not None:
            return storage
        arrives = record.state is State.FETCHING or (record.host is not None and record.host.incoming is not None)
        if record.data is not None and not arrives:
            return record.data
        if not fetch:
            return None
        tier.make_room(record.nbytes)
        storage = store.fetch_now(record, tier)
        tier.evict(record)  # the caller holds the storage for as long as it needs it
        return storage


def view_in(handle: Any, storage: torch.UntypedStorage, begin: int) -> Tensor:
    """Return the view that a handle saved, in a storage that begins at byte ``begin`` of the original storage."""
    offset = (handle.offset - begin) // handle.dtype.itemsize
    view = empty(handle.dtype, storage.device).detach()
    view.set_(storage, offset, handle.shape, handle.stride)
    # The view shares the version counter of the saved tensor. If backward changes the view in place, the next unpack
    # raises, as autograd's own does.
    shared: Tensor = handle.probe.detach()
    shared.data = view
    if handle.conj:
        shared = shared.conj()
    return shared._neg_view() if handle.neg else shared


class Kept:
    """A saved tensor that stays where it is: its alias, and the version at which it was saved.

    Args:
        alias: a tensor that shares its memory, or with ``itself`` the saved tensor, a leaf.
        itself: whether unpack returns ``alias`` itself, as autograd does for a leaf.
    """

    __slots__ = ("alias", "itself", "version")

    def __init__(self, alias: Tensor, *, itself: bool = False) -> None:
        self.alias = alias
        self.itself = itself
        self.version = alias._version

    def unpack(self) -> Tensor:
        """Return the saved tensor.

        Raises:
            SavedTensorModifiedError: it was changed in place.
        """
        alias = self.alias
        if alias._version != self.version:
            check_version(alias._version, self.version, alias.dtype, shape_of(alias), self.module)
        # A new alias each time: its receiver may swap its `.data`, and the next unpack must not see that.
        return alias if self.itself else alias.detach()

    @property
    def module(self) -> str | None:
        """The name of the module that it was saved in, if that is known."""
        return None


class Stayed(Kept):
    """One saved view of a record that stays for life. Its unpack notifies the store of backward's progress."""

    __slots__ = ("record", "round", "store")

    def __init__(self, store: ActivationStore, record: Record, alias: Tensor) -> None:
        super().__init__(alias)
        self.round = record.round
        self.record = record
        self.store = store  # last: its death counts from here on

    def unpack(self) -> Tensor:
        """Return the saved tensor.

        Raises:
            SavedTensorModifiedError: it was changed in place.
        """
        alias = super().unpack()
        self.round = self.store.passed(self.record, self.round)
        return alias

    def peek(self, fetch: bool) -> Tensor | None:
        """As of a `Handle`."""
        return self.alias.detach() if self.alias._version == self.version else None

    @property
    def module(self) -> str | None:
        """The name of the module that it was saved in, if that is known."""
        return self.record.saved.module

    def __del__(self) -> None:
        store = getattr(self, "store", None)
        if store is not None:
            store.drop(self.record, self.round)


class Planned(Kept):
    """One saved view of a storage that a plan keeps, which has no record. Its unpack notifies the store as well."""

    __slots__ = ("place", "round")

    def __init__(self, place: KeptPlace, alias: Tensor) -> None:
        super().__init__(alias)
        self.place = place
        self.round = place.round

    def unpack(self) -> Tensor:
        """Return the saved tensor.

        Raises:
            SavedTensorModifiedError: it was changed in place.
        """
        alias = super().unpack()
        self.round = self.place.passed(self.round)
        return alias

    def peek(self, fetch: bool) -> Tensor | None:
        """As of a `Handle`."""
        return self.alias.detach() if self.alias._version == self.version else None

    @property
    def module(self) -> str | None:
        """The name of the module that it was saved in, if that is known."""
        return self.place.module


class KeptActivation(Kept):
    """A kept tensor that counts as activation memory until it dies."""

    __slots__ = ("entry", "nbytes", "store")

    def __init__(self, alias: Tensor, store: ActivationStore, nbytes: int, reason: str) -> None:
        super().__init__(alias)
        self.entry: SavedStorage | None = None
        self.nbytes = nbytes
        self.store = store
        # Append only once `store` is set: from then on the finalizer subtracts these bytes again.
        store.shared.accounts.deferred.append((reason, nbytes, True))

    def peek(self, fetch: bool) -> Tensor | None:
        """As of a `Handle`."""
        return self.alias.detach() if self.alias._version == self.version else None

    def __del__(self) -> None:
        store = getattr(self, "store", None)
        if store is not None:
            store.drop_kept(self.nbytes, self.entry)


_PLAIN_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def is_plain_value(value: Any) -> bool:
    """Return whether a value refers to no other object, so that a handle that holds it cannot hold the graph."""
    return isinstance(value, _PLAIN_VALUES) or (isinstance(value, tuple) and all(map(is_plain_value, value)))


class Attributed:
    """The handle of a saved tensor with attributes of its Python object. The unpacked tensor gets them again."""

    __slots__ = ("attributes", "handle")

    def __init__(self, handle: Any, attributes: dict[str, Any]) -> None:
        self.handle = handle
        self.attributes = attributes

    def unpack(self) -> Tensor:
        """Return the saved tensor, or raise the inner handle's error."""
        tensor: Tensor = self.handle.unpack()
        vars(tensor).update(self.attributes)
        return tensor


class Wrapped:
    """A saved wrapper subclass (DTensor, NF4, jagged, ...): its inner tensors are packed one by one.

    The handle keeps an alias of the wrapper without inner tensors. The alias shares the wrapper's version counter,
    because an in-place change of a wrapper does not count on its inner tensors. Unpack refills the alias.
    """

    __slots__ = ("counter", "inner")

    def __init__(self, tensor: Tensor, counter: Counter, pack: Callable[[Tensor], Any]) -> None:
        self.counter = counter
        self.inner: dict[str, Any] = {}
        for name in inner_names(tensor):
            inner = getattr(tensor, name)
            # PyTorch identifies the ragged size of a nested tensor by its offsets tensor, so keep that very object.
            ragged = tensor.is_nested and name != "_values"
            self.inner[name] = Kept(inner, itself=True) if ragged else pack(inner)

    @staticmethod
    def hollow(tensor: Tensor) -> Counter | None:
        """Return the alias without inner tensors, or None if the subclass does not allow removing them.

        It first waits for a collective that still computes the tensor, so the caller may hold no lock.
        """
        wait = getattr(tensor, "trigger_wait", None)
        if wait is not None:
            wait()
        try:
            shell = tensor.detach()
            for name in inner_names(shell):
                setattr(shell, name, None)
            return Counter(shell, shell._version) if same_counter(shell, tensor) else None
        except (AttributeError, NotImplementedError, RuntimeError, TypeError):
            return None

    def unpack(self) -> Tensor:
        """Return the subclass, rebuilt around its inner tensors.

        Raises:
            SavedTensorModifiedError: it, or a tensor inside, was changed in place.
            StorageReadError: a tensor inside could not be read back.
        """
        shell = self.counter.probe
        check_version(shell._version, self.counter.version, shell.dtype, shell.shape, None)
        inner = {name: handle.unpack() for name, handle in self.inner.items()}
        # The alias is shared by every unpack of this handle, and another thread may run backward on the same graph.
        with _filling:
            for name, tensor in inner.items():
                setattr(shell, name, tensor)
            try:
                return shell.detach()
            finally:
                for name in inner:
                    setattr(shell, name, None)
