"""The option ``recompute`` where a block is not run as it is, and tracers of whole programs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch.autograd.graph import allow_mutation_on_saved_tensors, disable_saved_tensors_hooks
from torch.func import functional_call, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import actoffload
from actoffload.errors import ConfigError
from tests.harness import (
    MakeOffloader,
    assert_empty,
    assert_same_bits,
    assert_same_gradients,
    batch,
    same_bits,
    train_step,
)


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


# -- tracers of whole programs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(make_offloader: MakeOffloader, mode: Literal["real", "fake", "symbolic"]) -> None:
    offloader = make_offloader()

    def gradient(x: Tensor, context: Any) -> Any:
        with context:
            y = (x * 2).sin().exp().sum()
        return torch.autograd.grad(y, x)

    x = torch.linspace(-1, 1, 300).requires_grad_()
    traced = make_fx(lambda x: gradient(x, offloader), tracing_mode=mode)(torch.ones(300, requires_grad=True))
    assert same_bits(traced(x)[0], gradient(x, contextlib.nullcontext())[0])
    assert offloader.statistics().moved_bytes == 0
    assert_empty(offloader)


def test_aot_export(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()

    def forward(x: Tensor) -> tuple[Tensor]:
        with offloader:
            return ((x * 2).sin().exp(),)

    x = torch.linspace(-1, 1, 300).requires_grad_()
    traced: Any = aot_export_joint_simple(forward, (x,), trace_joint=True)
    assert "sin" in traced.code
    assert "cos" in traced.code


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_model_has_no_attachment_and_no_checkpoints(tmp_path: Path, strict: bool) -> None:
    model, x = _model(), batch()
    expected = model(x)
    attachment = _attach(model, tmp_path)
    exported = torch.export.export(model, (x,), strict=strict)
    assert_same_bits([exported.module()(x)], [expected])
    assert attachment.offloader.statistics().steps == 0
    assert_same_bits([model(x)], [expected])
    assert attachment.offloader.statistics().steps == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_torchscript_traces_a_model_without_checkpoints_and_refuses_to_script_it(tmp_path: Path) -> None:
    model, x = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2)]), batch()
    attachment = _attach(model, tmp_path)
    assert same_bits(torch.jit.trace(model, x)(x), model(x))
    with pytest.raises(ConfigError, match=r"detach\(\) it before torch.jit.script"):
        torch.jit.script(model)
    attachment.detach()
    assert same_bits(torch.jit.script(model)(x), model(x))


@pytest.mark.parametrize("outside", [True, False])
def test_allow_mutation_on_saved_tensors(make_offloader: MakeOffloader, outside: bool) -> None:
    """PyTorch's context has to see the saved tensors, so inside it nothing moves, and a warning says so."""

    def run(context: Any) -> Tensor:
        x = torch.linspace(-1, 1, 3000).requires_grad_()
        one, other = allow_mutation_on_saved_tensors(), context
        with one if outside else other, other if outside else one:
            changed = x * 1
            y = changed.sin()
            changed.mul_(2)
            (y * changed).sum().backward()
        assert x.grad is not None
        return x.grad

    offloader = make_offloader()
    printed = (
        pytest.warns(RuntimeWarning, match="allow_mutation_on_saved_tensors") if outside else contextlib.nullcontext()
    )
    with printed:
        found = run(offloader)
    assert same_bits(found, run(contextlib.nullcontext()))
    assert_empty(offloader)
