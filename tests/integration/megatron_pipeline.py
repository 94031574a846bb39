"""Megatron's real schedules in one process: every rank of a pipeline alone, with neighbours that send zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Event = tuple[tuple[int, int], str]
"""((chunk, micro-batch), "forward" or "backward")."""


@dataclass(frozen=True)
class Shape:
    """A pipeline as one of its ranks sees it."""

    rank: int
    size: int
    microbatches: int
    chunks: int = 1
    group: int | None = None


def shapes() -> Iterator[Shape]:
    """Pipelines that Megatron accepts, each rank of each."""
    for microbatches in (1, 4):
        yield Shape(0, 1, microbatches)
    for size in (2, 3, 4):
        for rank in range(size):
            for microbatches in (1, 2, 6):
                yield Shape(rank, size, microbatches)
            for chunks in (2, 3):
                yield Shape(rank, size, size, chunks)
                yield Shape(rank, size, 3 * size, chunks)
                yield Shape(rank, size, 2 * size + 1, chunks, size + 1)


@dataclass(frozen=True)
class Group:
    """As much of a process group as a schedule asks for."""

    place: int
    places: int

    def rank(self) -> int:
        """This process's place."""
        return self.place

    def size(self) -> int:
        """How many there are."""
        return self.places


class Neighbours:
    """Megatron's communicator, whose other ends answer with zeros at once."""

    def __init__(self, shape: Shape, config: Any) -> None:
        self.config = config
        self.pp_group = Group(shape.rank, shape.size)
        self.virtual_pipeline_model_parallel_size = shape.chunks if shape.chunks > 1 else None

    def _received(self, expected: bool, listed: bool = False) -> Any:
        tensor = torch.zeros(2, requires_grad=True) if expected else None
        return [tensor] if listed else tensor

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """An input; a list of them without interleaving."""
        return self._received(not is_first_stage, listed=isinstance(tensor_shapes[0], tuple))

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """An output's gradient; a list of them without interleaving."""
        return self._received(not is_last_stage, listed=isinstance(tensor_shapes[0], tuple))

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        """Nobody reads it."""

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """Nobody reads it."""

    def send_forward_recv_backward(self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """A list of gradients."""
        return self._received(not is_last_stage, listed=True)

    def send_backward_recv_forward(self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """A list of inputs."""
        return self._received(not is_first_stage, listed=True)

    def send_forward_recv_forward(self, output_tensor: Any, *, recv_prev: bool, **_: Any) -> Any:
        """An input."""
        return self._received(recv_prev)

    def send_backward_recv_backward(self, input_tensor_grad: Any, *, recv_next: bool, **_: Any) -> Any:
        """A gradient."""
        return self._received(recv_next)

    def send_forward_backward_recv_forward_backward(
        self, output_tensor: Any, input_tensor_grad: Any, *, recv_prev: bool, recv_next: bool, **_: Any
    ) -> Any:
        """An input and a gradient."""
        return self._received(recv_prev), self._received(recv_next)


class Chunk(nn.Module):
    """A model chunk without a decoder, so that nothing says which micro-batch it is called for."""

    def __init__(self, config: Any, stage: int | None) -> None:
        super().__init__()
        self.config = config
        self.vp_stage = stage
        self.model_type = None
        self.weight = nn.Parameter(torch.ones(2))
        self.input: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """What Megatron gives to a stage."""
        self.input = tensors[0]

    def forward(self) -> Tensor:
        """Two numbers."""
        base = self.weight if self.input is None else self.input * self.weight
        return base.exp()


class Noted(torch.autograd.Function):
    """Notes when its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return gradient, None


class Recorder:
    """A forward step that notes each forward and backward, with its own count of micro-batches."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._counts: dict[int, int] = {}

    def forward_step(self, data_iterator: Any, model: Chunk) -> tuple[Tensor, Any]:
        """Megatron's forward step."""
        chunk = model.vp_stage or 0
        key = (chunk, self._counts.get(chunk, 0))
        self._counts[chunk] = key[1] + 1
        self.events.append((key, "forward"))
        output = Noted.apply(model(), lambda: self.events.append((key, "backward")))
        return output, lambda losses: (losses.sum(), losses.detach().sum())


def run_schedule(shape: Shape, forward_step: Callable[..., Any], *, steps: int = 1) -> None:
    """Megatron's own schedule for one rank. Needs `cpu_stands_in_for_cuda` where there is no CUDA."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    several = shape.chunks > 1
    config = TransformerConfig(
        num_layers=shape.size * shape.chunks,
        hidden_size=2,
        num_attention_heads=1,
        use_cpu_initialization=True,
        pipeline_model_parallel_size=shape.size,
        virtual_pipeline_model_parallel_size=shape.chunks if several else None,
        microbatch_group_size_per_vp_stage=shape.group,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
    )
    chunks = [Chunk(config, index if several else None) for index in range(shape.chunks)]
    alone = Group(0, 1)
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = groups.embd = groups.pos_embd = groups.dp_cp = alone
    groups.pp = Group(shape.rank, shape.size)
    for _ in range(steps):
        get_forward_backward_func(shape.size, shape.chunks if several else None)(
            forward_step_func=forward_step,
            data_iterator=[None] * shape.chunks if several else None,
            model=chunks if several else chunks[0],
            num_microbatches=shape.microbatches,
            seq_length=1,
            micro_batch_size=1,
            p2p_communicator=Neighbours(shape, config),
            pg_collection=groups,
        )
