"""While PyTorch traces, exports or watches saved tensors itself, nothing moves and nothing breaks."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import actoffload
from actoffload.errors import ConfigError
from tests.harness import MakeOffloader, assert_empty, same_bits


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x)).sum()


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
def test_an_attached_model_is_exported_without_its_attachment(tmp_path: Any, strict: bool) -> None:
    model, x = Small(), torch.linspace(-1, 1, 64).reshape(4, 16)
    expected = model(x)
    attachment = actoffload.attach(model, target="nvme", path=str(tmp_path), min_bytes=0)
    exported = torch.export.export(model, (x,), strict=strict)
    assert same_bits(exported.module()(x), expected)
    assert attachment.offloader.statistics().steps == 0
    assert same_bits(model(x), expected)
    assert attachment.offloader.statistics().steps == 1
    attachment.detach()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_refuses_and_names_the_remedy(tmp_path: Any) -> None:
    model, x = Small(), torch.linspace(-1, 1, 64).reshape(4, 16)
    attachment = actoffload.attach(model, target="nvme", path=str(tmp_path), min_bytes=0)
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
