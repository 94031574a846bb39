"""The layer-major order of a step's micro-batches: every block runs all of them before the next block begins.

The idea is that of SpeedLoader (Zhang and You, NeurIPS 2024) and GreedySnake (arXiv 2512.17570). Sharded parameters are
gathered once per block and direction instead of once per micro-batch, and gradients are reduced once per block.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ConfigError, StateError

__all__ = ["layer_major"]

GATHER = "set_reshard_after_forward"
"""FSDP2's setter for the forward: whether a module gives its gathered parameters up when its forward ends."""
REDUCE = ("set_requires_gradient_sync", "set_reshard_after_backward")
"""FSDP2's setters for backward."""
BEHIND = ("reduce_grads", "all_reduce_grads", "reshard_after_backward", "post_forward_mesh_info")
"""The attributes of a group of FSDP2's parameters that these setters change, as there are no getters."""
AUTOMATIC = "_auto_reshard_after_forward"
"""The attribute of a module's FSDP2 state that says that the program has left the forward's choice to PyTorch."""
UNREACHED = (
    "layer_major: this backward reached a sharded module through some of the micro-batches, but not through the last, "
    "so its gradients are not reduced. Call backward once, on the sum of all losses"
)

Stage = Callable[..., Any]


def layer_major(
    blocks: Iterable[nn.Module],
    inputs: Sequence[Tensor | tuple[Any, ...]],
    before: Stage | None = None,
    after: Stage | None = None,
) -> list[Tensor]:
    """Run micro-batches block by block, and return one loss for each. Call ``sum(losses).backward()`` then.

    Parameters that FSDP2 or ZeRO-3 has sharded are gathered twice a step and reduced once, whatever the number of
    micro-batches. Gradients are bit-identical to a loop over the micro-batches with one reduction at its end.

    Args:
        blocks: the blocks in their order, sharded or not, checkpointed or not.
        inputs: the micro-batches. Each is a tensor, or a tuple: its first element flows from block to block, and
            every block gets the others as well, as further arguments.
        before: a module or a function, called with the elements of each micro-batch. It returns the tensor that flows,
            or a tuple in the place of the micro-batch's.
        after: a module or a function, called with the last block's output and the micro-batch's other elements, as in
            ``inputs``. It returns a loss, a tensor with one element.

    Returns:
        What ``after`` returns, or else what the last block returns, in the order of ``inputs``.

    Raises:
        ConfigError: an argument is none of these, or a block or ``after`` returns something else; names it.
        StateError: from backward, if it leaves a sharded module's gradients without a reduction.

    >>> blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    >>> losses = layer_major(blocks, [torch.ones(2, 4), torch.zeros(2, 4)], after=lambda x: x.square().mean())
    >>> sum(losses).backward()
    """
    stages = _checked_stages(blocks, before, after)
    flows, rests = _checked_inputs(inputs)
    others, last = list(rests), len(flows) - 1
    step = _Step([stage for _, stage in stages])
    try:
        for (name, stage), sharded in zip(stages, step.sharded, strict=True):
            # Each micro-batch but the one that runs last leaves the parameters gathered for the next one.
            sharded.set(False, GATHER)
            # In descending order: autograd takes the newest node first, so that backward adds gradients up in
            # ascending order, as a loop does. Floating-point sums depend on that.
            for place in range(last, -1, -1):
                if place == 0:
                    sharded.last_forward()
                result = stage(flows[place], *(rests if name == "after" else others)[place])
                if name == "before" and isinstance(result, tuple):
                    (flows[place],), (others[place],) = _checked_inputs([result], name)
                else:
                    flows[place] = _checked_result(result, name)
                step.watch(flows[place], sharded, last=place == last)
            sharded.restore()
    except BaseException:
        step.give_up()
        raise
    return flows


# -- what the program passes ------------------------------------------------------------------------------------------


def _checked_stages(blocks: Iterable[nn.Module], before: Stage | None, after: Stage | None) -> list[tuple[str, Stage]]:
    found = list(blocks) if isinstance(blocks, Iterable) else []
    if not found or not all(isinstance(block, nn.Module) for block in found):
        raise ConfigError("blocks", type(blocks).__name__, "give the blocks as modules, such as model.layers")
    for name, stage in (("before", before), ("after", after)):
        if stage is not None and not callable(stage):
            raise ConfigError(name, stage, "give a module or a function, or leave it out")
    named = [("before", before), *(("blocks", block) for block in found), ("after", after)]
    return [(name, stage) for name, stage in named if stage is not None]


def _checked_inputs(inputs: Sequence[Any], name: str = "inputs") -> tuple[list[Tensor], list[tuple[Any, ...]]]:
    """Return the tensor of each micro-batch that flows, and its other elements."""
    if not isinstance(inputs, Sequence) or not inputs:
        raise ConfigError(name, inputs, "give a list of micro-batches, each a tensor or a tuple that begins with one")
    whole = [one if isinstance(one, tuple) else (one,) for one in inputs]
    for one in whole:
        if not one or not isinstance(one[0], Tensor):
            found = "()" if not one else type(one[0]).__name__
            raise ConfigError(name, found, "a micro-batch is a tensor, or a tuple that begins with the one that flows")
    return [one[0] for one in whole], [one[1:] for one in whole]


