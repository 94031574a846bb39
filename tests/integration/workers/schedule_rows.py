"""Layer-major steps with FSDP2 on two ranks: counts of collectives, gradients beside a loop's, failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from actoffload import OffloadConfig, Offloader, schedules
from actoffload.errors import StateError
from tests.blocks import Block
from tests.integration.processes import main, scratch
from tests.integration.workers.distributed_runs import local

WIDTH, WORDS, BLOCKS = 32, 16, 3
MODULES = BLOCKS + 2


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.out(x).logsumexp(-1).mean()
        return loss


class Model(nn.Module):
    """Each part is sharded by itself, so each is the root of its forwards."""

    def __init__(self, form: str = "eager") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), Head()
        self.blocks: Any = nn.ModuleList(Block(WIDTH, form) for _ in range(BLOCKS))
        self.parts: list[Any] = [self.embed, *self.blocks, self.head]
        for part in self.parts:
            fully_shard(part)
        for block in self.blocks if form == "compiled" else ():
            block.compile(backend="aot_eager")

    def loop(self, inputs: list[Tensor]) -> None:
        """Micro-batch after micro-batch, with one reduction."""
        for place, x in enumerate(inputs):
            for part in self.parts:
                part.set_requires_gradient_sync(place == len(inputs) - 1)
            for part in self.parts:
                x = part(x)
            x.backward()

    def losses(self, inputs: list[Tensor], after: Callable[..., Any] | None = None) -> list[Tensor]:
        return schedules.layer_major(self.blocks, inputs, before=self.embed, after=after or self.head)

    def step(self, inputs: list[Tensor], after: Callable[..., Any] | None = None) -> None:
        total: Any = sum(self.losses(inputs, after))
        total.backward()

    def gradients(self) -> list[Tensor | None]:
        """This rank's gradients, cleared. They are at the sharded parameters, which a gathered module lacks."""
        for part in self.parts:
            part.reshard()
        found = [None if one.grad is None else local(one.grad).clone() for one in self.parameters()]
        self.zero_grad()
        return found

    def settings(self) -> list[Any]:
        """The values of the setters, and whether each module is sharded, by PyTorch's own names."""
        states = [part._get_fsdp_state() for part in self.parts]
        groups = [group for state in states for group in state._fsdp_param_groups]
        return [
            [state._auto_reshard_after_forward for state in states],
            [(one.reduce_grads, one.all_reduce_grads, one.reshard_after_backward) for one in groups],
            [id(one.post_forward_mesh_info) for one in groups],
            [one.is_sharded for one in groups],
        ]


def batches(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(5 + dist.get_rank())
    return [torch.randint(WORDS, (4, 8), generator=draw) for _ in range(count)]


class _Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.counts[function._schema.name.removeprefix("c10d::")] += 1
        return function(*args, **(kwargs or {}))


def counted(work: Callable[[], object]) -> tuple[int, int]:
    """The number of gathers of parameters, and of reductions of gradients."""
    with _Collectives() as mode:
        work()
    gathers = sum(count for name, count in mode.counts.items() if "gather" in name)
    return gathers, sum(mode.counts.values()) - gathers


def compared(count: int, form: str = "eager", **options: Any) -> dict[str, Any]:
    """The second of two steps beside a loop's; with ``options`` inside an offloader's context."""
    inputs, loop, model = batches(count), Model(form), Model(form)
    loop.loop(inputs)
    found: dict[str, Any] = {"settings": model.settings()}
    if not options:
        model.step(inputs)
        model.gradients()
        found["counts"] = counted(lambda: model.step(inputs))
    else:
        config = OffloadConfig(target="nvme", path=scratch(), min_bytes=0, announce="none", policy="all", **options)
        offloader = Offloader(config)
        with offloader:
            losses: Any = sum(model.losses(inputs))
        offloader.synchronize()  # on a busy disk, backward could need a tensor before its write has begun
        losses.backward()
        statistics = offloader.statistics()
        found["moved"], found["share"] = statistics.moved_bytes, statistics.moved_share
        found["kept parameters"] = statistics.kept_bytes.get("parameter", 0)
        offloader.close()
    found["gradients"], found["expected"] = model.gradients(), loop.gradients()
    found["settings after"] = model.settings()
    return found


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("in backward")


def failing(in_backward: bool) -> dict[str, Any]:
    """A block fails at its third micro-batch: the settings before and after it, and the gradients of another try."""
    inputs, loop, model = batches(4), Model(), Model()
    loop.loop(inputs)
    model.blocks[0].set_requires_gradient_sync(False)
    model.blocks[2].set_reshard_after_forward(False)
    model.blocks[2].set_reshard_after_backward(False)
    calls: list[int] = []

    def fail(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        calls.append(len(calls))
        if len(calls) != 3:
            return None
        if in_backward:
            failing: Tensor = _Fails.apply(output)
            return failing
        raise ArithmeticError("in forward")

    handle = model.blocks[1].up.register_forward_hook(fail)
    before, error = model.settings(), ""
    try:
        model.step(inputs)
    except ArithmeticError as raised:
        error = str(raised)
        after = model.settings()
    handle.remove()
    model.blocks[0].set_requires_gradient_sync(True)
    model.zero_grad()
    model.step(inputs)
    found: dict[str, Any] = {"error": error, "settings": before, "settings after": after}
    return found | {"gradients": model.gradients(), "expected": loop.gradients()}


def chosen() -> tuple[tuple[int, int], tuple[int, int]]:
    """The counts if one module does not reshard after forward, and if a later step reduces."""
    inputs, model = batches(4), Model()
    model.blocks[0].set_reshard_after_forward(False)
    kept = counted(lambda: model.step(inputs))
    for part in model.parts:
        part.set_requires_gradient_sync(False)
    return kept, counted(lambda: model.step(inputs))


def partial() -> tuple[str, Any, Any]:
    """The error of a backward without the last micro-batch."""
    model = Model()
    before = model.settings()
    losses = model.losses(batches(3))
    try:
        (losses[0] + losses[1]).backward()
    except StateError as error:
        return str(error), before, model.settings()
    return "", before, model.settings()


def unneeded_inputs() -> dict[str, Any]:
    """The first block's inputs need no gradient, so only the end of backward reduces its gradients."""
    inputs = [x[..., None].expand(*x.shape, WIDTH).float() / WORDS for x in batches(4)]
    loop, model = Model(), Model()
    loop.parts, model.parts = loop.parts[1:], model.parts[1:]
    loop.loop(inputs)

    def step() -> None:
        total: Any = sum(schedules.layer_major(model.blocks, inputs, after=model.head))
        total.backward()

    counts = counted(step)
    return {"counts": counts, "gradients": model.gradients(), "expected": loop.gradients()}


def work() -> dict[str, Any]:
    found: dict[str, Any] = {f"{count} micro-batches": compared(count) for count in (1, 4)}
    found |= {form: compared(4, form) for form in ("checkpointed", "compiled", "lora")}
    found["offloaded"] = compared(4, boundaries="all")
    found["boundaries"] = compared(4, "checkpointed", boundaries="only")
    found["fails in forward"], found["fails in backward"] = failing(False), failing(True)
    found["chosen"], found["partial"], found["unneeded inputs"] = chosen(), partial(), unneeded_inputs()
    return found


if __name__ == "__main__":
    main(work)
