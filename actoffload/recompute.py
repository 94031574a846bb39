"""Runs blocks under a checkpoint, their code untouched, and counts what their recomputation holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from .identity import storages


class Meter(Protocol):
    """Who counts what a recomputation holds, which hooks around a checkpoint do not see. Called in backward."""

    def recomputing(self) -> None:
        """A block is about to be recomputed."""

    def recomputed(self, nbytes: int) -> None:
        """A block has been recomputed: so many bytes that are neither its inputs nor static wait for its backward."""

    def is_static(self, tensor: Tensor) -> bool:
        """Whether a tensor is no activation: a parameter, a buffer, an input of the step."""


class Recompute:
    """Runs named blocks under a non-reentrant checkpoint, and takes that back.

    Args:
        meter: counts what they hold; None: nobody does.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        self._meter = meter
        self._applied: dict[str, tuple[weakref.ref[nn.Module], Checkpointed]] = {}

    @property
    def names(self) -> frozenset[str]:
        """The blocks that are recomputed now."""
        return frozenset(self._applied)

    def follow(self, blocks: Mapping[str, nn.Module], names: Iterable[str]) -> None:
        """Recompute exactly these blocks from the next forward on; a name that is no block is left out."""
        wanted = {name for name in names if name in blocks}
        for name in self.names - wanted:
            self._undo(name)
        for name in wanted - self.names:
            self._apply(name, blocks[name])

    def undo(self) -> None:
        """Leave every block as it was."""
        for name in self.names:
            self._undo(name)

    def _apply(self, name: str, block: nn.Module) -> None:
        wrapped = Checkpointed(block.forward, "forward" in vars(block), self._meter)
        block.forward = wrapped
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
    """A module's forward under ``torch.utils.checkpoint``, with every tensor argument visible to saved-tensor hooks.

    Args:
        forward: the module's forward as it was.
        was_attribute: whether that was an attribute of the instance.
        meter: told of every recomputation.
    """

    def __init__(self, forward: Callable[..., Any], was_attribute: bool, meter: Meter | None = None) -> None:
        self.forward = forward
        self.was_attribute = was_attribute
        self.active = True
        self._meter = meter

    def __reduce__(self) -> Any:  # a copy of the module, or a pickled one, is as it was before us
        return _itself, (self.forward,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        leaves, shape = tree_flatten((args, kwargs))

        def run(*leaves: Any) -> Any:
            again, keywords = tree_unflatten(leaves, shape)
            if self._meter is None or torch._C._current_graph_task_id() == -1:
                return self.forward(*again, **keywords)
            with _Counted(self._meter, leaves):
                return self.forward(*again, **keywords)

        # Hooks around a checkpoint see the tensors that it is given by position, and no others.
        return checkpoint(run, *leaves, use_reentrant=False)


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


class _Counted:
    """Counts the storages that autograd saves inside it, and leaves them to the hooks that are there."""

    def __init__(self, meter: Meter, leaves: Iterable[Any]) -> None:
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

        self._hooks = torch.autograd.graph.saved_tensors_hooks(counted, unpack)
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:  # also when the checkpoint ends the recomputation early
        self._hooks.__exit__(*error)
        self._meter.recomputed(sum(nbytes for key, nbytes in self._saved.items() if key not in self._inputs))
