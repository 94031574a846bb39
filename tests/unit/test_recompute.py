"""The option ``recompute`` where a block is not run as it is: in transforms, with other tensors, compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import functional_call, grad, jvp, vmap

import actoffload
from tests.harness import assert_same_bits, assert_same_gradients, batch, train_step


class Block(nn.Module):
    """A block with a buffer that it computes with, and one parameter in two modules."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.tied = nn.Linear(64, 64)
        self.tied.weight = self.linear.weight
        self.register_buffer("scale", torch.rand(64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.tied(self.linear(x))) * self.scale
        return y


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(3)])


def _attach(model: nn.Module, path: Path, **options: Any) -> actoffload.Attachment:
    fields = {"target": "nvme", "path": str(path), "min_bytes": 0, "policy": "all", "recompute": True}
    return actoffload.attach(model, **{**fields, "announce": "none", **options})


@pytest.mark.parametrize("policy", ["all", "auto"])
def test_a_block_runs_again_with_the_tensors_that_functional_call_gave_it(tmp_path: Path, policy: str) -> None:
    """In backward the module has its own tensors back: to compute with these would be a wrong gradient, unnoticed."""

    def train(model: nn.Module) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for step in range(4):
            given = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
            others = {name: 1.5 * p + 0.01 for name, p in given.items()}
            others |= {name: b + step for name, b in model.named_buffers()}
            functional_call(model, others, (batch(),)).square().sum().backward()
            found += [p.grad for p in given.values()]
        return found

    expected = train(_model())
    model = _model()
    attachment = _attach(model, tmp_path, policy=policy)
    assert_same_bits(train(model), expected)
    assert attachment.offloader.statistics().regions == 3


def _gradient(model: nn.Module) -> Tensor:
    found: Tensor = grad(lambda x: model(x).square().sum())(batch())
    return found


def _per_sample(model: nn.Module) -> Tensor:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = functional_call(model, parameters, (x,)).square().sum()
        return y

    found: dict[str, Tensor] = vmap(grad(loss), (None, 0))(parameters, batch(4))
    return found["0.linear.weight"]


def _batched(model: nn.Module) -> Tensor:
    loss: Tensor = vmap(model)(batch()).square().sum()
    return torch.autograd.grad(loss, list(model.parameters()))[0]


def _forward_mode(model: nn.Module) -> Tensor:
    tangent: Tensor = jvp(model, (batch(),), (torch.ones_like(batch()),))[1]
    return torch.autograd.grad(tangent.sum(), list(model.parameters()))[0]


def _without_hooks(model: nn.Module) -> Tensor:
    with disable_saved_tensors_hooks("none here"):
        loss = model(batch()).square().sum()
    return torch.autograd.grad(loss, list(model.parameters()))[0]


@pytest.mark.parametrize("transformed", [_gradient, _per_sample, _batched, _forward_mode, _without_hooks])
def test_a_transform_runs_blocks_as_they_are(tmp_path: Path, transformed: Callable[[nn.Module], Tensor]) -> None:
    model = _model()
    expected = transformed(model), train_step(model, batch())
    attachment = _attach(model, tmp_path)
    assert_same_bits([transformed(model)], [expected[0]])
    assert attachment.offloader.statistics().regions == 0
    assert_same_gradients(train_step(model, batch()), expected[1])
    assert attachment.offloader.statistics().regions == 3


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda block: torch.jit.trace(block, batch())])
def test_a_block_of_torchscript_runs_again_to_its_end(tmp_path: Path, compiled: Any) -> None:
    """PyTorch ends a second run by an exception, which TorchScript would report as an error of its own."""
    blocks = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2))
    model = nn.Sequential(*map(compiled, blocks))
    for _ in range(4):  # its first runs are slower, and round in another way
        expected = train_step(model, batch())
    attachment = _attach(model, tmp_path, recompute=["0", "1"])
    assert_same_gradients(train_step(model, batch()), expected)
    assert attachment.offloader.statistics().regions == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("strict", [True, False, None])
def test_an_exported_or_traced_model_has_no_checkpoints(tmp_path: Path, strict: bool | None) -> None:
    model, x = _model(), batch()
    expected = model(x)
    _attach(model, tmp_path)
    graph: Any = (
        torch.jit.trace(model, x) if strict is None else torch.export.export(model, (x,), strict=strict).module()
    )
    assert_same_bits([graph(x)], [expected])
