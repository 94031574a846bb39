"""Selective activation checkpointing whose cached tensors move as saved tensors do.

PyTorch keeps the outputs of the operations that a policy saves in a dictionary of its own, where saved-tensor hooks do
not see them. The two contexts here keep a handle of the open offloader for each output instead. Dispatch modes run
below autograd, where ``detach`` and views do not share the version counter by default. So every use of a tensor's
version goes through `_quietly`.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as plain
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from ..errors import SavedTensorModifiedError
from ..runtime.identity import same_counter
from ..tiers.storage_ref import StorageRef
from .checkpoints import CACHING_MODES, Checkpoints, everywhere, innermost, must_be_plain
from .handles import Handle, Kept, Wrapped, sharing_counters
from .hook_stack import top
from .tensors import storage_numbers, storages

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_SAVING = frozenset(p for p in CheckpointPolicy if p.name.endswith(("_SAVE", "_CPU_OFFLOAD")))
"""The answers of a policy that save an output. Uncompiled PyTorch would recompute outputs marked ``CPU_OFFLOAD``."""
_ALIASES = frozenset(
    {
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    }
)
"""Views that no schema declares as views."""
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of operations that return before their results are complete."""
_TAKES_OUTPUT = "op_output" in inspect.signature(SelectiveCheckpointContext.__init__).parameters

_RECOMPUTE = object()
_MISSING = object()
_CONSUMED = object()
_DIFFERS = (
    "The operations in the checkpointed region are nondeterministic, or depend on a global state that changed between "
    "forward and backward."
)


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Callable[..., CheckpointPolicy | bool] | list[Any], allow_cache_entry_mutation: bool = False
) -> Contexts:
    """PyTorch's function of this name, except that the open offloader moves the tensors that the policy saves.

    Gradients and errors are those of PyTorch's own contexts. It returns PyTorch's own contexts without an open context
    of an `Offloader`, inside ``torch.compile``, during backward and with ``allow_cache_entry_mutation``. Views are
    taken again instead of cached. ``CheckpointPolicy.MUST_CPU_OFFLOAD`` and ``PREFER_CPU_OFFLOAD`` save as well.

    Args:
        policy_fn_or_list: a function of a ``SelectiveCheckpointContext``, the operation and its arguments that returns
            a ``CheckpointPolicy``, or the list of the operations (``OpOverload``) that have their outputs saved.
        allow_cache_entry_mutation: do not raise when a cached tensor was changed in place.

    Returns:
        The contexts for the forward and for the recomputation.

    Raises:
        TypeError: ``policy_fn_or_list`` is neither a function nor a list.
        ValueError: an entry of the list is no ``OpOverload``.

    >>> import functools, torch
    >>> from torch.utils.checkpoint import checkpoint
    >>> saved = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    >>> x = torch.ones(2, 2, requires_grad=True)
    >>> checkpoint(lambda x: (x @ x).sin(), x, use_reentrant=False, context_fn=saved).shape
    torch.Size([2, 2])
    """
    contexts: Contexts = plain.create_selective_checkpoint_contexts(  # type: ignore[no-untyped-call]
        policy_fn_or_list, allow_cache_entry_mutation
    )
    return _in_place_of(contexts)


def _in_place_of(contexts: Contexts) -> Contexts:
    """Return our contexts in place of PyTorch's own, whose tensors no hook sees; PyTorch's where ours do not work."""
    caching, replaying = contexts
    # A second context of another kind may use the tensors that the first one stores, which ours would not do.
    own = type(replaying) is getattr(plain, "_CachedTorchDispatchMode", None)
    if not own or not hasattr(caching, "policy_fn") or getattr(replaying, "allow_cache_entry_mutation", True):
        return contexts
    receiver = None if must_be_plain() else _receiver()
    if receiver is None:
        return contexts
    region = _Region(receiver)
    return _Caching(caching.policy_fn, region), _Replaying(region)


