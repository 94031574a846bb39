"""Train one distributed setting twice, without and with offloading, and record both runs."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import actoffload
from actoffload import Offloader
from tests.integration.evidence import Run, counting_owners
from tests.integration.processes import scratch

STEPS = 2
"""The second step prefetches in the order of the first."""
OPTIONS: dict[str, Any] = {"target": "nvme", "min_bytes": 1024, "device_budget": "1MiB", "policy": "greedy"}

Step = Callable[[int], list[Tensor]]


@dataclass
class Setting:
    """A model that is set up for one kind of parallelism.

    Attributes:
        model: owns all parameters of this rank; ``outer`` attaches to it.
        step: runs forward and backward of one step and returns its losses.
        inner: the module that ``inner`` attaches to; default: the model's first child.
        attached: the module that ``outer`` attaches to, if not the model.
        options: options of the offloader beside the usual ones.
    """

    model: nn.Module
    step: Step
    inner: nn.Module | None = None
    attached: list[nn.Module] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


def local(tensor: Tensor) -> Tensor:
    found: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    plain: Tensor = getattr(found, "elem", found)
    return plain.detach()


def owned(modules: Iterable[nn.Module]) -> Iterable[Tensor]:
    """Each tensor whose storage holds a parameter at this moment: whole, sharded or gathered."""
    for module in modules:
        for parameter in [*module._parameters.values(), *module._buffers.values()]:
            if parameter is not None:
                yield parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        state = getattr(module, "_get_fsdp_state", None)
        for group in state()._fsdp_param_groups if state is not None else ():
            for one in group.fsdp_params:
                yield from (one._sharded_param_data, *one.all_gather_outputs)
        flat = getattr(module, "_flat_param", None)
        if flat is not None:
            yield from (t for t in (flat, getattr(flat, "_full_param_padded", None)) if t is not None)


def train(make: Callable[[], Setting], where: str) -> Run:
    """Train for some steps.

    Args:
        make: makes the model, the same every time.
        where: ``""`` for the run without offloading, or the place of the offloading.
    """
    torch.manual_seed(0)
    setting = make()
    # SGD, as a step of AdamW takes a tenth of a row's time.
    optimizer = torch.optim.SGD(setting.model.parameters(), lr=1e-2)
    run, modules = Run(), list(setting.model.modules())
    with offloading(setting, where) as offloader, counting_owners(lambda: owned(modules)) as meter:
        for step in range(STEPS):
            torch.manual_seed(100 + step)  # dropout
            inside = offloader if offloader is not None and where == "context" else contextlib.nullcontext()
            with inside:
                losses = setting.step(step)
            run.losses += [local(loss).clone() for loss in losses]
            for name, parameter in setting.model.named_parameters():
                if parameter.grad is not None:
                    run.tensors[f"step {step}: gradient of {name}"] = local(parameter.grad).clone()
            optimizer.step()
            optimizer.zero_grad()
            if offloader is not None:
                live = offloader.statistics().live_records
                assert live == 0, f"{live} records live after step {step}"
        for name, parameter in setting.model.named_parameters():
            run.tensors[f"final {name}"] = local(parameter).clone()
        if offloader is not None:
            run.statistics = offloader.statistics()
            run.moved_parameter_bytes = meter.parameter_bytes
    return run


@contextlib.contextmanager
def offloading(setting: Setting, where: str) -> Iterator[Offloader | None]:
    """Offload ``where``; the offloader is new, and closed at the end."""
    if not where:
        yield None
        return
    options = {**OPTIONS, "path": scratch(), **setting.options}
    attachments = []
    if where == "context":
        offloader = actoffload.offload_activations(**options).offloader
    else:
        inner = setting.inner if setting.inner is not None else next(setting.model.children())
        modules = [inner] if where == "inner" else setting.attached or [setting.model]
        offloader = actoffload.Offloader(actoffload.OffloadConfig(**options))
        attachments = [actoffload.attach(module, offloader=offloader) for module in modules]
    try:
        yield offloader
    finally:
        for attachment in attachments:
            attachment.detach()
        offloader.close()


@cache
def _alone(make: Callable[[], Setting]) -> Run:
    """The run without offloading, once for all places of the offloading."""
    return train(make, "")


def compare(alone: Callable[[], Setting], make: Callable[[], Setting], where: str) -> Any:
    """The run without and the run with offloading, or the text of an error."""
    try:
        return _alone(alone), train(make, where)
    except Exception:
        return traceback.format_exc()
