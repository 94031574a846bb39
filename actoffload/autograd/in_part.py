"""Regions that run again in part: the results of expensive operators are cached and move, and the rest runs again.

In both runs each value has a number, made from the operator that computed it and the numbers of its arguments. A cached
result stands in for a call only if the second run is about to compute the value of the same number. Where the two runs
differ, for whatever reason, numbers differ too, and the operator is called as it would be without the cache.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..runtime.identity import PLAIN_TYPES
from ..tiers.storage_ref import StorageRef
from ..tiers.timers import Stamp, Stopwatch
from .caching import ALIASES, Mode, quietly, written
from .handles import Kept, version_probe
from .packing import Packer

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution")
_ATTENTIONS = ("flash", "efficient", "cudnn", "flash_attention_for_cpu", "fused_attention_overrideable")
_NAMES = [*_PRODUCTS, *(f"_scaled_dot_product_{name}{'_attention' * ('_' not in name)}" for name in _ATTENTIONS)]
EXPENSIVE = frozenset(getattr(torch.ops.aten, name).default for name in _NAMES if hasattr(torch.ops.aten, name))
"""Matrix products, convolutions and attentions."""
_BY_VALUE = frozenset({bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types whose equal values mean the same to an operator."""
_UNFILLED = ("aten::empty", "aten::new_", "aten::_empty", "aten::resize", "aten::set_")
"""Operators that return memory for kernels to fill: no mode sees these."""


@cache
def _place_of_dropout(func: Any) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