def _receiver() -> Checkpoints | None:
    """Return those of this thread's innermost open context, or None if there is none or that is ambiguous."""
    if top() is None:
        return None
    candidates = [one for one in everywhere() if one.forwards.innermost_hook is not None]
    # Another checkpoint's hooks may be on top of the offloader's.
    return innermost(candidates) or (candidates[0] if len(candidates) == 1 else None)


@contextmanager
def _quietly() -> Iterator[None]:
    """A context in which no mode sees our operations, and an alias shares the version counter of its tensor."""
    with _disable_current_modes(), sharing_counters():
        yield


class _Cached:
    """One cached tensor: the handle that stands for it."""

    __slots__ = ("handle",)

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def counter(self) -> Tensor:
        """Return a tensor that shares the version counter of the cached tensor."""
        if isinstance(self.handle, Handle):
            return self.handle.probe
        counter: Tensor = self.handle.counter.probe if isinstance(self.handle, Wrapped) else self.handle.alias
        return counter

    def value(self) -> Tensor:
        """Return the cached tensor, bit for bit, and without a graph, as an operation below autograd returns it.

        Raises:
            SavedTensorModifiedError: it was changed in place.
            StorageReadError: it could not be read back.
        """
        with _quietly():
            try:
                tensor: Tensor = self.handle.unpack()
            except SavedTensorModifiedError as error:
                raise SavedTensorModifiedError(
                    f"Tensor cached during selective activation checkpoint has been mutated: {error}"
                ) from error
            return tensor.detach()


