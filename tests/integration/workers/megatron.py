"""Rows of the Megatron adapter: each trains twice from one seed under Megatron's own schedule, with and without it."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from actoffload.integrations.megatron import wrap_forward_step
from actoffload.integrations.megatron.pretrain_gpt import (
    batches,
    cpu_stands_in_for_cuda,
    forward_step,
    make_chunks,
    make_config,
    parse,
    set_up,
)
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.integration.evidence import Run, counting_owners
from tests.integration.megatron_found import Found, Hint
from tests.integration.processes import main, scratch

SIZES = "--layers 2 --width 64 --heads 4 --seq 64 --micro-batch 2 --lr 0.01"
OFFLOAD = "--actoffload-target nvme --actoffload-policy greedy --actoffload-min-bytes 1024"


@dataclass
class Row:
    """One configuration.

    Attributes:
        flags: flags of the example's command line.
        config: more fields of Megatron's configuration.
        offload: more flags of actoffload's.
        calculator: whether Megatron's calculator of micro-batches is set up.
        distributed_optimizer: train with Megatron's distributed optimizer.
        half: wrap the model in Megatron's ``Float16Module``.
        evaluate: a forward-only pass before the second step.
        steps: training steps.
        forward_step: the user's forward step.
    """

    flags: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    offload: str = "--actoffload-device-budget 384KiB"
    calculator: bool = True
    distributed_optimizer: bool = False
    half: bool = False
    evaluate: bool = False
    steps: int = 2
    forward_step: Callable[..., Any] = forward_step


def three_arguments(data: Any, model: Any, checkpoint_activations_microbatch: bool) -> tuple[Tensor, Any]:
    """A forward step with the schedule's third argument, which switches recomputation on."""
    model.config.recompute_granularity = "full" if checkpoint_activations_microbatch else None
    result: tuple[Tensor, Any] = forward_step(data, model)
    return result


DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
# Without biases: with one, recomputing "mlp" returns it from an autograd function, and Megatron's backward recurses.
DISCARD = {"recompute_modules": ["core_attn", "layernorm", "mlp"], "add_bias_linear": False}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "moe_shared_expert_intermediate_size": 64,
    "add_bias_linear": False,  # shared experts have no biases
    "moe_shared_expert_overlap": True,  # the wait for the all-to-all follows them
}
TIGHT = "--actoffload-device-budget 160KiB"  # full recompute saves only layer inputs
ROWS = {
    "no pipeline": Row("--microbatches 2", DROPOUT, evaluate=True),
    "1f1b": Row("--layers 4 --pp 2 --microbatches 4", DROPOUT, evaluate=True),
    "1f1b, no calculator": Row(
        "--layers 4 --pp 2 --microbatches 3", {"deallocate_pipeline_outputs": False}, calculator=False
    ),
    "1f1b, bf16": Row(
        "--layers 4 --pp 2 --microbatches 3", {"bf16": True, "pipeline_dtype": torch.bfloat16}, half=True
    ),
    "interleaved": Row("--layers 4 --pp 2 --vpp 2 --microbatches 4", DROPOUT, evaluate=True),
    "interleaved, groups": Row("--layers 4 --pp 2 --vpp 2 --microbatches 5", {"microbatch_group_size_per_vp_stage": 3}),
    "sequence parallel": Row("--tp 2 --microbatches 2 --sequence-parallel", DROPOUT),
    "selective recompute": Row("--microbatches 2 --recompute selective", DROPOUT),
    "selective recompute, discarded outputs": Row(
        "--microbatches 2 --recompute selective --seq 128 --width 128",
        {**DROPOUT, **DISCARD},
        "--actoffload-device-budget 1MiB",
    ),
    "full recompute": Row("--layers 8 --pp 2 --microbatches 4 --recompute full", DROPOUT, TIGHT),
    "full recompute, distributed": Row(
        "--layers 4 --tp 2 --microbatches 2 --recompute full",
        {**DROPOUT, "distribute_saved_activations": True},
        "--actoffload-device-budget 128KiB",
    ),
    "partial checkpoints": Row(
        "--layers 4 --pp 2 --microbatches 4 --recompute full",
        {"num_microbatches_with_partial_activation_checkpoints": 1},
        forward_step=three_arguments,
    ),
    "distributed optimizer": Row("--microbatches 2", DROPOUT, distributed_optimizer=True),
    "experts": Row("--microbatches 2 --ep 2", EXPERTS, "--actoffload-device-budget 512KiB"),
}


