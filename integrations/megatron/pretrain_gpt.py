"""Pretrain a small GPT with megatron-core alone, on CPU or CUDA, with actoffload's flags.

    python -m actoffload.integrations.megatron.pretrain_gpt --actoffload-target nvme --actoffload-min-bytes 16KiB
    torchrun --nproc-per-node 2 -m actoffload.integrations.megatron.pretrain_gpt --pp 2 --actoffload-target nvme

The text is PyTorch's own source, a token a byte. The program prints each step's loss, and a line at its end.
Comments mark the two lines that switch actoffload on.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import get_num_microbatches, init_num_microbatches_calculator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from . import add_actoffload_args, wrap_forward_step


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 4, "width": 128, "heads": 4, "seq": 256, "micro-batch": 2, "microbatches": 4, "steps": 5}
    for flag, default in {**sizes, "tp": 1, "pp": 1, "vpp": 1, "ep": 1}.items():
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--recompute", choices=("selective", "full"), help="Megatron's recompute granularity")
    add_actoffload_args(parser)  # <- the first line: the flags
    return parser.parse_args(arguments)


def make_config(args: argparse.Namespace, **more: Any) -> TransformerConfig:
    """Megatron's configuration of the model; ``more`` overrides the command line."""
    full = {"recompute_method": "uniform", "recompute_num_layers": 1} if args.recompute == "full" else {}
    settings: dict[str, Any] = dict(
        num_layers=args.layers,
        hidden_size=args.width,
        num_attention_heads=args.heads,
        use_cpu_initialization=not torch.cuda.is_available(),
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp if args.vpp > 1 else None,
        expert_model_parallel_size=args.ep,
        sequence_parallel=args.sequence_parallel,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        recompute_granularity=args.recompute,
    )
    return TransformerConfig(**{**settings, **full, **more})


def make_chunks(
    config: TransformerConfig, seq: int, *, distributed_optimizer: bool = False
) -> list[DistributedDataParallel]:
    """This process's part of the model: one chunk, or several if the pipeline is interleaved."""
    layer = get_gpt_layer_local_spec(config.num_moe_experts)
    layer.submodules.self_attention.submodules.core_attention = CausalAttention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    rank, size = parallel_state.get_pipeline_model_parallel_rank(), config.pipeline_model_parallel_size
    count = config.virtual_pipeline_model_parallel_size
    layers = config.num_layers // (size * (count or 1))
    chunks = [
        GPTModel(
            config,
            TransformerBlockSubmodules([layer] * layers, Norm),
            vocab_size=256,
            max_sequence_length=seq,
            pre_process=rank == 0 and chunk == 0,
            post_process=rank == size - 1 and chunk == (count or 1) - 1,
            vp_stage=chunk if count else None,
        )
        for chunk in range(count or 1)
    ]
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [DistributedDataParallel(config, ddp, chunk.to(device)) for chunk in chunks]


def batches(seq: int, micro_batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and the tokens after them, each (micro batch, sequence), from random places of the text; no end."""
    text = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    while True:
        places = torch.randint(len(text) - seq - 1, (micro_batch,), generator=generator)
        rows = torch.stack([text[place : place + seq + 1] for place in places.tolist()]).long().to(device)
        yield rows[:, :-1], rows[:, 1:]


def mean_loss(losses: Tensor) -> tuple[Tensor, Tensor]:
    """Megatron's loss function: the loss that backward begins at, and the reported one (nats for a byte)."""
    loss = losses.float().mean()
    return loss, loss.detach().clone()


def forward_step(data: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
    """Megatron's forward step: one micro-batch through one model chunk."""
    tokens, labels = next(data)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=labels), mean_loss


def join() -> None:
    """Join the process group; alone if no launcher started several processes."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    alone: dict[str, Any] = {}
    if "RANK" not in os.environ:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if cuda else "gloo", **alone)


def set_up(args: argparse.Namespace) -> None:
    """Megatron's process groups, number of micro-batches and random numbers."""
    chunks = args.vpp if args.vpp > 1 else None
    parallel_state.initialize_model_parallel(args.tp, args.pp, chunks, expert_model_parallel_size=args.ep)
    replicas = parallel_state.get_data_parallel_world_size()
    samples = args.microbatches * args.micro_batch * replicas
    init_num_microbatches_calculator(dist.get_rank(), None, samples, args.micro_batch, replicas)
    torch.manual_seed(1234)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def train(args: argparse.Namespace) -> None:
    """All steps."""
    config = make_config(args)
    chunks = make_chunks(config, args.seq)
    config.finalize_model_grads_func = finalize_model_grads
    parameters: list[Any] = [parameter for chunk in chunks for parameter in chunk.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr)
    seed = parallel_state.get_data_parallel_rank()
    data = [batches(args.seq, args.micro_batch, seed) for _ in chunks]
    step = wrap_forward_step(forward_step, args)  # <- the second line
    run = get_forward_backward_func()
    for number in range(args.steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        losses = run(
            forward_step_func=step,
            data_iterator=data if len(chunks) > 1 else data[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=get_num_microbatches(),
            seq_length=args.seq,
            micro_batch_size=args.micro_batch,
        )
        # Megatron's DDP accumulates into buffers of its own; a plain optimizer reads `grad`.
        for parameter in parameters:
            parameter.grad = parameter.main_grad
        optimizer.step()
        if losses and parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_data_parallel_rank() == 0:
            print(f"step {number}: loss {torch.stack(losses).mean().item():.4f}", flush=True)


def main() -> None:
    """Run."""
    args = parse()
    with contextlib.nullcontext() if torch.cuda.is_available() else cpu_stands_in_for_cuda():
        join()
        set_up(args)
        train(args)
    dist.destroy_process_group()


# -- stand-ins for CUDA, and for packages that need it -----------------------------------------------------------------


class CausalAttention(MegatronModule):
    """Causal attention by PyTorch's own kernel, which runs on every device (Megatron's own needs CUDA)."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config=config)
        self.dropout: float = config.attention_dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Query, key and value: (sequence, batch, heads, head width). Returns (sequence, batch, heads × head width)."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return out.permute(2, 0, 1, 3).flatten(2)


class Norm(nn.LayerNorm):
    """Layer norm for sequence parallelism without CUDA-only packages: its gradients are summed over the ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _CpuForCuda(TorchFunctionMode):
    """Makes tensors on the CPU that a call would make on ``"cuda"``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


@contextlib.contextmanager
def cpu_stands_in_for_cuda() -> Iterator[None]:
    """Let megatron-core run without CUDA: it names the device "cuda" in its schedules and its buffers.

    Inside, ``device="cuda"`` means the CPU, and functions that would fail without a device return the CPU's values. The
    state of the random numbers is the CPU's, which Megatron's recomputation saves and restores anyway.
    """
    cuda: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "current_stream": lambda device=None: None,
        "synchronize": lambda device=None: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
    }
    numbers: dict[str, Any] = {
        "_get_cuda_rng_state": lambda **_: torch.get_rng_state(),
        "_set_cuda_rng_state": lambda state, **_: None,
    }
    random = "megatron.core.tensor_parallel.random"
    with mock.patch.multiple("torch.cuda", **cuda), mock.patch.multiple(random, **numbers), _CpuForCuda():
        yield


if __name__ == "__main__":
    main()
