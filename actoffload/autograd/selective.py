"""Selective activation checkpointing whose cached tensors are moved as saved tensors are.

PyTorch keeps the outputs of the operations that a policy saves in a dictionary of its own, where saved-tensor hooks do
not see them. The two contexts here keep each of them as the handle of the offloader whose context is open. Dispatch
modes run below autograd, where ``detach`` and views do not share the version counter unless told to: every look at a
tensor's version goes through `_quietly`.
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
from ..runtime.identity import same_counter, storages
from ..tiers.storage_ref import StorageRef
from .checkpoints import CACHING_MODES, must_be_plain
from .handles import Handle, Kept, Wrapped, sharing_counters
from .offloader import Offloader, open_offloaders

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_SAVING = frozenset(p for p in CheckpointPolicy if p.name.endswith(("_SAVE", "_CPU_OFFLOAD")))
"""What is kept. PyTorch without a compiler recomputes what is marked for offload to the CPU."""
_ALIASES = frozenset(
    {
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    }
)
"""Views that their schemas do not call views."""
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of operations whose results are not there yet when they return."""
_TELLS_OUTPUT = "op_output" in inspect.signature(SelectiveCheckpointContext.__init__).parameters

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
    """PyTorch's function of this name, but what the policy saves is moved by the offloader whose context is open.

    Gradients and errors are those of PyTorch's own contexts. Without an open context of an `Offloader`, inside of
    ``torch.compile``, during backward and with ``allow_cache_entry_mutation`` PyTorch's own are returned. Views are not
    cached but taken again. ``CheckpointPolicy.MUST_CPU_OFFLOAD`` and ``PREFER_CPU_OFFLOAD`` save as well.

    Args:
        policy_fn_or_list: a function of a ``SelectiveCheckpointContext``, the operation and its arguments that returns
            a ``CheckpointPolicy``, or the list of the operations (``OpOverload``) whose outputs are saved.
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
    offloader = None if allow_cache_entry_mutation or must_be_plain() else _open_offloader()
    if offloader is None:
        return contexts
    region = _Region(offloader)
    return _Caching(policy_fn_or_list, region), _Replaying(region)


def _open_offloader() -> Offloader | None:
    """Return the offloader whose context is open in this thread, the innermost; None where that cannot be told."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return None
    candidates = [offloader for offloader in open_offloaders() if offloader.innermost_hook is not None]
    innermost = [offloader for offloader in candidates if offloader.innermost_hook is hooks[0]]
    if innermost:
        return innermost[0]
    return candidates[0] if len(candidates) == 1 else None  # inside another checkpoint


@contextmanager
def _quietly() -> Iterator[None]:
    """No mode sees what we do, and an alias shares the version counter of what it is an alias of."""
    with _disable_current_modes(), sharing_counters():
        yield


