"""Regions that run again in part: the results of expensive operators are cached and move, and the rest runs again.

A cached result only stands in for a call of its operator. Wherever it cannot be trusted (it was changed, freed, or used
before), the second run calls the operator, as it would without the cache. So such a region computes what one that runs
again does, as long as a change of a result shows: the version counter of autograd has to see it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import SavedTensorModifiedError
from ..runtime.identity import PLAIN_TYPES
from ..tiers.storage_ref import StorageRef
from ..tiers.timers import Stamp, Stopwatch
from .caching import ALIASES, Cached, Mode, is_mutable, numbers, quietly, written
from .handles import Kept, version_probe
from .packing import Packer

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution")
_ATTENTIONS = ("flash", "efficient", "cudnn", "flash_attention_for_cpu", "fused_attention_overrideable")
_NAMES = [*_PRODUCTS, *(f"_scaled_dot_product_{name}{'_attention' * ('_' not in name)}" for name in _ATTENTIONS)]
EXPENSIVE = frozenset(getattr(torch.ops.aten, name).default for name in _NAMES if hasattr(torch.ops.aten, name))
"""Matrix products, convolutions and attentions."""


@cache
def _place_of_dropout(func: Any) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


def stands_in(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> bool:
    """Return whether what an operator returned may stand in for a second call of it."""
    if func not in EXPENSIVE:
        return False
    place = _place_of_dropout(func)
    # A call that draws random numbers has to draw them again: the operators after it draw the next ones.
    if place is not None and (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)):
        return False
    return all(not isinstance(one, Tensor) or _is_plain(one) for one in tree_leaves(out))


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_inference()


class _Result:
    """The result of one call of an operator: at first its tensors, then the handles in their place."""

    __slots__ = ("aliases", "changed", "is_cached", "out", "streams", "versions")

    def __init__(self, out: Any) -> None:
        self.out = out
        self.changed = self.is_cached = False
        self.versions, self.streams = _versions(out), _streams(out)
        self.aliases: list[tuple[Tensor, int]] = []
        """Of each alias with a version counter of its own: a tensor that shares it, and the version."""


def _versions(out: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]


def _streams(out: Any) -> list[Any]:
    """The present streams of the results' devices."""
    found = {leaf.device for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and not leaf.is_cpu}
    return [torch.accelerator.current_stream(device) for device in found if device.type != "meta"]


