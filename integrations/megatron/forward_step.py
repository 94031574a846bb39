"""Runs Megatron's forward step inside an offloading context, and announces the schedule's next phase."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from actoffload import Offloader, keep, offload_activations
from actoffload.errors import ConfigError, SpoolPathError

from .arguments import flag, options_of
from .microbatches import MicroBatches, Phase, core

_SAME_TENSORS = "both would move the same tensors"
_CONFLICTS = {
    "cpu_offloading": _SAME_TENSORS,
    "cpu_offloading_num_layers": _SAME_TENSORS,
    "fine_grained_activation_offloading": _SAME_TENSORS,
    "moe_paged_stash": _SAME_TENSORS,
    "cuda_graph_impl": "a captured forward moves nothing",
    "overlap_moe_expert_parallel_comm": "it runs the model outside the forward step, where nothing would be moved",
}
"""Megatron's switches that exclude actoffload, with the reason; the flag has the switch's name."""


class OffloadedForwardStep:
    """A forward step for ``pretrain`` or ``get_forward_backward_func()`` whose saved activations leave the device.

        pretrain(..., wrap_forward_step(forward_step))

    Its ``offloader`` is the `Offloader`; None with ``--actoffload-target none``, and before the first call without
    ``args``.

    Args:
        forward_step: Megatron's, which takes ``(data_iterator, model)`` or ``(data_iterator, model,
            checkpoint_activations_microbatch)`` and returns ``(output, loss function)``.
        args: parsed arguments with the flags of `add_actoffload_args`. Default: Megatron's ``get_args()``, called at
            the first forward step, when the arguments have been parsed and the process has its device.

    Raises:
        ConfigError: a flag's value cannot work, one of Megatron's own switches excludes actoffload, or megatron-core
            lacks a function that the adapter needs. Without ``args``, and for the model's configuration, at the first
            call.
    """

    def __init__(self, forward_step: Callable[..., Any], args: Any = None) -> None:
        functools.update_wrapper(self, forward_step)
        self.offloader: Offloader | None = None
        self._forward_step = forward_step
        self._began = False
        self._names_mlp_act = False
        self._numbers = MicroBatches()
        if args is not None:
            self._begin(args)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward step: inside the offloading context if gradients are enabled, else unchanged."""
        if not self._began:
            self._begin(_megatron_args())
        if self.offloader is None or not torch.is_grad_enabled():
            return self._forward_step(*args, **kwargs)
        offloader, model = self.offloader, _unwrap(args, kwargs)
        # The parsed arguments were checked, but a program may build its model's configuration without them.
        _refuse_conflicts(model.config, offloader.config.target)
        if self._names_mlp_act and getattr(model.config, "num_moe_experts", None):
            remedy = "the model has experts: name moe_act and expert_fc1, or give globs of module names"
            raise ConfigError(flag("include"), "mlp_act", remedy)
        try:
            offloader.use(model)
        except ConfigError as error:
            raise ConfigError(flag(error.field), error.value, error.remedy) from None
        key = self._numbers.key(model)
        after = self._numbers.following(model, key)

        def hint(phase: Phase) -> None:
            offloader.stage(*phase, next=after.get(phase))

        # Before the forward: its first save needs the hint, which decides whether the forward's tail stays.
        hint((key, "forward"))
        with offloader:
            result = self._forward_step(*args, **kwargs)
        outputs = [tensor for tensor in _tensors(result[0]) if tensor.requires_grad]
        if outputs:
            # "any": backward of this micro-batch begins with the first gradient that arrives, and another output may
            # never get one.
            register_multi_grad_hook(outputs, lambda _: hint((key, "backward")), mode="any")
        return result

    def _begin(self, args: Any) -> None:
        options = options_of(args)
        if options is not None:
            _refuse_conflicts(args, options["target"])
            _keep_discarded(core().discarding)
            try:
                self.offloader = offload_activations(**options).offloader
            except SpoolPathError as error:
                raise ConfigError("--actoffload-path", options.get("path"), str(error)) from error
            self._names_mlp_act = "mlp_act" in (getattr(args, "actoffload_modules", None) or ())
            self.offloader.sum_up(at_end=True)
        self._began = True  # last: a call after an error raises the same error again


wrap_forward_step = OffloadedForwardStep


def _megatron_args() -> Any:
    try:
        from megatron.training import get_args
    except ImportError:
        remedy = "megatron.training is not installed: give wrap_forward_step() the parsed arguments"
        raise ConfigError("args", None, remedy) from None
    return get_args()


def _refuse_conflicts(settings: Any, target: str) -> None:
    """Raise if Megatron's arguments or a model's configuration have a switch on that excludes actoffload."""
    for name, why in _CONFLICTS.items():
        if getattr(settings, name, None) not in (None, False, 0, "none"):
            flag = "--" + name.replace("_", "-")
            remedy = f"cannot be used with {flag}: {why}; leave one of them out"
            raise ConfigError("--actoffload-target", target, remedy)


@functools.cache
def _keep_discarded(discarding: Any) -> None:
    """Keep outputs that Megatron frees and computes again into the same storage: moving them would gain nothing."""
    checkpoint = discarding.checkpoint

    @functools.wraps(checkpoint)
    def keeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        # `keep` marks storages, and the next module saves these outputs only after this call returns.
        outputs = checkpoint(self, *args, **kwargs)
        for tensor in _tensors(outputs):
            keep(tensor)
        return outputs

    discarding.checkpoint = keeping


def _unwrap(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model chunk among a call's arguments, without `Float16Module`, `DistributedDataParallel` and their like."""
    model = next((value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)), None)
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    if not hasattr(model, "config"):
        raise ConfigError("model", type(model).__name__, "the forward step was called without a Megatron model")
    return model


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a model's output: one, or several in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
