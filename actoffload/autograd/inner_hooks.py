"""Detects two things that leave this library without a choice: other hooks inside our context, reentrant checkpoints.

Autograd calls hooks of the program's own (``save_on_cpu`` in a layer) in place of ours. The forward of a reentrant
checkpoint has no graph, so its block has to run again. Both show in the graph that each module made, which this
inspects in the first forward of each model.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from ..runtime.untraced import Hooking, inside_compiled, untraced
from ..sizes import format_size
from ..tell.report import say
from ..tiers.shared import Shared
from .hook_stack import OUR_UNPACKS, top
from .module_names import eager_modules

_CHECKPOINT = "torch.utils.checkpoint"
"""Its hooks hold no tensor: backward computes those tensors again."""
_MOST_NODES = 10_000
"""So many nodes are read at most: PyTorch frees a longer chain of such nodes recursively, see `originals.MOST`."""
REENTRANT = (
    "{} checkpointed blocks run again in backward in any case, because their checkpoints are reentrant. With "
    "use_reentrant=False (in Transformers gradient_checkpointing_kwargs={{'use_reentrant': False}}) a plan may let "
    "some of them run once, which shortens the step"
)


class _Running(NamedTuple):
    """A module whose forward runs.

    Attributes:
        name: its qualified name, or the name of its class.
        module: the module.
        node: the number of the first node that it can make; None if other hooks than ours were on top as it began,
            because a module around it has pushed those.
    """

    name: str
    module: nn.Module
    node: int | None


class InnerHooks(Hooking):
    """Finds and reports saved tensors that the program's own hooks received in our context, and reentrant checkpoints.

    It hooks the modules of a model for one forward. Compiled modules get no hooks, which would break their graph.

    Args:
        shared: has the reporter, which receives the texts.
        chooses: whether a plan may choose the checkpointed blocks that run once.
    """

    def __init__(self, shared: Shared, *, chooses: bool) -> None:
        super().__init__()
        self._shared, self._chooses = shared, chooses
        self._looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._thread: int | None = None
        self._stack: list[_Running] = []
        self._seen: set[int] = set()
        self._found: dict[str, list[tuple[str, int]]] = {}
        self._reentrant = 0

    def begin(self, model: nn.Module) -> None:
        """Inspect the forward that begins in this thread, if it is the first of its model."""
        if model in self._looked_at or self._thread is not None or inside_compiled() or not _ours_apply():
            return
        self._looked_at.add(model)
        self._thread = threading.get_ident()
        for name, module, compiled in eager_modules(model):
            if not (compiled or module._compiled_call_impl is not None or isinstance(module, torch.jit.ScriptModule)):
                shown = repr(name) if name else type(module).__name__
                self._hooks[module] = [
                    module.register_forward_pre_hook(functools.partial(self.enter, shown), prepend=True),
                    module.register_forward_hook(self.leave, always_call=True),
                ]
        # The model's pre-hooks run at this moment, so the new one would come too late for the model itself.
        self._stack.append(_Running(repr(type(model).__name__), model, torch._C._autograd._get_sequence_nr()))

    def end(self) -> None:
        """Report the findings as the context ends."""
        if self._thread != threading.get_ident():
            return
        found, blocks, self._thread = self._found, self._reentrant, None
        self.remove()
        self._stack, self._seen, self._found, self._reentrant = [], set(), {}, 0
        if found:
            self._shared.reporter.advise("inner hooks", _text(found))
        if blocks and self._chooses:
            text = REENTRANT.format(blocks)
            self._shared.reporter.advise("reentrant", text, logging.INFO)
            say(self._shared.config, f"actoffload: {text}")

    @untraced
    def enter(self, name: str, module: nn.Module, args: object) -> None:
        """Note that a module begins to run."""
        if self._thread == threading.get_ident():
            node = torch._C._autograd._get_sequence_nr() if _ours_apply() else None
            self._stack.append(_Running(name, module, node))

    @untraced
    def leave(self, module: nn.Module, args: object, output: object) -> None:
        """Inspect the graph of a module that has run."""
        if self._thread != threading.get_ident() or not any(running.module is module for running in self._stack):
            return
        # An interrupt skips the forward hooks of inner modules, so their entries may still lie above this module's.
        while (running := self._stack.pop()).module is not module:
            pass
        if running.node is not None:
            nodes = list(_nodes(output, running.node, self._seen))
            self._reentrant += sum(getattr(node, "_forward_cls", None) is CheckpointFunction for node in nodes)
            found = [one for node in nodes for one in _taken(node)]
            if found:
                self._found.setdefault(running.name, []).extend(found)


def _ours_apply() -> bool:
    """Return whether a forward runs in which autograd calls this library's hooks."""
    above = top()
    ours = above is not None and above[1] in OUR_UNPACKS
    return ours and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def _nodes(output: object, first: int, seen: set[int]) -> Iterator[Any]:
    """Yield the nodes that made a module's output, from number ``first`` on, unless in ``seen``; add them there."""
    left: list[Any] = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    while left and len(seen) < _MOST_NODES:
        node = left.pop()
        number = -1 if node is None else node._sequence_nr()
        if first <= number < 1 << 62 and number not in seen:  # a leaf's node has the largest number there is
            seen.add(number)
            yield node
            left.extend(following for following, _ in node.next_functions)


@functools.cache
def _raw_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved"))


def _taken(node: Any) -> Iterator[tuple[str, int]]:
    """Yield, for each tensor of a node that the program's own hooks hold, the hook's name and the bytes it holds."""
    kind: Any = type(node)
    for name in _raw_names(kind):
        with suppress(RuntimeError):  # the node has freed its saved tensors
            raw = getattr(node, name)
            for saved in raw if isinstance(raw, (tuple, list)) else (raw,):
                hook = getattr(saved, "unpack_hook", None)
                if hook is None or hook in OUR_UNPACKS or getattr(hook, "__module__", "") == _CHECKPOINT:
                    continue
                held = [leaf for leaf in tree_leaves(saved.data) if isinstance(leaf, Tensor)]
                if not held:
                    continue  # these hooks compute the tensor again, as torch_remat's do
                owner = getattr(hook, "__qualname__", type(hook).__name__).partition(".<locals>")[0]
                yield owner.removesuffix(".__init__"), sum(leaf.nbytes for leaf in held)


def _text(found: dict[str, list[tuple[str, int]]]) -> str:
    taken = [one for each in found.values() for one in each]
    modules = next(iter(found)) + (f" and {len(found) - 1} more modules" if len(found) > 1 else "")
    return (
        f"saved tensor hooks of the program's own ({', '.join(dict.fromkeys(owner for owner, _ in taken))}) are called "
        f"inside of {modules} in place of actoffload's: {len(taken)} tensors, "
        f"{format_size(sum(nbytes for _, nbytes in taken))}, of the first forward went past it. It neither moves nor "
        "counts them: switch those hooks off, or leave these modules to them and attach the others"
    )
