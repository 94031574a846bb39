"""Tensors that a backward with ``create_graph=True`` saves move like a forward's; tensors of a recomputation stay."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actoffload import Offloader
from actoffload.testing.faults import SlowEngine
from actoffload.testing.simulated_device import NAME, SimulatedDevice
from tests.harness import MakeOffloader, accounts_of, assert_empty, assert_same_bits, same_bits, simulated
from tests.unit.saved_tensors import KeepsByIndex
from tests.unit.saving import Doubled

KIB = 1 << 10
ROWS, WIDTH = 256, 64
TENSOR_BYTES = ROWS * WIDTH * 4
BACKWARD = "saved during backward"
Step = Callable[[nn.Module, Tensor], Tensor]


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Doubled.apply(x)
        return y


class Again(torch.autograd.Function):
    """A checkpoint of a program's own: its backward runs the block again and walks that graph at once."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            y: Tensor = block(x)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, gradients[0])
        assert x.grad is not None
        return None, x.grad


def network(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    if kind == "functions":
        return nn.Sequential(*(Doubling() for _ in range(6)))
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))


def forces(net: nn.Module, x: Tensor) -> Tensor:
    """Energies and forces, as a potential is trained."""
    energy = net(x)
    (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    loss: Tensor = energy.square().mean() + force.square().mean()
    return loss


def penalty(net: nn.Module, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    return (gradient.square().sum(1).sqrt() - 1).square().mean()


def laplacian(net: nn.Module, x: Tensor) -> Tensor:
    """Three derivatives, as of an equation: two graphs are built one after the other."""
    (first,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return second.square().mean()


STEPS: dict[str, Step] = {"forces": forces, "penalty": penalty, "laplacian": laplacian}


def run(
    step: Step,
    kind: str,
    offloader: Offloader | None,
    *,
    steps: int = 1,
    inside: bool = False,
    settle: bool = True,
    where: str = "cpu",
) -> list[Any]:
    net, found = network(kind).to(where), []
    for seed in range(steps):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(where).requires_grad_()
        with offloader or contextlib.nullcontext():
            loss = step(net, x)
            if inside:
                loss.backward()
        if not inside:
            if offloader is not None and settle:
                offloader.synchronize()
            loss.backward()
        found += [loss.detach(), x.grad, *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        net.zero_grad()
    return found


@pytest.mark.pairs
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("kind", ["layers", "functions"])
@pytest.mark.parametrize("name", STEPS)
def test_its_graph_moves_and_gradients_have_the_same_bits(
    name: str, kind: str, inside: bool, make_offloader: MakeOffloader
) -> None:
    offloader = make_offloader(policy="all", min_bytes=1)
    found = run(STEPS[name], kind, offloader, steps=2, inside=inside)
    assert_same_bits(found, run(STEPS[name], kind, None, steps=2))
    kept = offloader.statistics().kept_bytes
    assert BACKWARD not in kept
    assert_empty(offloader)


@pytest.mark.parametrize("options", [{}, {"device_budget": "60%"}], ids=["no budget", "budget"])
def test_plans_hold_for_it(options: dict[str, Any], make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy="auto", min_bytes=1, **options)
    assert_same_bits(run(forces, "layers", offloader, steps=12), run(forces, "layers", None, steps=12))
    if options:  # the graph that is built is not fetched ahead while it grows: its own backward has not begun
        assert offloader.plan.offloaded_bytes > 0
        assert offloader.statistics().plan_peak_bytes <= 0.6 * offloader.statistics().baseline_peak_bytes


@pytest.mark.parametrize("name", STEPS)
def test_a_plan_keeps_what_backward_saves_as_well(name: str, make_offloader: MakeOffloader) -> None:
    """By place and size, as it keeps what a forward saves."""
    policy = make_offloader(policy=KeepsByIndex((True,) * 6), min_bytes=1)
    with policy:
        network("layers")(torch.ones(ROWS, WIDTH).requires_grad_())
    plan = policy.plan
    assert len(plan.entries) == 6
    offloader = make_offloader(policy=plan, min_bytes=1)
    assert_same_bits(run(STEPS[name], "layers", offloader, steps=3), run(STEPS[name], "layers", None, steps=3))
    kept = offloader.statistics().kept_bytes["policy"]
    assert kept > 3 * 6 * TENSOR_BYTES, "more than the forwards alone save"
    assert_empty(offloader)
    x = torch.ones(ROWS, WIDTH).requires_grad_()
    with offloader:
        out = network("layers")(x).sum()
        forwards, places = offloader.statistics().live_records, dict(offloader.store.identities.kept)
        (force,) = torch.autograd.grad(out, x, create_graph=True)
        assert offloader.statistics().live_records > forwards
        assert places
        assert offloader.store.identities.kept == places, "a tape of backward may outlive its plan"
    del out, force


@pytest.mark.parametrize("share", [0.36, 0.44, 0.5])
def test_a_budget_holds_while_backward_builds_a_graph(share: float, make_offloader: MakeOffloader) -> None:
    """Backward makes room for the tensor that it may save next, beside the one that it reads back."""
    whole = make_offloader(device_budget="100GiB")
    run(laplacian, "layers", whole)
    budget = int(share * whole.statistics().baseline_peak_bytes)
    for latency_s in (0.0005, 0.002):
        offloader = make_offloader(device_budget=budget, engine=partial(SlowEngine, latency_s=latency_s))
        run(laplacian, "layers", offloader, steps=4)
        assert offloader.statistics().nvme_written_bytes > 0
        assert offloader.statistics().resident_peak_bytes <= budget


@pytest.mark.simulated
@pytest.mark.parametrize("share", [0.4, 0.6])
@pytest.mark.parametrize("step", [forces, laplacian])
def test_a_budget_holds_on_a_device_while_backward_builds_a_graph(
    step: Step, share: float, device: SimulatedDevice
) -> None:
    """Backward takes originals while they are copied: the end of such a copy releases no memory."""
    with simulated(device_budget="100GiB") as whole:
        run(step, "layers", whole, where=NAME)
        budget = int(share * whole.statistics().baseline_peak_bytes)
    with simulated(device_budget=budget) as offloader:
        run(step, "layers", offloader, steps=3, where=NAME, settle=False)
        assert offloader.statistics().host_written_bytes > 0
        assert offloader.statistics().resident_peak_bytes <= budget


def test_memory_falls_and_what_has_left_comes_back(make_offloader: MakeOffloader) -> None:
    """When the writes have ended, hardly a byte of the graph is in memory; without moving all of it would be."""
    offloader, net = make_offloader(policy="all", min_bytes=1), network("layers")
    x = torch.randn(ROWS, WIDTH).requires_grad_()
    (expected,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    with offloader:
        energy = net(x)
        offloader.synchronize()
        before = accounts_of(offloader).baseline_bytes
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    offloader.synchronize()
    built = accounts_of(offloader).baseline_bytes - before
    assert built > 6 * TENSOR_BYTES, "the backward saved a graph"
    assert accounts_of(offloader).resident_bytes < built / 8
    inputs = [x, *net.parameters()]
    found = torch.autograd.grad(force.square().sum(), inputs)
    assert_same_bits([force, *found], [expected, *torch.autograd.grad(expected.square().sum(), inputs)])


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "plain": partial(checkpoint, use_reentrant=False),
    "own": Again.apply,
}


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_recomputation_is_no_forward(way: str, retain: bool, make_offloader: MakeOffloader) -> None:
    """Backward follows a recomputation at once, so none of its tensors moves: only the forward's bytes are on disk."""
    offloader = make_offloader(policy="all", min_bytes=1)

    def gradients(context: Any) -> list[Any]:
        net = network("layers")
        x = torch.linspace(0, 1, ROWS * WIDTH).reshape(ROWS, WIDTH).requires_grad_()
        with context:
            y = (x * 2).sin()
            for block in net:
                y = WAYS[way](block, y)
            y.square().sum().backward(retain_graph=retain)
        return [x.grad, *(p.grad for p in net.parameters())]

    found = gradients(offloader)
    assert_same_bits(found, gradients(contextlib.nullcontext()))
    statistics = offloader.statistics()
    assert statistics.microbatches == 1, "no graph was built in backward"
    assert (BACKWARD in statistics.kept_bytes) == (way != "plain")


def test_a_checkpoint_in_a_graph_that_is_built(make_offloader: MakeOffloader) -> None:
    """PyTorch's checkpoint runs its block again in that backward. The graph around it moves."""

    def step(net: nn.Module, x: Tensor) -> Tensor:
        return forces(lambda x: WAYS["plain"](net, (x * 2).sin()), x)  # type: ignore[arg-type]

    offloader = make_offloader(policy="all", min_bytes=1)
    assert_same_bits(run(step, "layers", offloader), run(step, "layers", None))
    assert offloader.statistics().microbatches == 2


def test_a_hessian_of_torch_autograd_functional(make_offloader: MakeOffloader) -> None:
    x = torch.randn(8, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    expected = torch.autograd.functional.hessian(lambda x: net(x).sum(), x)
    with make_offloader(policy="all", min_bytes=1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert same_bits(torch.autograd.functional.hessian(lambda x: net(x).sum(), x), expected)