class CudaTypes(TorchFunctionMode):
    """Parameters report the type "torch.cuda.FloatTensor", which Megatron's distributed optimizer requires."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")
        return found


@contextlib.contextmanager
def without_fp8() -> Iterator[None]:
    """Three names of TransformerEngine that Megatron's `CheckpointWithoutOutput` imports even without FP8."""
    manager = SimpleNamespace(is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None)
    stand_ins: dict[str, Any] = {
        "FP8GlobalStateManager": manager,
        "activation_recompute_forward": lambda **_: contextlib.nullcontext(),
        "fp8_autocast": lambda **_: contextlib.nullcontext(),
    }
    with mock.patch.multiple("megatron.core.tensor_parallel.random", create=True, **stand_ins):
        yield


class NoStream:
    """Stands for a stream or an event of CUDA, for the all-to-all of Megatron's experts."""

    def wait_stream(self, stream: Any) -> None:
        """Wait for nothing."""

    def record_event(self) -> NoStream:
        return self

    def synchronize(self) -> None:
        """Wait for nothing."""


@contextlib.contextmanager
def without_streams() -> Iterator[None]:
    """Stand-ins for Megatron's experts without CUDA and TransformerEngine: streams, numbers, and a name."""
    cuda: dict[str, Any] = {
        "Stream": NoStream,
        "current_stream": NoStream,
        "stream": lambda stream: contextlib.nullcontext(),
    }
    moved: dict[str, Any] = {"maybe_move_tensor_to_cpu": as_moved}
    gemm: dict[str, Any] = {"te_general_gemm": None}
    experts = "megatron.core.transformer.moe"
    with (
        mock.patch.multiple("torch.cuda", **cuda),
        mock.patch.multiple(f"{experts}.token_dispatcher", **moved),
        mock.patch.multiple(f"{experts}.moe_utils", create=True, **gemm),
    ):
        yield


def as_moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """The tensor itself, as a move to the CPU returns it there."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def plain_adam(parameters: list[Any]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(parameters, lr=0.01)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = parameter.main_grad.to(parameter.dtype)
        optimizer.step()

    return step


def distributed_adam(chunks: list[Any]) -> Callable[[], None]:
    config = OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=True, clip_grad=1.0)
    with CudaTypes():
        optimizer = get_megatron_optimizer(config, chunks)

    def step() -> None:
        with CudaTypes():
            successful, _, _ = optimizer.step()
        assert successful

    return step


def build(row: Row, args: Any) -> tuple[Any, list[Any]]:
    config = make_config(args, **row.config)
    config.finalize_model_grads_func = finalize_model_grads
    chunks = make_chunks(config, args.seq, distributed_optimizer=row.distributed_optimizer)
    if row.half:
        ddp = DistributedDataParallelConfig()
        chunks = [DistributedDataParallel(config, ddp, Float16Module(config, chunk.module)) for chunk in chunks]
    return config, chunks


def train(row: Row, arguments: list[str], hints: list[Hint]) -> tuple[Run, Any, int]:
    """All steps of one run; returns also its forward step, and the number of tensors that evaluation packed."""
    args = parse(arguments)
    set_up(args)
    if not row.calculator:
        destroy_num_microbatches_calculator()
    try:
        _, chunks = build(row, args)
        parameters: list[Any] = [parameter for chunk in chunks for parameter in chunk.parameters()]
        step = wrap_forward_step(row.forward_step, args)
        watch_hints(step, hints)
        optimize = distributed_adam(chunks) if row.distributed_optimizer else plain_adam(parameters)
        found = Run()
        packed = 0
        data = [batches(args.seq, args.micro_batch, parallel_state.get_data_parallel_rank()) for _ in chunks]
        with counting_owners(lambda: [t for p in parameters for t in (p, p.main_grad)]) as meter:
            for number in range(row.steps):
                if row.evaluate and number == 1:
                    packed += evaluate(args, step, data, chunks)
                for chunk in chunks:
                    chunk.zero_grad_buffer()
                found.losses += run(args, step, data, chunks)
                remember(found, f"gradients {number}", chunks, gradients=True)
                optimize()
        if not found.losses:  # a stage that is not the last
            found.losses.append(torch.zeros(()))
        remember(found, "weights", chunks, gradients=False)
        found.moved_parameter_bytes = meter.parameter_bytes
        return found, step, packed
    finally:
        destroy_num_microbatches_calculator()
        parallel_state.destroy_model_parallel()


def watch_hints(step: Any, hints: list[Hint]) -> None:
    if step.offloader is None:
        return
    stage = step.offloader.stage

    def noting(microbatch: Any, direction: str, *, next: Any = None) -> None:
        hints.append((microbatch, direction, next))
        stage(microbatch, direction, next=next)

    step.offloader.stage = noting


def run(args: Any, step: Any, data: list[Any], chunks: list[Any], *, forward_only: bool = False) -> list[Tensor]:
    several = len(chunks) > 1
    losses: list[Tensor] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=data if several else data[0],
        model=chunks if several else chunks[0],
        num_microbatches=args.microbatches,
        seq_length=args.seq,
        micro_batch_size=args.micro_batch,
        forward_only=forward_only,
    )
    return losses


def evaluate(args: Any, step: Any, data: list[Any], chunks: list[Any]) -> int:
    """A forward-only pass; returns the number of tensors that it packed."""
    before = step.offloader.statistics().packed_tensors if step.offloader is not None else 0
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        run(args, step, data, chunks, forward_only=True)
    for chunk in chunks:
        chunk.train()
    return step.offloader.statistics().packed_tensors - before if step.offloader is not None else 0


def remember(found: Run, prefix: str, chunks: list[Any], *, gradients: bool) -> None:
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            tensor = parameter.main_grad if gradients else parameter
            found.tensors[f"{prefix}: {index}.{name}"] = tensor.detach().clone()


def compare(name: str, row: Row) -> Found:
    directory = scratch() / name.replace(" ", "_").replace(",", "")
    directory.mkdir(exist_ok=True)
    arguments = [*SIZES.split(), *row.flags.split()]
    offload = [*OFFLOAD.split(), *row.offload.split(), "--actoffload-path", str(directory)]
    plain, _, _ = train(row, arguments, [])
    hints: list[Hint] = []
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        offloaded, step, packed = train(row, [*arguments, *offload], hints)
    offloaded.statistics = step.offloader.statistics()
    step.offloader.close()
    return Found(plain, offloaded, hints, printed.getvalue(), packed, dict(offloaded.statistics.kept_bytes))


NAMED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("", {}, ["layer_input", "attn_norm", "qkv_linear", "core_attn", "mlp_norm", "mlp_act", "core_attn attn_proj"]),
    ("--recompute full", {}, ["layer_input"]),
    ("--ep 2", EXPERTS, ["expert_fc1", "moe_act", "expert_fc1 moe_act"]),
]
"""Flags, more fields of Megatron's configuration, and names for ``--actoffload-modules``."""


