"""Runs blocks under a checkpoint, their code untouched, and counts what their recomputation holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ..runtime.identity import StorageSet, is_parameter, storages
from ..tiers.shared import Shared
from ..tiers.tier import Tier
from .blocks import differ, state_of

_CHANGED = "after the block had run: do that after backward, or let no block be recomputed"


class RecomputeMeter:
    """Counts what recomputed blocks hold, which the hooks around a checkpoint do not see, and makes room for it.

    Args:
        shared: holds the counts.
        tiers: asked for room.
        notes: storages that are no activations.
    """

    def __init__(self, shared: Shared, tiers: Iterable[Tier], notes: StorageSet) -> None:
        self._shared = shared
        self._tiers = tuple(tiers)
        self._notes = notes

    def recomputing(self) -> None:
        """A block is about to be recomputed: what it will hold needs room, as far as writes under way give any."""
        with self._shared.lock:
            self._shared.accounts.recomputed(0)  # backward is done with the one before
            for tier in self._tiers:
                self._shared.accounts.unpack_wait_s += tier.make_room(self._shared.budget.recompute_bytes)

    def recomputed(self, nbytes: int) -> None:
        """It holds so many bytes until backward asks for what another one needs."""
        with self._shared.lock:
            self._shared.accounts.recomputed(nbytes)
            self._shared.budget.recompute_bytes = max(self._shared.budget.recompute_bytes, nbytes)

    def is_static(self, tensor: Tensor) -> bool:
        """Whether a tensor is no activation: a parameter, or in a storage that is noted."""
        return is_parameter(tensor) or any(self._notes.get(storage) is not None for storage in storages(tensor))


class Recompute:
    """Runs named blocks under a non-reentrant checkpoint, and takes that back.

    Args:
        meter: counts what they hold; None: nobody does.
    """

    def __init__(self, meter: RecomputeMeter | None = None) -> None:
        self._meter = meter
        self._applied: dict[str, tuple[weakref.ref[nn.Module], Checkpointed]] = {}

    @property
    def names(self) -> frozenset[str]:
        """The blocks that are recomputed now."""
        return frozenset(self._applied)

    def follow(
        self,
        blocks: Mapping[str, nn.Module],
        names: Iterable[str],
        saved: Mapping[str, tuple[int, ...] | None] | None = None,
    ) -> None:
        """Recompute exactly these blocks from the next forward on; a name that is no block is left out.

        ``saved`` has the numbers of the arguments that a block's checkpoint saves, see `Checkpointed`.
        """
        wanted = {name for name in names if name in blocks}
        for name in self.names - wanted:
            self._undo(name)
        for name in wanted - self.names:
            self._apply(name, blocks[name])
        for name in wanted:
            self._applied[name][1].saved = (saved or {}).get(name)

    def undo(self) -> None:
        """Leave every block as it was."""
        for name in self.names:
            self._undo(name)

    def _apply(self, name: str, block: nn.Module) -> None:
        wrapped = block.forward = Checkpointed(block, self._meter)
        self._applied[name] = weakref.ref(block), wrapped

    def _undo(self, name: str) -> None:
        reference, wrapped = self._applied.pop(name)
        block = reference()
        if block is None:
            return
        if vars(block).get("forward") is not wrapped:
            wrapped.active = False  # somebody has wrapped ours meanwhile: let it through
        elif wrapped.was_attribute:
            block.forward = wrapped.forward
        else:
            del block.forward


class Checkpointed:
    """A module's forward under ``torch.utils.checkpoint``, with its tensor arguments visible to saved-tensor hooks.

    Args:
        module: its parameters and buffers are to be as they were when it runs again.
        meter: told of every recomputation.

    Attributes:
        forward: the module's forward as it was; ``was_attribute``: that was an attribute of the instance.
        saved: which arguments hooks see, by their place in `tree_flatten`; the others are held as they are. None: all.
    """

    def __init__(self, module: nn.Module, meter: RecomputeMeter | None = None) -> None:
        self.forward = module.forward
        self.was_attribute = "forward" in vars(module)
        self.active = True
        self.saved: tuple[int, ...] | None = None
        self._meter = meter
        self._module = module

    def __reduce__(self) -> Any:  # a copy of the module, or a pickled one, is as it was before us
        return _itself, (self.forward,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        leaves, shape = tree_flatten((args, kwargs))
        firsts: dict[int, int] = {}  # a block may ask whether two of its arguments are one tensor
        first = [firsts.setdefault(id(leaf), place) for place, leaf in enumerate(leaves)]
        wanted = range(len(leaves)) if self.saved is None else self.saved
        saved = sorted({first[place] for place in wanted if place < len(leaves)})
        held = {place: leaf for place, leaf in enumerate(leaves) if first[place] not in saved}
        reads = {"an argument": _versions(held.values()), "a parameter or buffer": _versions(self._own())}
        state = state_of([self._module])
        own = [(args, kwargs)]  # for the first run: what it adds to a list that it is given, the caller is to see

        def run(_: object, *given: Any) -> Any:
            if own:
                positional, named = own.pop()
                return self.forward(*positional, **named)
            inputs = held | dict(zip(saved, given, strict=True))
            for what, versions in reads.items():
                if any(tensor._version != version for tensor, version in versions):
                    raise RuntimeError(f"{what} of a recomputed block was changed in place {_CHANGED}")
            if differ(state_of([self._module]), state):
                raise RuntimeError(f"an attribute of a recomputed block was set {_CHANGED}")
            again, keywords = tree_unflatten([inputs[place] for place in first], shape)
            if self._meter is None or torch._C._current_graph_task_id() == -1:
                return self.forward(*again, **keywords)
            with _Counted(self._meter, inputs.values()):
                return self.forward(*again, **keywords)

        # Hooks around a checkpoint see the tensors that it is given by position, and no others. It keeps the random
        # states of the devices of all that it is given. What the second run saves last may be filled after that.
        others = [*held.values(), *self._own()]
        return checkpoint(run, others, *(leaves[place] for place in saved), use_reentrant=False, early_stop=False)

    def _own(self) -> Iterable[Tensor]:
        # FSDP 1 gathers what it has flattened anew, in place, before the second run. An optimizer that steps in
        # backward may have done so before that, where nothing needs what is computed with the parameter any more.
        skipped = ("_fsdp_flattened", "_post_accumulate_grad_hooks")
        parameters = (p for p in self._module.parameters() if not any(getattr(p, name, None) for name in skipped))
        return (*parameters, *self._module.buffers())


def _versions(values: Iterable[Any]) -> list[tuple[Tensor, int]]:
    """The tensors among these, and how often each was changed in place, as far as it counts that."""
    return [(value, value._version) for value in values if isinstance(value, Tensor) and not value.is_inference()]


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


class _Counted:
    """Counts the storages that autograd saves inside it, and leaves them to the hooks that are there."""

    def __init__(self, meter: RecomputeMeter, leaves: Iterable[Any]) -> None:
        self._meter = meter
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        self._inputs = {storage._cdata for tensor in tensors for storage in storages(tensor)}
        self._saved: dict[int, int] = {}

    def __enter__(self) -> None:
        self._meter.recomputing()
        # A checkpoint's own hooks are there, as it is what recomputes; only the innermost hooks are called.
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def counted(tensor: Tensor) -> Any:
            if not self._meter.is_static(tensor):
                self._saved.update((storage._cdata, storage.nbytes()) for storage in storages(tensor))
            return pack(tensor)

        # As on a checkpoint's own hooks: whoever looks for the user's (PyTorch, from 2.14 on) has to look behind them.
        # Only while they are active, as a graph keeps them.
        self._counted: Any = counted
        counted._checkpoint_internal = True  # type: ignore[attr-defined]
        counted._user_hooks = getattr(pack, "_user_hooks", None)  # type: ignore[attr-defined]
        self._hooks = torch.autograd.graph.saved_tensors_hooks(counted, unpack)
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:  # also when the checkpoint ends the recomputation early
        self._hooks.__exit__(*error)
        del self._counted._user_hooks
        self._meter.recomputed(sum(nbytes for key, nbytes in self._saved.items() if key not in self._inputs))