class _Region:
    """The outputs that one run of a checkpointed region has cached, by operation and number of its call."""

    def __init__(self, receiver: Checkpoints) -> None:
        self.entries: dict[Any, dict[int, Any]] = defaultdict(dict)
        self._receiver = receiver
        self._under_way: list[_Cached] = []
        self._stored: dict[int, list[tuple[StorageRef, _Cached]]] = defaultdict(list)

    def cache(self, func: Any, inputs: Any, out: Any) -> Any:
        """Return the output of an operation, with a `_Cached` in place of each tensor."""
        shared = storage_numbers(inputs)
        collective = getattr(func, "namespace", "") in _COLLECTIVES

        def cached(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if shared & storage_numbers(leaf):  # changed in place, or an undeclared alias (c10d's own operations)
                return _Cached(Kept(leaf.detach()))
            if collective:  # its bytes are incomplete until the wait, so a move has to come later
                self._under_way.append(_Cached(Kept(leaf.detach())))
                return self._under_way[-1]
            entry = _Cached(self._packed(leaf))
            for storage in storages(leaf):
                ref = StorageRef(storage)
                self._stored[ref.cdata].append((ref, entry))
            return entry

        with _quietly():
            return tree_map(cached, out)

    def before_write(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Prepare for an operation that changes tensors in place.

        If the change shows in the version counter of a cached tensor, reading that tensor later is an error. It does
        not show if the written alias has a version counter of its own (a matrix product of three dimensions ends in
        ``_unsafe_view``). Then the cached tensor gets memory of its own, with its present bytes.
        """
        for written in tree_leaves(_written(func, args, kwargs)):
            if not isinstance(written, Tensor):
                continue
            for cdata in storage_numbers(written):
                for ref, entry in self._stored.get(cdata, ()):
                    if not ref.gone() and not same_counter(entry.counter(), written):
                        self._separate(entry)

    def _separate(self, entry: _Cached) -> None:
        with _quietly(), suppress(SavedTensorModifiedError):  # changed earlier: `value` raises that again if called
            entry.handle = self._packed(entry.value().clone())

    def ended(self) -> None:
        """Wait for the results of collectives as the region's forward ends, and let them move."""
        with _quietly():
            for entry in self._under_way:
                alias = entry.handle.alias
                # A changed result keeps its first handle, which holds the old version and raises when it is read.
                if alias._version == entry.handle.version:
                    torch.ops._c10d_functional.wait_tensor(alias)
                    entry.handle = self._packed(alias)
        self.forget()

    def forget(self) -> None:
        """Forget the state that only the forward needs."""
        self._under_way.clear()
        self._stored.clear()

    def _packed(self, tensor: Tensor) -> Any:
        if self._receiver.forwards.innermost_hook is None:
            return Kept(tensor.detach())  # this is another thread, or the offloader's context has ended
        return self._receiver.packer.pack(tensor)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The base of both contexts: it counts the calls of each operation."""

    supports_higher_order_operators = True

    def __init__(self, region: _Region) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._region = region
        self._calls: dict[Any, int] = defaultdict(int)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Treat a call of a compiled function as one operation, as PyTorch's own contexts do."""
        return True

    def _next(self, func: Any, args: Any) -> tuple[Any, int]:
        key = _key(func, args)
        self._calls[key] += 1
        return key, self._calls[key] - 1


class _Caching(_Mode):
    """The context of the forward: it caches the outputs that the policy saves."""

    def __init__(self, policy: Any, region: _Region) -> None:
        super().__init__(region)
        self._policy = policy

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None:
            self._region.ended()
        else:
            self._region.forget()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in plain.SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        region = self._region
        if _is_mutable(func):  # before the operation runs: afterwards the old bytes are gone
            region.before_write(func, args, kwargs)
        out = func(*args, **kwargs)
        key, number = self._next(func, args)
        saves = self._saves(func, args, kwargs, out) and not _is_view(func)
        region.entries[key][number] = region.cache(func, (args, kwargs), out) if saves else _RECOMPUTE
        return out

    def _saves(self, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        output = {"op_output": out} if _TAKES_OUTPUT else {}
        policy = self._policy(SelectiveCheckpointContext(is_recompute=False, **output), func, *args, **kwargs)
        if isinstance(policy, bool):
            return policy
        return policy in _SAVING or (policy is not CheckpointPolicy.MUST_RECOMPUTE and _must_not_run_again(func))


CACHING_MODES[_Caching] = lambda contexts: contexts
if hasattr(plain, "_CachingTorchDispatchMode"):
    CACHING_MODES[plain._CachingTorchDispatchMode] = _in_place_of


class _Replaying(_Mode):
    """The context of the recomputation: it returns each cached output once."""

    def __enter__(self) -> Any:
        self._calls.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in plain.SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        key, number = self._next(func, args)
        outputs = self._region.entries.get(key, {})
        entry = outputs.get(number, _MISSING)
        if entry is _MISSING:
            raise RuntimeError(f"Call {number} of {func} in backward is not among those of the forward. {_DIFFERS}")
        if entry is _RECOMPUTE:
            return func(*args, **kwargs)
        if entry is _CONSUMED:
            raise RuntimeError(
                "Trying to backward an extra time. You are only allowed to backward once on any region computed under "
                "selective activation checkpoint."
            )
        out = tree_map(lambda leaf: leaf.value() if isinstance(leaf, _Cached) else leaf, entry)
        outputs[number] = _CONSUMED  # the handles die here, so each tensor is held only until backward has used it
        return out


def _key(func: Any, args: Any) -> Any:
    """Return the key under which calls of an operation count; PyTorch has a rule of its own for compiled regions."""
    rule = getattr(plain, "_sac_storage_key", None)
    return func if rule is None else rule(func, args)


def _must_not_run_again(func: Any) -> bool:
    """Return whether PyTorch (from 2.15 on) knows an operation to have an effect that must happen only once."""
    rule = getattr(plain, "_is_cacheable_effect", None)
    return rule is not None and bool(rule(func))


@cache
def _is_view(func: Any) -> bool:
    """Return whether the outputs of an operation are views: taking them again is free and keeps their base."""
    if func in _ALIASES:
        return True
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return any(result.alias_info is not None for result in schema.returns)


@cache
def _is_mutable(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation changes in place."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return written