class _Cached:
    """One cached tensor: the handle that stands for it."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def counter(self) -> Tensor:
        """A tensor that shares the version counter of what was cached."""
        if isinstance(self.handle, Handle):
            return self.handle.probe
        counter: Tensor = self.handle.counter.probe if isinstance(self.handle, Wrapped) else self.handle.alias
        return counter

    def value(self) -> Tensor:
        """The cached tensor, bit for bit, as an operation below autograd returns it: nothing known of any graph.

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
    """What one run of a checkpointed region has cached, by operation and number of its call."""

    def __init__(self, offloader: Offloader) -> None:
        self.entries: dict[Any, dict[int, Any]] = defaultdict(dict)
        self._offloader = offloader
        self._under_way: list[_Cached] = []
        self._stored: dict[int, list[tuple[StorageRef, _Cached]]] = defaultdict(list)

    def cache(self, func: Any, inputs: Any, out: Any) -> Any:
        """The output of an operation, its tensors as `_Cached`."""
        shared = _storages(inputs)
        collective = getattr(func, "namespace", "") in _COLLECTIVES

        def cached(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if shared & _storages(leaf):  # changed in place, or an alias that no schema tells of: c10d's own operations
                return self._stay(leaf)
            if collective:
                entry = self._stay(leaf)
                self._under_way.append(entry)
                return entry
            return self._move(leaf)

        return tree_map(cached, out)

    def before_write(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """An operation is about to change tensors in place.

        Where that shows in the version counter of a cached tensor, it is an error later. An alias that counts its own
        changes (a matrix product of three dimensions ends in ``_unsafe_view``) hides it: such a cached tensor gets
        memory of its own, with the bytes that it has now.
        """
        for written in tree_leaves(_written(func, args, kwargs)):
            if not isinstance(written, Tensor):
                continue
            for cdata in _storages(written):
                for ref, entry in self._stored.get(cdata, ()):
                    if not ref.gone() and not same_counter(entry.counter(), written):
                        self._separate(entry)

    def _separate(self, entry: _Cached) -> None:
        with _quietly(), suppress(SavedTensorModifiedError):  # changed before: an error if it is asked for
            entry.handle = self._packed(entry.value().clone())

    def ended(self) -> None:
        """The forward of the region has ended: what collectives have brought meanwhile may move now."""
        with _quietly():
            for entry in self._under_way:
                alias = entry.handle.alias
                if alias._version == entry.handle.version:
                    torch.ops._c10d_functional.wait_tensor(alias)
                    entry.handle = self._packed(alias)
        self.forget()

    def forget(self) -> None:
        """Forget what only the forward needs."""
        self._under_way.clear()
        self._stored.clear()

    def _stay(self, tensor: Tensor) -> _Cached:
        with _quietly():
            return _Cached(Kept(tensor.detach()))

    def _move(self, tensor: Tensor) -> _Cached:
        with _quietly():
            entry = _Cached(self._packed(tensor))
            for storage in storages(tensor):
                ref = StorageRef(storage)
                self._stored[ref.cdata].append((ref, entry))
            return entry

    def _packed(self, tensor: Tensor) -> Any:
        if self._offloader.innermost_hook is None:
            return Kept(tensor.detach())  # in another thread, or its context has ended
        return self._offloader.packer.pack(tensor)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What both contexts share: the calls of each operation are counted."""

    supports_higher_order_operators = True

    def __init__(self, region: _Region) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._region = region
        self._calls: dict[Any, int] = defaultdict(int)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As PyTorch's own: a compiled function that is called inside is one operation."""
        return True

    def _next(self, func: Any, args: Any) -> tuple[Any, int]:
        key = _key(func, args)
        self._calls[key] += 1
        return key, self._calls[key] - 1


class _Caching(_Mode):
    """The context of the forward: keeps what the policy saves."""

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
        if _is_mutable(func):
            region.before_write(func, args, kwargs)
        out = func(*args, **kwargs)
        key, number = self._next(func, args)
        saves = self._saves(func, args, kwargs, out) and not _is_view(func)
        region.entries[key][number] = region.cache(func, (args, kwargs), out) if saves else _RECOMPUTE
        return out

    def _saves(self, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        if isinstance(self._policy, list):
            policy = CheckpointPolicy.MUST_SAVE if func in self._policy else CheckpointPolicy.PREFER_RECOMPUTE
        else:
            told = {"op_output": out} if _TELLS_OUTPUT else {}
            policy = self._policy(SelectiveCheckpointContext(is_recompute=False, **told), func, *args, **kwargs)
        if isinstance(policy, bool):
            return policy
        return policy in _SAVING or (policy is not CheckpointPolicy.MUST_RECOMPUTE and _must_not_run_again(func))


CACHING_MODES.append(_Caching)


class _Replaying(_Mode):
    """The context of the recomputation: hands out what was kept, each output once."""

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
        outputs[number] = _CONSUMED
        return out


def _key(func: Any, args: Any) -> Any:
    """What tells the calls of an operation apart; PyTorch has its own rule for compiled regions."""
    rule = getattr(plain, "_sac_storage_key", None)
    return func if rule is None else rule(func, args)


def _must_not_run_again(func: Any) -> bool:
    """Whether PyTorch says that an operation has an effect outside that must happen once (from 2.15)."""
    rule = getattr(plain, "_is_cacheable_effect", None)
    return rule is not None and bool(rule(func))


@cache
def _is_view(func: Any) -> bool:
    """Whether an operation costs nothing: its outputs are views. Taken again, they are views of what they were of."""
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
    """The arguments that an operation changes in place."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return written


def _storages(tree: Any) -> set[int]:
    """The storages of all tensors in a tree, by address."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {storage._cdata for tensor in tensors for storage in storages(tensor)}
