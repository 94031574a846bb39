"""The settings that the rows of ``distributed_rows`` train: DDP, ``fully_shard``, FSDP 1, tensor parallel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from actoffload import Plan
from tests.blocks import MLP
from tests.integration.workers.distributed_runs import Setting

WIDTH = 64
ROWS_OF_BATCH = 512
DEPTH = 4
CHECKPOINTS = {"device_budget": "256KiB"}
"""Options for models that save only the inputs of their blocks."""


class Net(nn.Module):
    """Blocks and a head; `recompute` checkpoints each block, `unused` adds a layer that only odd steps use."""

    def __init__(self, *, recompute: bool = False, unused: bool = False, block: type[MLP] = MLP) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(block(WIDTH) for _ in range(DEPTH)))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH) if unused else None
        self.recompute = recompute
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
        else:
            x = self.blocks(x)
        self.calls += 1
        if self.extra is not None and self.calls % 2:
            x = x + torch.tanh(self.extra(x))
        found: Tensor = self.head(x)
        return found


def batch(step: int, rank: int, microbatch: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1 + 1000 * step + 10 * microbatch + rank)
    return torch.randn(ROWS_OF_BATCH, WIDTH, generator=generator)


def data_parallel_step(model: nn.Module) -> Callable[[int], list[Tensor]]:
    def step(index: int) -> list[Tensor]:
        loss = model(batch(index, dist.get_rank())).float().square().mean()
        loss.backward()
        return [loss]

    return step


# -- DDP --------------------------------------------------------------------------------------------------------------


def ddp(*, recompute: bool = False, **options: Any) -> Setting:
    net = Net(recompute=recompute, unused="find_unused_parameters" in options)
    model = DistributedDataParallel(net, **options)
    return Setting(model, data_parallel_step(model))


def ddp_accumulate() -> Setting:
    """Three micro-batches; gradients are reduced with the last."""
    model = DistributedDataParallel(Net(), gradient_as_bucket_view=True)

    def step(index: int) -> list[Tensor]:
        losses = []
        for microbatch in range(3):
            with model.no_sync() if microbatch < 2 else contextlib.nullcontext():
                losses.append(model(batch(index, dist.get_rank(), microbatch)).square().mean())
                losses[-1].backward()
        return losses

    return Setting(model, step)


def ddp_static() -> Setting:
    model = DistributedDataParallel(Net(recompute=True), static_graph=True)
    return Setting(model, data_parallel_step(model), options=CHECKPOINTS)


# -- fully_shard ------------------------------------------------------------------------------------------------------


def shard(model: Net, **options: Any) -> Net:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def fsdp(*, recompute: bool = False, **options: Any) -> Setting:
    model = shard(Net(recompute=recompute), **options)
    return Setting(model, data_parallel_step(model), options=CHECKPOINTS if recompute else {})


def fsdp_mixed() -> Setting:
    """Parameters gathered in bfloat16, gradients reduced in float32."""
    return fsdp(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def fsdp_accumulate() -> Setting:
    """Three micro-batches, reduced with the last, gathered once."""
    model = shard(Net())
    assert isinstance(model, FSDPModule)

    def step(index: int) -> list[Tensor]:
        losses = []
        for microbatch in range(3):
            model.set_requires_gradient_sync(microbatch == 2)
            model.set_reshard_after_backward(microbatch == 2)
            losses.append(model(batch(index, dist.get_rank(), microbatch)).square().mean())
            losses[-1].backward()
        return losses

    return Setting(model, step)


def fsdp_blocks() -> Setting:
    """As `fsdp`, with a context around each block."""
    setting = fsdp(reshard_after_forward=True)
    assert isinstance(setting.model, Net)
    setting.attached = list(setting.model.blocks)
    return setting


def fsdp_prefetch() -> Setting:
    """Each block gathers the next two while it runs, in forward and in backward."""
    model = shard(Net(), reshard_after_forward=True)
    blocks: list[Any] = list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - 2) : index][::-1])

    def step(index: int) -> list[Tensor]:
        blocks[0].unshard(async_op=True)
        return data_parallel_step(model)(index)

    return Setting(model, step)


def fsdp_tensor() -> Setting:
    """Tensor parallel (of one rank) inside ``fully_shard``, which then gathers DTensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    model = Net(block=FrozenFirst)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard(model, mesh=mesh["dp"], reshard_after_forward=True)
    return Setting(model, data_parallel_step(model))


