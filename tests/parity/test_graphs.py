"""Backward runs more than once, in parts, in other threads, or returns a saved tensor as a gradient."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.function import once_differentiable

from actoffload import Offloader, no_offload
from tests.harness import assert_same_bits, run_in_threads, same_bits

from .compare import gradients, settle
from .places import Maker
from .test_tensors import leaf, score


def network(x: Tensor) -> Tensor:
    y = (x * 1).sin()
    return (y @ y.t()).exp() * y.cumsum(0)[:, : y.shape[0]].tanh()


def test_gradcheck_and_gradgradcheck(make_offloader: Maker) -> None:
    x = leaf(4, 4, dtype=torch.float64)
    offloader = make_offloader(debug=True)

    def function(value: Tensor) -> Tensor:
        with offloader:
            out = network(value)
        offloader.synchronize()
        return out

    assert gradcheck(function, (x,))
    assert gradgradcheck(function, (x,))
    make_offloader.assert_moved(offloader)


class HandsOn(torch.autograd.Function):
    """Its backward returns the very tensor that it saved, and reads its saved tensors twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return (x * weight).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (first,) = ctx.saved_tensors
        (second,) = ctx.saved_tensors
        assert same_bits(first, second)
        return second, None


@pytest.mark.parametrize("count", [50, 50_000])
def test_a_saved_tensor_that_backward_returns_as_a_gradient(count: int, make_offloader: Maker) -> None:
    """Autograd adds other gradients into such a gradient in place, which the next backward must not see."""
    x, weight = leaf(count), leaf(count, seed=1)
    offloader = make_offloader(debug=True)

    def run(offloader: Offloader | None, settled: bool) -> list[Tensor]:
        with offloader or nullcontext():
            y = x * 1
            loss = score(y.sin()) + HandsOn.apply(y, weight.detach() * 1)  # the last one's backward runs first
        found: list[Tensor] = []
        for time in range(3):
            if settled:
                settle(offloader)
            (gradient,) = torch.autograd.grad(loss, y, retain_graph=time < 2)
            found.append(gradient.clone())
            found.append(gradient.mul_(5))  # the user may change a gradient, too
        return found

    reference = run(None, False)
    assert_same_bits(run(offloader, True), reference)
    make_offloader.assert_moved(offloader)
    assert_same_bits(run(offloader, False), reference)


def test_a_gradient_outlives_the_graph_and_the_offloader(make_offloader: Maker) -> None:
    offloader = make_offloader(debug=True)
    x, weight = leaf(5000), leaf(5000, seed=1)
    with offloader:
        loss = HandsOn.apply(x * 1, weight.detach() * 1)
    offloader.synchronize()
    loss.backward()
    del loss
    with offloader:  # uses the released memory and extents again
        other = (leaf(5000) * 1).sin().sum()
    offloader.synchronize()
    other.backward()
    offloader.close()
    assert x.grad is not None
    assert_same_bits([x.grad], [weight.detach() * 1])


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("count", [50, 50_000])
def test_changing_a_restored_tensor_raises(settled: bool, count: int, make_offloader: Maker) -> None:
    """The next backward may receive the same tensor, so autograd's check applies to it, too."""
    x = leaf(count)
    offloader = make_offloader(debug=True)

    def run(offloader: Offloader | None) -> None:
        with offloader or nullcontext():
            out = (x * 1).exp()
        if settled:
            settle(offloader)
        node: Any = out.grad_fn
        held = node._saved_result
        held.zero_()
        out.sum().backward()

    for context in (None, offloader):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(context)


def test_parts_of_a_graph(make_offloader: Maker) -> None:
    """Two backwards that share a trunk, each through its own branch, and one branch that never runs."""
    x = leaf(40, 40)

    def run(offloader: Offloader | None) -> list[Tensor]:
        with offloader or nullcontext():
            trunk = (x * 1).sin().exp()
            one, two, three = score(trunk.cos()), score(trunk.tanh().t()), score(trunk.sigmoid())
        found: list[Tensor] = []
        for branch, keep in ((two, True), (one, True), (two, True), (one, False)):
            settle(offloader)
            found.extend(torch.autograd.grad(branch, x, retain_graph=keep))
        return [*found, three.detach()]

    offloader = make_offloader(debug=True)
    reference = run(None)
    for _ in range(2):
        assert_same_bits(run(offloader), reference)
    make_offloader.assert_moved(offloader)


def test_threads(make_offloader: Maker) -> None:
    """Forward in several threads at once on one offloader, backward in yet another thread."""
    offloader = make_offloader(debug=True)
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 24)) for _ in range(4)]
    inputs = [leaf(16, 24, seed=seed) for seed in range(4)]
    references = [
        gradients(partial(lambda model, x: score(model(x * 1)), model, x), [x, *model.parameters()])
        for model, x in zip(models, inputs, strict=True)
    ]
    barrier = threading.Barrier(4)

    def train(index: int) -> None:
        model, x = models[index], inputs[index]
        for _ in range(5):
            barrier.wait(60)
            with offloader, offloader:
                loss = score(model(x * 1))
            box: list[Any] = []
            leaves = [x, *model.parameters()]
            run_in_threads(lambda: box.extend(torch.autograd.grad(loss, leaves)))  # noqa: B023
            assert_same_bits([loss.detach(), *box], references[index])

    run_in_threads(*(partial(train, index) for index in range(4)))
    assert offloader.statistics().nvme_written_bytes + offloader.statistics().host_written_bytes > 0
    assert offloader.statistics().live_records == 0


def test_nested_contexts(make_offloader: Maker) -> None:
    """The innermost context decides: the same one twice, another one, `no_offload`, hooks of the program."""
    # Both share one budget of host memory, and one maps it in pieces of 16 MiB.
    outer, inner = (make_offloader(debug=True, host_budget="64MiB") for _ in range(2))
    x = leaf(48, 48)
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor.clone()

    def run(offload: bool) -> list[Tensor]:
        off = (lambda context: context) if offload else (lambda context: nullcontext())
        with off(outer):
            y = (x * 1).sin()
            with off(outer):
                y = y.exp()
            with off(inner):
                y = y.cos()
            with no_offload():
                y = (y + 1).sigmoid()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
                y = y.tanh()
                with off(inner):
                    y = (y + 2).log()
            with torch.autograd.graph.save_on_cpu():
                y = y.sqrt()
            y = y.atan()
        if offload:
            outer.synchronize()
            inner.synchronize()
        return [y.detach(), *torch.autograd.grad(score(y), x)]

    reference = run(False)
    assert_same_bits(run(True), reference)
    make_offloader.assert_moved(outer)
    make_offloader.assert_moved(inner)
    assert len(packed) == 3  # in the plain run the logarithm's too