def entries(flags: str, config: dict[str, Any], choices: list[str]) -> Iterator[tuple[tuple[str, str], list[Any]]]:
    """For each choice of names: for each storage that one forward saved, its module, the decision, and the reason."""
    arguments = [*SIZES.split(), "--microbatches", "1", *flags.split()]
    args = parse(arguments)
    set_up(args)
    try:
        _, chunks = build(Row(config=config), args)
        for names in choices:
            offload = [*OFFLOAD.split(), "--actoffload-modules", *names.split(), "--actoffload-path", str(scratch())]
            step = wrap_forward_step(forward_step, parse([*arguments, *offload]))
            run(args, step, [batches(args.seq, args.micro_batch, 0)], chunks)
            yield (names, flags), [(one.module or "", one.action, one.reason) for one in step.offloader.plan.entries]
            step.offloader.close()
    finally:
        destroy_num_microbatches_calculator()
        parallel_state.destroy_model_parallel()


def all_rows() -> dict[str, Any]:
    """The results of the rows in this rank, and the storages that names of modules choose."""
    found: dict[str, Any] = dict(each_row())
    with cpu_stands_in_for_cuda(), without_streams():
        found["named"] = dict(item for group in NAMED for item in entries(*group))
    return found


def each_row() -> Iterator[tuple[str, Found]]:
    """Run the rows in order, because ranks communicate in each."""
    with cpu_stands_in_for_cuda(), without_fp8(), without_streams():
        for name in sys.argv[1:]:
            yield name, compare(name, ROWS[name])
            dist.barrier()


EXAMPLE = "--layers 4 --width 64 --seq 64 --steps 2 --microbatches 2"
OFFLOADED_EXAMPLE = "--actoffload-target nvme --actoffload-min-bytes 4KiB --actoffload-path"


def run_example() -> None:
    """Run the example of `megatron_fused` in a fork of this process, which has imported Megatron, and wait for it.

    As a user's program it has no rank, and it ends with its exit functions.
    """
    if (child := os.fork()) != 0:
        assert os.waitpid(child, 0)[1] == 0, "the example failed"
        return
    status = 1
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(scratch() / f"log_{name}.txt", os.O_CREAT | os.O_WRONLY), number)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        folder = scratch() / "example"
        folder.mkdir()
        os.chdir(folder)
        sys.argv[1:] = [*EXAMPLE.split(), "--", *OFFLOADED_EXAMPLE.split(), str(folder)]
        runpy.run_module("tests.integration.workers.megatron_fused", run_name="__main__", alter_sys=True)
        atexit._run_exitfuncs()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    if os.environ["RANK"] == "0":
        run_example()
    main(all_rows)