def _checked_result(result: Any, name: str) -> Tensor:
    """Return the tensor that a stage has returned, alone or in a tuple of one."""
    if isinstance(result, tuple) and len(result) == 1:
        result = result[0]
    if not isinstance(result, Tensor):
        # To drop a second tensor would drop its gradient, and nobody would notice.
        found = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise ConfigError(name, found, "each returns one tensor; wrap what returns more, and add its losses up inside")
    if name == "after" and result.numel() != 1:
        raise ConfigError(name, tuple(result.shape), "it returns a loss: a tensor with one element")
    return result


# -- modules that FSDP2 has sharded -----------------------------------------------------------------------------------


class _Sharded:
    """The FSDP2 modules of one stage, and how to restore their settings while a schedule has others."""

    def __init__(self, stage: Stage) -> None:
        there = stage.modules() if isinstance(stage, nn.Module) else ()
        self.modules: list[Any] = [
            module for module in there if all(callable(getattr(module, name, None)) for name in (GATHER, *REDUCE))
        ]
        self.settings: list[Callable[[], None]] = []
        """Functions that restore the program's settings; none if no micro-batch has left anything for a later one."""

    def set(self, value: bool, *setters: str) -> None:
        """Have the modules do what these setters control in each micro-batch, or leave it for a later one."""
        if not self.settings:  # the settings of the program, not those of the micro-batch before
            self.settings = [one for module in self.modules for one in _settings(module)]
        for module in self.modules:
            for setter in setters:
                getattr(module, setter)(value, recurse=False)

    def last_forward(self) -> None:
        """Have the last forward give parameters up, unless the program has set that they stay gathered."""
        for one in self.settings:
            one()
        for module in self.modules:
            # PyTorch's own choice is to keep the parameters of the module whose forward is outermost: here each block.
            if getattr(_state(module), AUTOMATIC, False):
                getattr(module, GATHER)(True, recurse=False)

    def restore(self) -> None:
        """Restore the settings of the program. Idempotent."""
        settings, self.settings = self.settings, []
        for one in settings:
            one()

    def give_up(self) -> None:
        """Reshard the modules after an exception, and restore their settings."""
        self.set(True, GATHER)  # else `reshard` does nothing in the middle of a forward
        for module in self.modules:
            try:
                module.reset_iter_state()
            except (AttributeError, RuntimeError):  # before PyTorch 2.13, or not an outermost module
                module.reshard()
        self.restore()


def _state(module: Any) -> Any:
    return module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None


def _settings(module: Any) -> list[Callable[[], None]]:
    """Return functions that restore the present settings of a module, or else PyTorch's defaults."""
    state = _state(module)
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    found: list[Callable[[], None]] = [
        partial(setattr, owner, name, getattr(owner, name))
        for owner in (state, *groups)
        for name in (AUTOMATIC, *BEHIND)
        if hasattr(owner, name)
    ]
    return found or [partial(getattr(module, setter), True, recurse=False) for setter in (GATHER, *REDUCE)]


class _Step:
    """The sharded modules of all stages, during one forward and its backwards."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.sharded = [_Sharded(stage) for stage in stages]
        self._end: weakref.ref[_End] | None = None

    def watch(self, output: Tensor, sharded: _Sharded, *, last: bool) -> None:
        """Set a stage's modules as backward begins with one of its micro-batches; ``last``: with the last one."""
        # A hook, not a function of autograd: that would return a view of the output, whose change in place drops the
        # hook by which FSDP2 gathers the parameters for backward.
        if sharded.modules and output.requires_grad:
            output.register_hook(partial(self._reached, sharded, last))  # type: ignore[no-untyped-call]

    def _reached(self, sharded: _Sharded, last: bool, gradient: Tensor) -> None:
        if self._end is None or self._end() is None:
            end = _End(self)
            self._end = weakref.ref(end)
            # Before FSDP2's own, which reduces the gradients of a block whose input needs none: by then the settings
            # are the program's.
            torch.autograd.Variable._execution_engine.queue_callback(end)
        if last:
            sharded.restore()
        else:
            sharded.set(False, *REDUCE)

    def ended(self) -> None:
        """Check that backward has left nothing undone."""
        if any(sharded.settings for sharded in self.sharded):
            self.give_up()
            raise StateError(UNREACHED)

    def give_up(self) -> None:
        """Reshard all modules after an exception, and restore their settings."""
        for sharded in self.sharded:
            if sharded.modules:
                sharded.give_up()


class _End:
    """The end of one backward: autograd calls this object if backward ends well, and drops it in any case."""

    def __init__(self, step: _Step) -> None:
        self._step: _Step | None = step

    def __call__(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.ended()

    def __del__(self) -> None:
        if self._step is not None:
            self._step.give_up()
