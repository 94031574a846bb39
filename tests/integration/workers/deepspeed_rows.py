"""Rows of the DeepSpeed adapter: each trains twice from one seed, through `initialize` with and without its section."""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
import torch.utils.checkpoint
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from torch import Tensor, nn

from actoffload import Offloader, Plan
from actoffload.integrations import deepspeed as adapter
from tests.blocks import MLP
from tests.integration.evidence import Run, counting_owners
from tests.integration.processes import main, scratch

WIDTH = 64
STEPS = 2
"""The second step prefetches in the order of the first."""
LINES: list[str] = []

ZERO3 = {"stage": 3, "stage3_prefetch_bucket_size": 1000}
ZERO3 |= {f"stage3_{name}": 0 for name in ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance")}


class DetachedWeight(torch.autograd.Function):
    """Saves a detached weight, as fused kernels do: neither a leaf nor a view that autograd knows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight.detach().t())
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, transposed = ctx.saved_tensors
        return gradient @ transposed.t(), gradient.flatten(0, 1).t() @ x.flatten(0, 1)


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = DetachedWeight.apply(x, self.weight)
        return result


class Model(nn.Module):
    """Embedding, blocks, a head tied to the embedding, and a loss.

    Args:
        checkpoint: the checkpoint function that runs each block, or None.
        frozen: freeze every second block, and tie the head by using the embedding's weight outside its module.
    """

    def __init__(self, *, checkpoint: Callable[..., Tensor] | None = None, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, WIDTH)
        self.blocks = nn.ModuleList(MLP(WIDTH) for _ in range(4))
        self.detached = Detached()
        self.head = None if frozen else nn.Linear(WIDTH, 96, bias=False)
        if self.head is not None:
            self.head.weight = self.embed.weight
        self.checkpoint = checkpoint
        for block in self.blocks[::2] if frozen else ():
            block.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.checkpoint is None else self.checkpoint(block, x)
        x = torch.tanh(self.detached(x))
        logits = self.head(x) if self.head is not None else torch.nn.functional.linear(x, self.embed.weight)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@dataclass(frozen=True)
class Row:
    """One configuration of DeepSpeed.

    Attributes:
        zero: the ``zero_optimization`` section.
        accumulate: micro-batches in a step.
        checkpoint: the function that runs each block, if any.
        checkpointing: arguments of ``deepspeed.checkpointing.configure``.
        frozen: whether every second block is frozen.
        budget: ``device_budget``, below the bytes that the row's forward saves.
        traced: whether a trace is written, for the test to read.
        options: options beside the usual ones.
        more: other sections of DeepSpeed's configuration.
    """

    zero: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    checkpoint: Callable[..., Any] | None = None
    checkpointing: dict[str, Any] = field(default_factory=dict)
    frozen: bool = False
    budget: str = "1MiB"
    more: dict[str, Any] = field(default_factory=dict)
    traced: bool = False
    options: dict[str, Any] = field(default_factory=dict)


ONCE: dict[str, Any] = {
    "checkpoint": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    "options": {"policy": Plan((), once=(0, 2), regions=4)},
}
"""PyTorch's checkpoints; two of the four blocks run once."""

CHECKPOINTED: dict[str, Any] = {"checkpoint": deepspeed.checkpointing.checkpoint, "budget": "96KiB"}
ROWS = {
    "zero0": Row(),
    "zero1": Row(zero={"stage": 1}),
    "zero2": Row(zero={"stage": 2}),
    "zero3": Row(zero=ZERO3),
    "zero3_frozen": Row(zero=ZERO3, frozen=True),
    "zero3_bf16": Row(zero=ZERO3, more={"bf16": {"enabled": True}}, budget="512KiB"),
    "accumulate3": Row(zero={"stage": 2}, accumulate=3),
    "accumulate3_zero3": Row(zero=ZERO3, accumulate=3),
    "checkpoint": Row(zero={"stage": 1}, **CHECKPOINTED),
    "checkpoint_zero3": Row(zero=ZERO3, **CHECKPOINTED),
    "checkpoint_non_reentrant": Row(
        zero={"stage": 1}, **CHECKPOINTED | {"checkpoint": deepspeed.checkpointing.non_reentrant_checkpoint}
    ),
    "checkpoint_partitioned": Row(zero={"stage": 1}, checkpointing={"partition_activations": True}, **CHECKPOINTED),
    "once_zero1": Row(zero={"stage": 1}, **ONCE),
    "once_zero2": Row(zero={"stage": 2}, **ONCE),
    "once_zero3": Row(zero=ZERO3, **ONCE),
    "optimizer_cpu": Row(zero={"stage": 2, "offload_optimizer": {"device": "cpu"}}, traced=True),
    "param_cpu": Row(zero={**ZERO3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}),
}


def section(budget: str) -> dict[str, Any]:
    directory = str(scratch())
    spool = {"target": "nvme", "path": directory, "policy": "greedy"}
    return {**spool, "min_bytes": 1024, "device_budget": budget, "announce": LINES.append}


def config_of(row: Row, offloaded: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": row.accumulate,
        "zero_optimization": row.zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        **row.more,
    }
    trace = {"trace": str(scratch() / "run.json")} if row.traced else {}
    return {**config, "actoffload": section(row.budget) | trace | row.options} if offloaded else config


def recorded(optimizer: torch.optim.Optimizer, run: Run) -> None:
    """Copy every gradient before the optimizer's step (where ZeRO partitions gradients, this rank's part)."""

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    run.tensors[f"gradient {len(run.tensors)}"] = parameter.grad.clone()

    optimizer.register_step_pre_hook(before)


def final_weights(module: nn.Module, run: Run) -> None:
    parameters = dict(module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        run.tensors.update({name: parameter.detach().clone() for name, parameter in parameters.items()})


def train(row: Row, offloaded: bool) -> Run:
    run = Run()
    torch.manual_seed(3)
    deepspeed.checkpointing.configure(None, **row.checkpointing)
    model = Model(checkpoint=row.checkpoint, frozen=row.frozen)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    recorded(optimizer, run)
    config = config_of(row, offloaded)
    engine, *_ = adapter.initialize(model=model, optimizer=optimizer, model_parameters=trainable, config=config)
    assert ("actoffload" in config) == offloaded
    draw = torch.Generator().manual_seed(5 + torch.distributed.get_rank())
    torch.manual_seed(7)
    with counting_owners(model.parameters) as meter:
        for _ in range(STEPS * row.accumulate):
            loss = engine(torch.randint(96, (4, 64), generator=draw))
            run.losses.append(loss.detach().clone())
            engine.backward(loss)
            engine.step()
            del loss
            if offloaded:
                run.statistics = engine.actoffload.offloader.statistics()
                assert run.statistics.live_records == 0
    run.moved_parameter_bytes = meter.parameter_bytes
    final_weights(model, run)
    if offloaded:
        assert engine.actoffload.report()
        engine.actoffload.detach()
        engine.actoffload.offloader.close()
    else:
        assert engine.actoffload is None
    engine.destroy()
    return run


def pipeline_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def train_pipeline(kind: type[nn.Module], checkpoint: int, offloaded: bool) -> Run:
    """Two stages, four micro-batches, in the order of the module's own schedule."""
    run = Run()
    torch.manual_seed(3)
    deepspeed.checkpointing.configure(None)
    module = kind(
        layers=[nn.Embedding(96, WIDTH), *(MLP(WIDTH) for _ in range(4)), nn.Linear(WIDTH, 96)],
        num_stages=2,
        loss_fn=pipeline_loss,
        partition_method="uniform",
        activation_checkpoint_interval=checkpoint,
        checkpointable_layers=["MLP"],
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    recorded(optimizer, run)
    row = Row(accumulate=4, budget="96KiB" if checkpoint else "1MiB")
    engine, *_ = adapter.initialize(model=module, optimizer=optimizer, config=config_of(row, offloaded))
    draw = torch.Generator().manual_seed(5)
    torch.manual_seed(7)
    with counting_owners(module.parameters) as meter, reported_stages() as reported:
        for _ in range(STEPS):
            tokens = [torch.randint(96, (4, 64), generator=draw) for _ in range(row.accumulate)]
            run.losses.append(engine.train_batch(iter([(t, t) for t in tokens])).detach().clone())
            if offloaded:
                run.statistics = engine.actoffload.offloader.statistics()
                assert run.statistics.live_records == 0
        before = len(reported)
        engine.eval_batch(iter([(t, t) for t in tokens]))
        assert len(reported) == before, "evaluation is no phase of training"
    LINES.extend(reported)
    run.moved_parameter_bytes = meter.parameter_bytes
    final_weights(module, run)
    if offloaded:
        engine.actoffload.detach()
        engine.actoffload.offloader.close()
    engine.destroy()
    return run


@contextlib.contextmanager
def reported_stages() -> Iterator[list[str]]:
    """Record the calls of `Offloader.stage`, as text such as ``F0>B0``."""
    reported: list[str] = []
    stage = Offloader.stage

    def telling(self: Offloader, microbatch: Any, direction: Any, *, next: Any = None) -> None:
        reported.append(short((microbatch, direction)) + (f">{short(next)}" if next else ""))
        stage(self, microbatch, direction, next=next)

    Offloader.stage = telling  # type: ignore[method-assign]
    try:
        yield reported
    finally:
        Offloader.stage = stage  # type: ignore[method-assign]


def short(phase: tuple[Any, str]) -> str:
    return f"{phase[1][0].upper()}{phase[0]}"


PIPELINES = {
    "pipeline": (deepspeed.PipelineModule, 0),
    "pipeline_checkpoint": (deepspeed.PipelineModule, 1),
    "pipeline_dual": (DualPipeVModule, 0),
}


ALIKE = {"once_zero1": "zero1", "once_zero2": "zero2", "once_zero3": "zero3", "checkpoint_zero3": "zero3"}
ALIKE |= dict.fromkeys(("checkpoint_non_reentrant", "checkpoint_partitioned"), "checkpoint")
ALIKE |= {"pipeline_checkpoint": "pipeline"}
"""Rows that have the bits of another one, without offloading."""


def run(name: str, offloaded: bool) -> Run:
    return train_pipeline(*PIPELINES[name], offloaded) if name in PIPELINES else train(ROWS[name], offloaded)


@functools.cache
def plain(name: str) -> Run:
    return run(name, False)


def announced() -> str:
    """The output of the first steps without an ``announce`` option."""
    row = ROWS["optimizer_cpu"]
    config = config_of(row, offloaded=True)
    del config["actoffload"]["announce"], config["actoffload"]["trace"]  # another row writes the same trace
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        engine, *_ = adapter.initialize(model=model, optimizer=optimizer, config=config)
        for _ in range(2):
            engine.backward(engine(torch.zeros(4, 64, dtype=torch.long)))
            engine.step()
    assert "bandwidth is shared with DeepSpeed's offload_optimizer (cpu)" in engine.actoffload.report()
    engine.destroy()
    return printed.getvalue()


def forms() -> dict[str, Any]:
    """The bytes written with each form of a configuration; fails if the configuration is changed."""
    config = config_of(Row(zero={"stage": 1}), offloaded=True)
    config["actoffload"]["announce"] = "none"
    file = scratch() / f"config{torch.distributed.get_rank()}.json"
    file.write_text(json.dumps(config))
    off = {**config, "actoffload": {**config["actoffload"], "enabled": False}}
    namespace, by_dict = argparse.Namespace(deepspeed_config=str(file)), argparse.Namespace(deepspeed_config=config)
    handed: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "dict": ((), {"config": config}),
        "file": ((), {"config": str(file)}),
        "config_params": ((), {"config_params": config}),
        "namespace": ((namespace,), {}),
        "namespace with a dict": ((by_dict,), {}),
        "switched off": ((), {"config": off}),
    }
    before, found = copy.deepcopy((config, off)), {}
    for name, (arguments, keywords) in handed.items():
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = adapter.initialize(*arguments, model=model, optimizer=optimizer, **keywords)
        attachment = engine.actoffload
        engine.backward(engine(torch.zeros(4, 64, dtype=torch.long)))
        found[name] = 0 if attachment is None else attachment.offloader.statistics().nvme_written_bytes
        if attachment is not None:
            attachment.detach()
            attachment.detach()
            packed = attachment.offloader.statistics().packed_tensors
            engine.backward(engine(torch.zeros(4, 64, dtype=torch.long)))
            assert attachment.offloader.statistics().packed_tensors == packed, "hooks run after detach()"
            attachment.offloader.close()
        assert "actoffload" not in engine._config._param_dict, "DeepSpeed saw the section"
        engine.destroy()
    assert (config, off) == before, "the caller's configuration was changed"
    assert (namespace.deepspeed_config, by_dict.deepspeed_config) == (str(file), config)
    return found


def work() -> dict[str, Any]:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo suffices; this op takes a minute to compile
    deepspeed.init_distributed(dist_backend="gloo")
    found: dict[str, Any] = {}
    for name in sys.argv[1:]:
        if name in ("announced", "forms"):
            found[name] = announced() if name == "announced" else forms()
            continue
        alone = plain(ALIKE.get(name, name))
        LINES.clear()
        found[name] = (run(name, True), alone, list(LINES))
    return found


if __name__ == "__main__":
    main(work)