class Results:
    """The results that the first run of a region has cached, by operator and number of its call.

    Args:
        packer: makes the handles of the results; ``is_open``: whether it may, in this thread.
    """

    def __init__(self, packer: Packer, is_open: Callable[[], bool]) -> None:
        self._packer, self._is_open = packer, is_open
        self._results: dict[tuple[Any, int], _Result] = {}
        self._waiting: list[tuple[tuple[Any, int], _Result]] = []
        self._stored: dict[int, list[tuple[StorageRef, tuple[Any, int]]]] = defaultdict(list)
        self._on_cpu: list[tuple[StorageRef, _Result]] = []
        self.taken_bytes = 0
        """Of the results that second runs have taken."""

    # -- the first run ------------------------------------------------------------------------------------------------

    def add(self, key: tuple[Any, int], out: Any) -> None:
        """Take the result of a call."""
        result = self._results[key] = _Result(out)
        self._waiting.append((key, result))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                ref = StorageRef(tensor.untyped_storage())
                self._stored[ref.cdata].append((ref, key))
                if tensor.is_cpu and tensor.nbytes:
                    self._on_cpu.append((ref, result))

    def saved(self, tensor: Tensor) -> None:
        """Cache the results so far, as the region saves a tensor. The second run ends with the last one saved.

        So a result that no save follows is not needed, and moving it would be in vain.
        """
        self._look_for_freed()
        waiting, self._waiting = self._waiting, []
        for key, result in waiting:
            # The versions show what an operator that no mode sees has changed. A copy would begin after the work of the
            # present stream, so that of another one may not have computed the result by then.
            fits = (result.versions, result.streams) == (_versions(result.out), _streams(result.out))
            if result.changed or not fits:
                del self._results[key]
            else:
                result.is_cached = True
                result.out = tree_map(lambda leaf: self._cached(leaf) if isinstance(leaf, Tensor) else leaf, result.out)

    def _cached(self, tensor: Tensor) -> Cached:
        with quietly():
            return Cached(self._packer.pack(tensor) if self._is_open() else Kept(tensor.detach()))

    def written(self, tensors: list[Any]) -> None:
        """Note that an operator is about to change results: the second run has to compute them anew.

        Their cached bytes live on: a forward whose saved tensors have all died would count as over.
        """
        for key in self._found(tensors):
            self._results[key].changed = True

    def aliased(self, inputs: Any, outputs: Any) -> None:
        """Note an alias that has a version counter of its own: a change of it would not show in the result's."""
        for key in self._found(inputs):
            with quietly():
                probes = [version_probe(one.detach()) for one in tree_leaves(outputs) if isinstance(one, Tensor)]
            self._results[key].aliases += [(probe, probe._version) for probe in probes]

    def _look_for_freed(self) -> None:
        """Note the results whose storage the program has freed: it will resize the second run's as well.

        PyTorch cannot resize the memory into which a CPU tensor is read back.
        """
        for ref, result in self._on_cpu:
            storage = ref.lock()
            result.changed |= storage is not None and not storage.nbytes()

    def _found(self, tree: Any) -> set[tuple[Any, int]]:
        """The calls whose results share memory with a tensor of a tree."""
        stored = [entry for cdata in numbers(tree) for entry in self._stored.get(cdata, ())] if self._stored else []
        return {key for ref, key in stored if not ref.gone() and key in self._results}

    def ended(self) -> None:
        """Forget what only the first run needs, and the results that no save has followed."""
        self._look_for_freed()
        for key, _ in self._waiting:
            del self._results[key]
        self._waiting.clear()
        self._on_cpu.clear()
        self._stored.clear()

    # -- a second run -------------------------------------------------------------------------------------------------

    def take(self, key: tuple[Any, int]) -> Any:
        """Return the result of a call, once; None if the operator has to be called.

        Raises:
            StorageReadError: it could not be read back.
        """
        result = self._results.get(key)
        if result is None or not result.is_cached:  # not yet, in a backward inside of the first run
            return None
        del self._results[key]
        if result.changed or any(probe._version != version for probe, version in result.aliases):
            return None
        try:
            out = tree_map(lambda leaf: leaf.value() if isinstance(leaf, Cached) else leaf, result.out)
        except SavedTensorModifiedError:
            return None
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if any(tensor.untyped_storage().nbytes() < tensor.nbytes for tensor in tensors):
            return None  # the program has freed it: such a storage has no bytes to read
        self.taken_bytes += sum(tensor.nbytes for tensor in tensors)
        return out


class Caching(Mode):  # type: ignore[no-untyped-call]
    """In the first run of a region: passes the results of expensive operators on to be cached."""

    def __init__(self, results: Results) -> None:
        super().__init__()
        self._results = results

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._results.ended()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_mutable(func):  # before it runs: a result that waits would be cached with other bytes
            self._results.written(written(func, args, kwargs))
        out = func(*args, **kwargs)
        if func in EXPENSIVE:
            key = self._next(func, args)
            if stands_in(func, args, kwargs, out):
                self._results.add(key, out)
        elif func in ALIASES:
            self._results.aliased(args, out)
        return out


class Replaying(Mode):  # type: ignore[no-untyped-call]
    """In a second run of a region: returns the cached results."""

    def __init__(self, results: Results) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in EXPENSIVE:
            out = self._results.take(self._next(func, args))
            if out is not None:
                return out
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
        if func not in EXPENSIVE:
            return func(*args, **kwargs)
        clock = self._stopwatch
        before, began_s = clock.stamp(), clock.host_s()
        out = func(*args, **kwargs)
        host_s, after = clock.host_s() - began_s, clock.stamp()
        if stands_in(func, args, kwargs, out):
            self._note(before, after, host_s, out)
        return out
