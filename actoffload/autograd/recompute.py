"""The option ``recompute``: runs blocks as checkpointed regions that the program itself does not checkpoint."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..autotune.blocks import find_blocks
from ..errors import ConfigError
from .checkpoints import checkpoint
from .hook_stack import enabled

Wanted = bool | tuple[str, ...]


class Recompute:
    """Wraps the forwards of the blocks that the option names, and restores them.

    Args:
        wanted: globs over the names of modules; True for the repeated blocks of each model.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._applied: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Checkpointed]] = weakref.WeakKeyDictionary()
        """The wrapped forward of each block. Weak on both sides, as a wrapped forward holds its block."""

    def watch(self, model: nn.Module) -> None:
        """Wrap the blocks of a model."""
        for _, block in matching(model, self._wanted):
            if not isinstance(vars(block).get("forward"), Checkpointed):  # else an offloader has wrapped it already
                wrapped = block.forward = Checkpointed(block)
                self._applied[block] = weakref.ref(wrapped)

    def forget(self, model: nn.Module) -> None:
        """Restore the blocks of a model."""
        for block in model.modules():
            self._undo(block)

    def undo(self) -> None:
        """Restore every block."""
        for block in list(self._applied):
            self._undo(block)

    def _undo(self, block: nn.Module) -> None:
        reference = self._applied.pop(block, None)
        wrapped: Checkpointed | None = None if reference is None else reference()
        if wrapped is None:
            return
        there: object = vars(block).get("forward")
        if there is not wrapped:
            wrapped.active = False  # another wrapper holds this one, so it stays and only calls the forward
        elif wrapped.was_attribute:
            block.forward = wrapped.forward
        else:
            del block.forward


def check(wanted: Wanted, models: Sequence[nn.Module]) -> None:
    """Look for a block for each pattern.

    Raises:
        ConfigError: a pattern matches no module; names it.
    """
    one: Wanted
    for one in (wanted,) if isinstance(wanted, bool) else [(glob,) for glob in wanted]:
        if one and not any(True for model in models for _ in matching(model, one)):
            remedy = "the model has no repeated blocks: give globs over the names of its modules"
            if not isinstance(one, bool):
                remedy = f"{one[0]!r} matches no module of the model: see model.named_modules()"
            raise ConfigError("recompute", wanted, remedy)


def matching(model: nn.Module, wanted: Wanted) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that the option names."""
    if isinstance(wanted, bool):
        yield from find_blocks(model).items() if wanted else ()
        return
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name and not name.startswith(inside or ("\n",)) and any(fnmatchcase(name, glob) for glob in wanted):
            inside += (f"{name}.",)
            yield name, module


class Checkpointed:
    """A module's forward as a checkpointed region.

    Attributes:
        forward: the original forward; ``was_attribute``: whether it was an attribute of the instance.
        active: whether it runs as a region.
        early_stop: whether backward may end the second run early, by an exception: TorchScript would report it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward = module.forward
        self.was_attribute = "forward" in vars(module)
        self.active = True
        self.early_stop = not any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())

    def __reduce__(self) -> Any:  # a copy of the module, or a pickled module, has its original forward
        return _itself, (self.forward,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A checkpoint would be part of the graph of an export or a trace.
        recorded = torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None
        # Without gradients PyTorch's checkpoint runs the function alone, so the test for them saves time alone: an
        # evaluation of 12 small blocks took 1.5 ms without the test, 0.3 ms with it (by hand).
        if not self.active or not torch.is_grad_enabled() or recorded:
            return self.forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler runs it again in its own graph, and would guard on each `id`
            return checkpoint(functools.partial(self.forward, **kwargs), *args)
        # The tensors of a transform (`torch.func.grad`, `vmap`) do not outlive it, so backward cannot run it again.
        if torch._C._functorch.peek_interpreter_stack() is not None or not enabled():
            return self.forward(*args, **kwargs)
        forward = _with_its_tensors(self.module, self.forward)
        values, count, names = [*args, *kwargs.values()], len(args), tuple(kwargs)
        # A checkpoint saves its positional tensors through autograd, where hooks see them. Each tensor is passed once,
        # because a block may compare two of its arguments by identity.
        tensors = {id(value): value for value in values if isinstance(value, Tensor)}
        order = tuple(tensors)
        others = [(id(value), None if id(value) in tensors else value) for value in values]

        @functools.wraps(self.forward)  # so that reports find the region's module
        def run(*given: Any) -> Any:
            passed = dict(zip(order, given, strict=True))
            full = [passed.get(number, other) for number, other in others]
            return forward(*full[:count], **dict(zip(names, full[count:], strict=True)))

        return checkpoint(run, *tensors.values(), early_stop=self.early_stop)


class _Bound(nn.Module):
    """Calls a block's forward, for `functional_call`, which calls modules."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.block, self.bound = block, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.bound(*args, **kwargs)


def _with_its_tensors(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a block's forward, bound to its present tensors inside `functional_call`, which takes them away again.

    Elsewhere a block has the parameters that it has as it runs, because FSDP makes new ones each time.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.nn.utils.stateless":
        frame = frame.f_back  # type: ignore[assignment]  # the thread's first frame has none
    if frame is None:
        return forward
    bound = _Bound(block, forward)
    # Each place once, however many names its module has: `functional_call` would restore what it has just set.
    found = {
        f"{prefix}.{name}": tensor
        for prefix, part in bound.named_modules()
        for name, tensor in (*part._parameters.items(), *part._buffers.items())
        if tensor is not None
    }

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return functional_call(bound, found, args, kwargs, tie_weights=False)

    return run


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