class Detached(nn.Linear):
    """Saves its weight detached, so that autograd does not know it for a view of a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.detach(), self.bias)


class FrozenFirst(MLP):
    """A block whose first saved tensor is a detached weight."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.up = Detached(width, 2 * width)


def fsdp_detached() -> Setting:
    """Detached weights, which only their storage identifies as gathered parameters."""
    model = Net(block=FrozenFirst)
    model.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), block) for block in model.blocks))
    shard(model, reshard_after_forward=True)
    return Setting(model, data_parallel_step(model))


def fsdp_compiled() -> Setting:
    """Each block compiled, then sharded, as torchtitan does."""
    model = Net()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    shard(model, reshard_after_forward=True)
    return Setting(model, data_parallel_step(model))


def fsdp_one(**options: Any) -> Setting:
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = Fsdp1(Net(), auto_wrap_policy=ModuleWrapPolicy({MLP}), device_id=torch.device("cpu"), **options)
    return Setting(model, data_parallel_step(model))


def once(setting: Setting) -> Setting:
    """Two of the checkpointed blocks run once, the other two again."""
    setting.options = {"policy": Plan((), once=(0, 2), regions=DEPTH)}
    return setting


def fsdp_one_checkpointed() -> Setting:
    """Checkpoints inside FSDP's units, as Accelerate and Lightning set them up."""
    setting = fsdp_one(use_orig_params=True)
    apply_activation_checkpointing(setting.model, check_fn=lambda module: isinstance(module, MLP))
    return setting


# -- tensor parallel --------------------------------------------------------------------------------------------------


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _same_step(model: nn.Module) -> Callable[[int], list[Tensor]]:
    def step(index: int) -> list[Tensor]:
        found = model(batch(index, 0))
        loss = found.square().mean()
        loss.backward()
        return [loss]

    return step


def tensor_parallel() -> Setting:
    """Columns, then rows."""
    model = Net()
    for block in model.blocks:
        parallelize_module(block, _mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return Setting(model, _same_step(model))


def sequence_parallel() -> Setting:
    """As `tensor_parallel`, with norms, dropout and residuals on sharded rows: most saved tensors are DTensors."""
    from torch.distributed.tensor import Replicate, Shard

    model = Net()
    mesh = _mesh()
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
                "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
            },
        )
    parallelize_module(
        model,
        mesh,
        {
            "blocks": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)),
            "head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        },
    )
    return Setting(model, _same_step(model))


# -- context parallel -------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """One attention layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        result: Tensor = x + self.out(found)
        return result


def sequence_cut() -> Setting:
    """The sequence is sharded in two; attention gathers. The CPU has only the math kernel for it, without a mask."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = _mesh()
    model = nn.Sequential(*(Attention() for _ in range(3)))

    def step(index: int) -> list[Tensor]:
        data = batch(index, 0).view(4, -1, WIDTH)
        with sdpa_kernel(SDPBackend.MATH), context_parallel(mesh, buffers=[data], buffer_seq_dims=[1]):
            loss = model(data).square().mean()
            loss.backward()
        return [loss]

    return Setting(model, step)


ROWS: dict[str, Callable[[], Setting]] = {
    "ddp": ddp,
    "ddp_unused": lambda: ddp(find_unused_parameters=True),
    "ddp_accumulate": ddp_accumulate,
    "ddp_static": ddp_static,
    "fsdp": lambda: fsdp(reshard_after_forward=True),
    "fsdp_keep": lambda: fsdp(reshard_after_forward=False),
    "fsdp_mixed": fsdp_mixed,
    "fsdp_cpu_offload": lambda: fsdp(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp_accumulate": fsdp_accumulate,
    "fsdp_checkpoint": lambda: fsdp(recompute=True, reshard_after_forward=True),
    "fsdp_blocks": fsdp_blocks,
    "fsdp_prefetch": fsdp_prefetch,
    "fsdp_tensor": fsdp_tensor,
    "fsdp_detached": fsdp_detached,
    "fsdp_compiled": fsdp_compiled,
    "fsdp1": fsdp_one,
    "ddp_once": lambda: once(ddp(recompute=True)),
    "fsdp_once": lambda: once(fsdp(recompute=True, reshard_after_forward=True)),
    "fsdp1_once": lambda: once(fsdp_one_checkpointed()),
    "tensor": tensor_parallel,
    "sequence": sequence_parallel,
    "context_parallel": sequence_cut,
}