def may_stand_in(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether what an operator returns may stand in for a second call of it."""
    if func not in EXPENSIVE:
        return False
    place = _place_of_dropout(func)
    # A call that draws random numbers has to draw them again: the operators after it draw the next ones.
    return place is None or not (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))


class _Operator(NamedTuple):
    """Facts of an operator.

    Attributes:
        is_view: it returns views of its arguments.
        is_positional: its result is not a function of its arguments alone: random, unfilled, or not PyTorch's.
        writes: whether it changes arguments; None if that is unknown.
        states: the places of the arguments that it changes without a word of it in its schema.
    """

    is_view: bool
    is_positional: bool
    writes: bool | None
    states: tuple[int, ...] = ()


@cache
def _operator(func: Any) -> _Operator:
    schema, namespace = getattr(func, "_schema", None), getattr(func, "namespace", "")
    if schema is None or "c10d" in namespace:
        return _Operator(False, True, None)
    own = namespace in ("aten", "prims")
    states = tuple(n for n, a in enumerate(schema.arguments) if a.name in ("running_mean", "running_var"))
    returns_views = not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)
    positional = torch.Tag.nondeterministic_seeded in func.tags or schema.name.startswith(_UNFILLED)
    positional |= not own or not any("Tensor" in str(argument.type) for argument in schema.arguments)
    return _Operator(func in ALIASES or (own and returns_views), positional, bool(schema.is_mutable), states)


def _is_plain(value: Any) -> bool:
    plain = type(value) in PLAIN_TYPES and value.layout is torch.strided
    return plain and not (value.is_nested or value.is_quantized or value.is_inference())


def _are_plain(out: Any) -> bool:
    return all(not isinstance(leaf, Tensor) or _is_plain(leaf) for leaf in tree_leaves(out))


def _holders(ref: StorageRef, tensor: Tensor) -> tuple[int, int]:
    """Return how many tensors, and how many references in Python, hold the storage of a tensor."""
    storage = tensor.untyped_storage()
    return ref.held_by(), sys.getrefcount(storage)


def _measured() -> tuple[int, int]:
    tensor = torch.empty(1)
    return _holders(StorageRef(tensor.untyped_storage()), tensor)


_ALONE = _measured()
"""`_holders` of a storage that one tensor alone holds: measured, as releases of PyTorch count differently."""


class _Storage(NamedTuple):
    """The present value of a storage in one run, and the byte that its views count from."""

    ref: StorageRef  # pins the storage's number for the run, so that no other storage gets it
    value: int
    begin: int = 0


class _Candidate:
    """A result in the first run: aliases of its tensors, until the run has ended."""

    def __init__(self, key: int, out: Any) -> None:
        self.key = key
        self.changed = False
        with quietly():  # an alias shares the version counter, so that it shows a change by a kernel that bumps it
            self.out = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, out)
        self.tensors = [leaf for leaf in tree_leaves(self.out) if isinstance(leaf, Tensor) and leaf.nbytes]
        self.refs = [StorageRef(tensor.untyped_storage()) for tensor in self.tensors]
        self.counters = [(tensor, tensor._version) for tensor in self.tensors]
        self.streams = _streams(self.tensors)

    def is_ours_alone(self) -> bool:
        """Whether the result is as it was computed, and nobody else can change it any more.

        A copy would begin after the work of the present stream, so that of another one may be missing by then.
        """
        return (
            not self.changed
            and all(tensor._version == version for tensor, version in self.counters)
            and all(tensor.nbytes <= tensor.untyped_storage().nbytes() for tensor in self.tensors)  # else it was freed
            and all(_holders(*pair) == _ALONE for pair in zip(self.refs, self.tensors, strict=True))
            and self.streams == _streams(self.tensors)
        )

    def release(self) -> None:
        """Let go of the tensors."""
        self.out = None
        self.tensors.clear()
        self.counters.clear()


def _streams(tensors: list[Tensor]) -> list[Any]:
    """The present streams of the tensors' devices."""
    found = {tensor.device for tensor in tensors if not tensor.is_cpu}
    return [torch.accelerator.current_stream(device) for device in found if device.type != "meta"]


class Results:
    """The results that the first run of a region has cached, and the numbers of values in all of its runs.

    Args:
        packer: makes the handles of the results; ``is_open``: whether it may, in this thread.
    """

    def __init__(self, packer: Packer, is_open: Callable[[], bool]) -> None:
        self._packer, self._is_open = packer, is_open
        self._cached: dict[int, Any] = {}
        self._fresh = count()
        self._numbers: dict[Any, int] = {}
        self._outside: dict[int, tuple[StorageRef, int]] = {}
        self._objects: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.changed: set[int] = set()
        """Values of which an operator of some run has changed the storage."""
        self.positional: list[int] = []
        """The positional operators of the first run, in order."""

    def fresh(self) -> int:
        """Return a number that no other value has."""
        return next(self._fresh)

    def number(self, key: Any) -> int:
        """Return the number of a value with this description."""
        return self._numbers.setdefault(key, next(self._fresh))

    def outside(self, tensor: Tensor, storage: torch.UntypedStorage) -> int:
        """Return the number of a value that no operator of the run has made.

        The storage, its tensor and the tensor's version identify it. ``.data`` makes a tensor whose version proves
        nothing: it is another one in each run.
        """
        known = self._outside.get(storage._cdata)
        if known is None:
            ref = StorageRef(storage)
            known = self._outside[ref.cdata] = ref, self.fresh()
        holder = self._objects.get(id(tensor))
        if holder is None or holder[0]() is not tensor:
            holder = self._objects[id(tensor)] = weakref.ref(tensor), self.fresh()
        return self.number((known[1], holder[1], tensor._version))

    def keep(self, candidates: list[_Candidate]) -> None:
        """Cache the results that nothing but the library holds, as the first run has ended."""
        with quietly():
            for candidate in candidates:
                if candidate.is_ours_alone():
                    self._cached[candidate.key] = tree_map(self._packed, candidate.out)
                candidate.release()

    def _packed(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return self._packer.pack(leaf) if self._is_open() else Kept(leaf)

    def take(self, key: int) -> Any:
        """Return the result of a call, once; None if the operator has to be called.

        Raises:
            StorageReadError: it could not be read back.
        """
        cached = self._cached.pop(key, None)  # at once, as another thread's backward may run the region as well
        if cached is None:
            return None
        with quietly():
            return tree_map(lambda leaf: leaf.unpack().detach() if hasattr(leaf, "unpack") else leaf, cached)

    def clear(self) -> None:
        """Release the results that no second run has taken."""
        self._cached.clear()


class _Unknown(Exception):
    """A tensor whose memory other operators may change unseen: a subclass, or one without strides."""


class _Numbering(Mode):  # type: ignore[no-untyped-call]
    """In one run of a region: gives each value its number.

    Args:
        results: of the region.
        inputs: the arguments of the run. The checkpoint saves and restores them, perhaps in other memory, and checks
            their versions. So their places identify them.
    """

    is_first = False

    def __init__(self, results: Results, inputs: Sequence[Any]) -> None:
        super().__init__()
        self.results = results
        self._storages: dict[int, _Storage] = {}
        self._times: dict[Any, int] = {}
        self._position, self._in_step, self._lost = 0, True, False
        for place, tensor in enumerate(inputs):
            if _is_plain(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._storages:
                    begin = tensor.storage_offset() * tensor.element_size()
                    self._begin(storage, self._root(results.number(("input", place))), begin)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._lost:
            return func(*args, **kwargs)
        operator = _operator(func)
        try:
            key = self._key(func, operator, args, kwargs)
        except (_Unknown, RuntimeError, TypeError):  # no storage, no version, no hash
            self.lose()
            return func(*args, **kwargs)
        out = self.call(key, func, args, kwargs)
        if operator.is_view:
            if func in ALIASES:
                self.aliased(out)
            return out
        if operator.writes is not False or operator.states:
            self._write(key, operator, func, args, kwargs)
        for place, leaf in enumerate(out if type(out) in (tuple, list) else (out,)):
            self._computed(key, place, leaf)
        return out

    def call(self, key: int, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call an operator whose value has this number."""
        raise NotImplementedError

    def aliased(self, out: Any) -> None:
        """Note an alias with a version counter of its own."""

    def lose(self) -> None:
        """Number nothing more, as some memory may change unseen from now on."""
        self._lost = True

    def storage_changed(self, number: int) -> None:
        """Note that an operator changes a storage."""

    # -- numbers of values --------------------------------------------------------------------------------------------

    def _begin(self, storage: torch.UntypedStorage, value: int, begin: int = 0) -> _Storage:
        ref = StorageRef(storage)
        found = self._storages[ref.cdata] = _Storage(ref, value, begin)
        return found

    def _root(self, value: int) -> int:
        """The number of a value from outside of the region: another one if a run has changed it since."""
        return self.results.fresh() if value in self.results.changed else value

    def _described(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN_TYPES:
            storage = value.untyped_storage()
            _, number, begin = self._storages.get(storage._cdata) or self._enter(value, storage)
            place = value.storage_offset() * value.element_size() - begin, value.shape, value.stride()
            # The version shows a change by a kernel of the program's that no mode sees.
            return number, place, value.dtype, value.is_conj(), value.is_neg(), value._version
        if kind in _BY_VALUE:
            return kind, value
        if kind is float:
            return value.hex()  # as 0.0 == -0.0, and nan != nan
        if isinstance(value, (list, tuple)):
            return tuple(map(self._described, value))
        if isinstance(value, Tensor):
            raise _Unknown
        return self.results.fresh()  # a generator, a function, a symbol

    def _enter(self, tensor: Tensor, storage: torch.UntypedStorage) -> _Storage:
        if not _is_plain(tensor):
            raise _Unknown
        return self._begin(storage, self._root(self.results.outside(tensor, storage)))

    def _key(self, func: Any, operator: _Operator, args: Any, kwargs: dict[str, Any]) -> int:
        if operator.is_view:  # a view needs no number: its storage has one
            self._described(args[0] if args else tuple(kwargs.values()))
            return -1
        described = func, self._described(args), bool(kwargs) and self._described(tuple(chain(*kwargs.items())))
        times = self._times[described] = self._times.get(described, 0) + 1
        key = self.results.number((described, times))
        if operator.is_positional and not may_stand_in(func, args, kwargs):
            return self._in_order(key)
        return key

    def _in_order(self, key: int) -> int:
        """Return the number for a positional operator: known as long as all before it were the first run's.

        The checkpoint restores the state of random numbers, so the same calls in the same order draw the same again.
        """
        known, position = self.results.positional, self._position
        self._position += 1
        if self.is_first:
            known.append(key)
        else:
            self._in_step = self._in_step and position < len(known) and known[position] == key
        return self.results.number((position, key)) if self._in_step else self.results.fresh()

    # -- what an operator does ----------------------------------------------------------------------------------------

    def _write(self, key: int, operator: _Operator, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        changed = [args, kwargs] if operator.writes is None else written(func, args, kwargs)
        changed += [args[place] for place in operator.states if place < len(args)]
        for place, tensor in enumerate(one for one in tree_leaves(changed) if isinstance(one, Tensor)):
            number = tensor.untyped_storage()._cdata
            before = self._storages[number]
            self.results.changed.add(before.value)
            self._storages[number] = before._replace(value=self.results.number(("written", key, place)))
            self.storage_changed(number)

    def _computed(self, key: int, place: Any, leaf: Any) -> None:
        if isinstance(leaf, (list, tuple)):
            for number, one in enumerate(leaf):
                self._computed(key, (place, number), one)
        elif _is_plain(leaf):
            storage = leaf.untyped_storage()
            if storage._cdata not in self._storages:  # else it is an argument's
                self._begin(storage, self.results.number(("from", key, place)))
        elif isinstance(leaf, Tensor):
            self.lose()


class Caching(_Numbering):  # type: ignore[no-untyped-call]
    """The first run of a region: holds the results of expensive operators until it has ended."""

    is_first = True

    def __init__(self, results: Results, inputs: Sequence[Any]) -> None:
        super().__init__(results, inputs)
        self._candidates: list[_Candidate] = []
        self._by_storage: dict[int, _Candidate] = {}
        self._needed = 0

    def call(self, key: int, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call an operator, and hold its result if it may stand in for a second call."""
        out = func(*args, **kwargs)
        if may_stand_in(func, args, kwargs) and _are_plain(out):
            candidate = _Candidate(key, out)
            self._candidates.append(candidate)
            self._by_storage |= {ref.cdata: candidate for ref in candidate.refs}
        return out

    def aliased(self, out: Any) -> None:
        """Note the counter of an alias of a result: a change of the alias would not show in the result's own."""
        for alias in tree_leaves(out):
            candidate = self._by_storage.get(alias.untyped_storage()._cdata)
            if candidate is not None:
                with quietly():
                    probe = version_probe(alias.detach())
                candidate.counters.append((probe, probe._version))

    def storage_changed(self, number: int) -> None:
        """Do without a result that an operator changes."""
        if number in self._by_storage:
            self._by_storage[number].changed = True

    def lose(self) -> None:
        """Do without all results."""
        super().lose()
        self._candidates.clear()

    def saved(self, tensor: Tensor) -> None:
        """Note that the region saves a tensor. The second run ends with the last one, and needs no later result."""
        self._needed = len(self._candidates)

    def keep(self) -> None:
        """Cache the results, as the run has ended."""
        self.results.keep(self._candidates[: self._needed])
        self._candidates.clear()
        self._by_storage.clear()


class Replaying(_Numbering):  # type: ignore[no-untyped-call]
    """A second run of a region: takes the cached results."""

    taken_bytes = 0

    def call(self, key: int, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the cached result of this number, or else what the operator returns."""
        out = self.results.take(key) if func in EXPENSIVE else None
        if out is None:
            return func(*args, **kwargs)
        self.taken_bytes += sum(leaf.nbytes for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        return out


class Passing(Mode):  # type: ignore[no-untyped-call]
    """The first run of a region whose second run is `Noting`'s: some operators save other tensors under a mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Noting(Mode):  # type: ignore[no-untyped-call]
    """In the second run of a region in a recorded step: times the calls that a run in part would do without.

    Args:
        stopwatch: of the recorded step.
        note: takes the moments before and after a call, the host's seconds in it, and what it returned.
    """

    def __init__(self, stopwatch: Stopwatch, note: Callable[[Stamp, Stamp, float, Any], None]) -> None:
        super().__init__()
        self._stopwatch, self._note = stopwatch, note
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.operators += 1
        if not may_stand_in(func, args, kwargs):
            return func(*args, **kwargs)
        clock = self._stopwatch
        before, began_s = clock.stamp(), clock.host_s()
        out = func(*args, **kwargs)
        host_s, after = clock.host_s() - began_s, clock.stamp()
        if _are_plain(out):
            self._note(before, after, host_s, out)
        return out
