"""Random small programs in regions that run again in part: the bits of PyTorch's own checkpoint."""

from __future__ import annotations

import random
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from actoffload import OffloadConfig, Offloader
from actoffload.autograd.in_part import Replaying
from actoffload.planning.regions import in_part
from tests.harness import assert_empty, same_bits

SEEDS, CHUNK = 500, 50
ROWS, WIDTH, REGIONS = 6, 8, 2


class _Doubles(torch.autograd.Function):
    """Doubles its input by a kernel that no mode sees, and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.detach().numpy()[...] *= 2
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2


class _Filled(torch.autograd.Function):
    """A kernel that writes into memory which an operator has made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Any) -> Tensor:
        ctx.save_for_backward(x)
        out: Tensor = make(x)
        out.detach().numpy()[...] = 0.5 * x.detach().numpy()
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * 0.5 + 0 * x, None


class Net(nn.Module):
    """What a program may use: weights, statistics, a counter, and a list for features that outlive their region."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=n % 2 == 0) for n in range(3)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scale", torch.full((WIDTH, WIDTH), 0.1))
        self.features: list[Any] = []


def _again() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _product(net: Net, values: list[Tensor], i: int, j: int, kind: int) -> None:
    values.append(net.linears[kind % 3](values[i]))


def _matrix(net: Net, values: list[Tensor], i: int, j: int, kind: int) -> None:
    values.append(values[i] @ net.scale + values[j].t().matmul(values[j]).sum() * 1e-3)


def _stacked(net: Net, values: list[Tensor], i: int, j: int, kind: int) -> None:
    """Three dimensions: the product ends in an alias with a version counter of its own."""
    values.append(F.linear(values[i].view(2, 3, WIDTH), net.linears[1].weight).view(ROWS, WIDTH))


def _in_place(net: Net, values: list[Tensor], i: int, j: int, kind: int) -> None:
    values[i] = values[i].mul_(1.25) if kind % 2 else values[i].add_(values[j])


def _by_data(net: Net, values: list[Tensor], i: int, j: int, kind: int) -> None:
    values[i].data.mul_(1.25)


def _foreach(net: Net, values: list[Tensor], i: int, j: int, kind: int) -> None:
    with torch.no_grad():
        torch._foreach_mul_([values[i][: 1 + kind % ROWS]], 1.5)


def _into(net: Net, values: list[Tensor], i: int, j: int, kind: int) -> None:
    with torch.no_grad():
        torch.mul(values[i], 0.5, out=values[j])


def _dropout(net: Net, values: list[Tensor], i: int, j: int, kind: int) -> None:
    values.append(F.dropout(values[i], 0.4) * F.dropout(values[i], 0.4))


def _noise(net: Net, values: list[Tensor], i: int, j: int, kind: int) -> None:
    values.append(values[i] + torch.randn_like(values[j]))


def _statistics(net: Net, values: list[Tensor], i: int, j: int, kind: int) -> None:
    values.append(net.norm(values[i]) + net.norm.running_mean * net.norm.num_batches_tracked)


def _counter(net: Net, values: list[Tensor], i: int, j: int, kind: int) -> None:
    """A buffer that each run changes, and a product that uses it."""
    net.scale.data.mul_(1.5) if kind % 2 else net.scale.mul_(1.5)
    values.append(values[i] @ net.scale)


def _nonlinear(net: Net, values: list[Tensor], i: int, j: int, kind: int) -> None:
    values.append(torch.tanh(values[i]) * torch.sigmoid(values[j]))


def _views(net: Net, values: list[Tensor], i: int, j: int, kind: int) -> None:
    left, right = values[i].chunk(2, -1)
    values.append(torch.cat([right.sin(), left * right], -1))


def _kernel(net: Net, values: list[Tensor], i: int, j: int, kind: int) -> None:
    values[i] = _Doubles.apply(values[i])


def _filled(net: Net, values: list[Tensor], i: int, j: int, kind: int) -> None:
    make = (torch.empty_like, torch.zeros_like, lambda x: torch.zeros(x.shape), lambda x: x.new_empty(x.shape))[
        kind % 4
    ]
    values.append(_Filled.apply(values[i], make))


def _constant(net: Net, values: list[Tensor], i: int, j: int, kind: int) -> None:
    values.append(values[i] * torch.tensor([1.5, 0.5] * (WIDTH // 2)))


def _only_first(net: Net, values: list[Tensor], i: int, j: int, kind: int) -> None:
    with torch.no_grad():
        if _again() == bool(kind % 2):
            net.linears[kind % 3](values[i])
            values[i] @ net.scale
            torch.zeros(ROWS, WIDTH)


def _swapped(net: Net, values: list[Tensor], i: int, j: int, kind: int) -> None:
    with torch.no_grad():
        pair = [values[i].detach(), values[j].detach()]
        order = (1, 0) if _again() else (0, 1)
        found = {n: pair[n] @ net.scale for n in order}
    values.append(values[i] * found[0] - values[j] * found[1])


def _feature(net: Net, values: list[Tensor], i: int, j: int, kind: int) -> None:
    kinds: list[Any] = [lambda t: t, lambda t: t.detach(), lambda t: t.detach().numpy(), torch.utils.dlpack.to_dlpack]
    kinds.append(lambda t: t.untyped_storage())
    kind %= len(kinds)
    net.features.append(kinds[kind](values[i].detach() if kind == 3 else values[i]))


STEPS: list[Any] = [_product, _product, _product, _matrix, _stacked, _in_place, _by_data, _foreach, _into, _dropout]
STEPS += [_noise, _statistics, _counter, _nonlinear, _nonlinear, _views, _kernel, _filled, _constant, _only_first]
STEPS += [_swapped, _feature]


def _program(seed: int) -> list[tuple[Any, int, int, int]]:
    rng = random.Random(seed)
    some = rng.sample(STEPS, rng.randint(4, len(STEPS)))
    return [
        (rng.choice(some), rng.randrange(99), rng.randrange(99), rng.randrange(60)) for _ in range(rng.randint(3, 14))
    ]


def _body(net: Net, program: list[tuple[Any, int, int, int]], x: Tensor) -> Tensor:
    values = [x * 1.0, net.linears[0](x)]
    for step, i, j, kind in program:
        step(net, values, i % len(values), j % len(values), kind)
    return net.linears[2](torch.tanh(values[-1] + values[len(values) // 2]))


def _change(features: list[Any]) -> None:
    """Change what the program has kept of its regions."""
    for one in features:
        if isinstance(one, Tensor):
            one.data.mul_(3)
        elif isinstance(one, torch.UntypedStorage):
            one.fill_(1)
        elif hasattr(one, "dtype"):
            one[...] = 1


def _gradients(seed: int, context: Any) -> list[Tensor] | str:
    net, program = Net(), _program(seed)
    torch.manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    backwards = random.Random(seed).choice([1, 1, 2])
    try:
        with context:
            y = x
            for _ in range(REGIONS):
                y = checkpoint(partial(_body, net, program), y, use_reentrant=False)
            loss = y.square().mean()
        _change(net.features)
        for n in range(backwards):
            loss.backward(retain_graph=n + 1 < backwards)
    except RuntimeError as error:  # autograd's, of a program that changes what it needs
        return type(error).__name__
    found = [p.grad for p in [x, *net.parameters()] if p.grad is not None]
    return [*found, *(buffer.detach().clone() for buffer in net.buffers())]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_any_program_has_the_bits_of_pytorchs_checkpoint(first: int) -> None:
    taken = worked = 0
    call = Replaying.call

    def counting(self: Any, *args: Any) -> Any:
        nonlocal taken
        before = self.taken_bytes
        try:
            return call(self, *args)
        finally:
            taken += self.taken_bytes > before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replaying, "call", counting)
        for seed in range(first, first + CHUNK):
            expected = _gradients(seed, nullcontext())
            for policy in ("all", "keep"):
                config = OffloadConfig(policy=policy, checkpoints="selective", min_bytes=0, announce="none")
                with Offloader(config) as offloader:
                    pass
                offloader.store.regions.follow(frozenset(map(in_part, range(REGIONS))))
                found = _gradients(seed, offloader)
                assert type(found) is type(expected), (seed, policy, found, expected)
                if isinstance(found, list):
                    same = [same_bits(a, b) for a, b in zip(found, expected, strict=True)]
                    assert all(same), (seed, policy, same, [step.__name__ for step, *_ in _program(seed)])
                    worked += 1
                if isinstance(found, list):
                    assert_empty(offloader)
                offloader.close()
    assert worked > CHUNK, "most programs train"
    assert taken > CHUNK, "most results stand in"
