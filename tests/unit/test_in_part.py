"""Regions that run again in part: every way in which a cached result cannot be trusted, and what the choice costs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import actoffload
from actoffload import Offloader, Plan
from actoffload.autograd.in_part import Caching, Noting, Passing, Results, may_stand_in
from actoffload.errors import ConfigError
from actoffload.planning.regions import in_part
from actoffload.testing.simulated_device import NAME, SimulatedDevice
from tests.harness import MakeOffloader, assert_empty, assert_same_bits, same_bits, simulated

Body = Callable[["Net", Tensor], Any]
WIDTH = 64


class Net(nn.Module):
    """Two checkpointed regions with the same body, and a product around them."""

    def __init__(self, body: Body, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.convolution = nn.Conv1d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.body, self.options = body, options
        self.kept: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(partial(self.body, self), x, use_reentrant=False, **self.options)
        return x


def gradients(net: Net, context: Any, backward: Callable[[Tensor, Net], None] | None = None) -> list[Tensor]:
    torch.manual_seed(1)
    net.zero_grad(set_to_none=True)
    net.norm.reset_running_stats()
    net.kept.clear()
    x = torch.randn(8, 4, WIDTH).to(net.up.weight.device).requires_grad_()
    with context:
        loss = net(x).square().mean()
    if backward is None:
        loss.backward()
    else:
        backward(loss, net)
    return [parameter.grad for parameter in [x, *net.parameters()] if parameter.grad is not None]


@pytest.fixture(params=["all", "keep"])
def offloader(request: Any, make_offloader: MakeOffloader) -> Offloader:
    """Both regions run again in part, and all that may move moves, or stays."""
    offloader = make_offloader(policy=request.param, checkpoints="selective", min_bytes=0)
    offloader.store.regions.follow(frozenset(map(in_part, (0, 1))))
    return offloader


def check(net: Net, offloader: Offloader, backward: Any = None) -> None:
    """The gradients are the program's, to the bit, and nothing of the step is left."""
    expected = gradients(net, nullcontext(), backward)
    for between in (False, True):
        context = offloader
        found = gradients(net, _synchronized(context) if between else context, backward)
        assert_same_bits(found, expected, "gradient")
        net.kept.clear()
        statistics = offloader.statistics()
        # A backward inside of a region begins another forward.
        assert (statistics.regions, statistics.regions_in_part) == (2, 2) or net.body is with_gradient
        accounts = offloader.store.shared.accounts
        assert (accounts.recomputed_bytes, accounts.baseline_bytes) == (0, 0)
    assert_empty(offloader)


class _synchronized:
    """The context, and at its end a wait until all that moves has left."""

    def __init__(self, offloader: Offloader) -> None:
        self.offloader = offloader

    def __enter__(self) -> None:
        self.offloader.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.offloader.__exit__(*error)
        self.offloader.synchronize()


# -- bodies -----------------------------------------------------------------------------------------------------------


def plain(net: Net, x: Tensor) -> Any:
    return x + net.down(torch.tanh(net.up(x))).sin()


def with_dropout(net: Net, x: Tensor) -> Any:
    """Attention with dropout draws random numbers, and those of the next operator come after them."""
    q = net.up(x)[:, None]
    y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)[:, 0]
    return F.dropout(net.down(y).sin(), 0.5)


def attention(net: Net, x: Tensor) -> Any:
    q = net.up(x)[:, None]
    return net.down(F.scaled_dot_product_attention(q, q, q)[:, 0]).sin()


def convolution(net: Net, x: Tensor) -> Any:
    return net.convolution(net.up(x)).sin()


def in_place(net: Net, x: Tensor) -> Any:
    return net.down(F.relu(net.up(x), inplace=True).sin()).mul_(1.5).sin()


def in_place_later(net: Net, x: Tensor) -> Any:
    """After an operator has saved something, so that the result is cached already."""
    y = net.up(x)
    z = x.sin() * x.cos()
    return net.down(y.mul_(1.5).sin()) * z


def by_data(net: Net, x: Tensor) -> Any:
    """No version counter shows this change, but it is an operator's, inside of the region."""
    y = net.up(x)
    z = x.sin() * x.cos()
    y.data.mul_(2)
    return net.down(y.sin()) * z


class Doubles(torch.autograd.Function):
    """Doubles its input where it lies, past the dispatcher, and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.detach().numpy()[...] *= 2  # a kernel: no mode sees it
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2


def a_kernel(net: Net, x: Tensor) -> Any:
    return net.down(Doubles.apply(net.up(x)).sin())


def a_kernel_later(net: Net, x: Tensor) -> Any:
    y = net.up(x)
    z = x.sin() * x.cos()
    return net.down(Doubles.apply(y).sin()) * z


def freed(net: Net, x: Tensor) -> Any:
    """As a program that discards outputs: nothing reads them in backward."""
    y = net.up(x)
    z = y * 2
    y.untyped_storage().resize_(0)
    return net.down(z.sin())


def freed_later(net: Net, x: Tensor) -> Any:
    y = net.up(x)
    z = (y * 2).sin()
    z = z * z.cos()
    y.untyped_storage().resize_(0)
    return net.down(z.sin())


def changed_outside(net: Net, x: Tensor) -> Any:
    """The region's result is a product that the program changes later."""
    y = x @ net.up.weight
    net.kept.append(y)
    return net.down(y.sin())


def views(net: Net, x: Tensor) -> Any:
    a, b = net.up(x).split(WIDTH // 2, -1)
    return net.down(torch.cat([a.sin(), b.cos() * a], -1)).sin()


def with_gradient(net: Net, x: Tensor) -> Any:
    """A backward inside of the region."""
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (inner,) = torch.autograd.grad(net.up(y).sin().sum(), y)
    return x * inner + net.down(x).sin()


def nested(net: Net, x: Tensor) -> Any:
    return net.down(checkpoint(partial(plain, net), x, use_reentrant=False)).sin()


def without_gradient(net: Net, x: Tensor) -> Any:
    with torch.no_grad():
        y = net.up(x)
    return net.down(x).sin() * y


def logged(net: Net, x: Tensor, again: bool = False) -> Any:
    """A product in one of the two runs alone, as a log of the first run makes it, before those of the region."""
    if (torch._C._current_graph_task_id() != -1) == again:
        with torch.no_grad():
            net.down(x)
            net.up(x * 2)
    return plain(net, x)


def logged_again(net: Net, x: Tensor) -> Any:
    return logged(net, x, again=True)


def swapped(net: Net, x: Tensor) -> Any:
    """Two products of one shape, which the second run computes in the other order."""
    pair = {n: one for n, one in enumerate((x.detach(), x.detach() * 2))}
    with torch.no_grad():
        found = {n: net.up(pair[n]) for n in ((1, 0) if torch._C._current_graph_task_id() != -1 else (0, 1))}
    return net.down(x * found[0]).sin() + x * found[1]


def masked_twice(net: Net, x: Tensor) -> Any:
    y = net.up(F.dropout(x, 0.3)).sin() * net.up(F.dropout(x, 0.3)).cos()
    return net.down(y).sin()


def normalized(net: Net, x: Tensor) -> Any:
    """The second run has other statistics, and a product reads them."""
    y = net.norm(x)
    assert net.norm.running_mean is not None
    seen = net.norm.running_mean.repeat(WIDTH // 4).diag()
    return net.down(net.up(y).sin() @ seen).sin()


def a_foreach_operator_on_a_view(net: Net, x: Tensor) -> Any:
    y = net.up(x)
    z = x.sin() * x.cos()
    with torch.no_grad():
        torch._foreach_add_([y[:2], y[3:5]], 1.0)
    return net.down(y.sin()) * z


def with_a_constant(net: Net, x: Tensor) -> Any:
    y = net.up(x * torch.tensor([1.0, 2.0]).repeat(WIDTH // 2))
    return net.down(y.sin()).sin()


def in_half_precision(net: Net, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x + net.down(net.up(x).sin()).sin() + net.up(x).cos()


BODIES = [
    logged,
    logged_again,
    swapped,
    masked_twice,
    normalized,
    a_foreach_operator_on_a_view,
    with_a_constant,
    in_half_precision,
    plain,
    with_dropout,
    attention,
    convolution,
    in_place,
    in_place_later,
    by_data,
    a_kernel,
    a_kernel_later,
    freed,
]
BODIES += [freed_later, views, with_gradient, nested, without_gradient]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_gradients_are_the_programs(body: Body, offloader: Offloader) -> None:
    check(Net(body), offloader)


TAKEN = {plain: 4, logged: 4, logged_again: 4, masked_twice: 6, attention: 6, convolution: 4, views: 4, nested: 6}
TAKEN |= {with_dropout: 8, in_place_later: 2, in_half_precision: 6, freed: 0, swapped: 6, in_place: 0}
"""Of the results of two regions, how many stand in for calls of their second runs."""


@pytest.mark.parametrize("body", TAKEN, ids=lambda body: body.__name__)
def test_what_is_the_same_in_both_runs_is_not_computed_again(
    body: Body, offloader: Offloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = Results.take

    def counted(self: Results, key: int) -> Any:
        found = take(self, key)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(Results, "take", counted)
    gradients(Net(body), offloader)
    assert sum(taken) == TAKEN[body]


@pytest.mark.parametrize("options", [{"early_stop": False}, {"determinism_check": "none"}])
def test_with_options_of_a_checkpoint(options: dict[str, Any], offloader: Offloader) -> None:
    check(Net(plain, **options), offloader)


def _changes(loss: Tensor, net: Net) -> None:
    """Change, after the forward, what the regions' products returned."""
    for tensor in net.kept:
        with torch.no_grad():
            tensor.mul_(3)
    loss.backward()


def test_a_change_after_the_forward_is_seen_through_an_alias_with_a_counter_of_its_own(offloader: Offloader) -> None:
    """A product of three dimensions ends in `_unsafe_view`: its change does not show in what the product returned."""
    check(Net(changed_outside), offloader, _changes)


def _twice(loss: Tensor, net: Net) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def _double(loss: Tensor, net: Net) -> None:
    grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True, allow_unused=True)
    torch.stack([grad.square().sum() for grad in grads if grad is not None]).sum().backward()


@pytest.mark.parametrize("backward", [_twice, _double], ids=["retained", "double"])
@pytest.mark.parametrize("body", [plain, convolution, in_place_later], ids=lambda body: body.__name__)
def test_a_graph_may_be_used_again(body: Body, backward: Any, offloader: Offloader) -> None:
    """A result is used once; a second backward computes it anew, where PyTorch's selective contexts raise."""
    check(Net(body), offloader, backward)


def test_what_the_program_keeps_of_a_region_may_change(offloader: Offloader) -> None:
    """A result that anything but the library holds is not cached: nobody can change what is."""

    def keeping(net: Net, x: Tensor) -> Tensor:
        y = net.up(x)
        net.kept += ways[len(net.kept) % len(ways)](y)
        return net.down(y.sin()).sin()

    ways: list[Any] = [
        lambda y: [y],
        lambda y: [y.detach()],
        lambda y: [y.data],
        lambda y: [torch.from_numpy(y.detach().numpy())],
        lambda y: [torch.from_dlpack(torch.utils.dlpack.to_dlpack(y.detach()))],
        lambda y: [torch.empty(0).set_(y.untyped_storage())],
        lambda y: [y.untyped_storage()],
        lambda y: [],
    ]

    def change(loss: Tensor, net: Net) -> None:
        for one in net.kept:
            one.data.mul_(3) if isinstance(one, Tensor) else one.fill_(1)
        loss.backward()

    for _ in range(len(ways) // 2):
        check(Net(keeping), offloader, change)
        ways = ways[2:] + ways[:2]


def test_a_weight_that_changes_before_backward_is_another_value(offloader: Offloader) -> None:
    """The second run computes with the new weight, as PyTorch's does."""

    def step(loss: Tensor, net: Net) -> None:
        with torch.no_grad():
            net.up.weight.mul_(2)
        loss.backward()
        with torch.no_grad():
            net.up.weight.mul_(0.5)

    check(Net(plain), offloader, step)


def test_two_threads_may_run_backward_at_once(offloader: Offloader) -> None:
    """Each result is taken once, and what is not there any more is computed."""

    def both(loss: Tensor, net: Net) -> None:
        grads: list[Any] = [None, None]

        def work(n: int) -> None:
            grads[n] = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True, allow_unused=True)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for mine, others in zip(*grads, strict=True):
            assert (mine is None and others is None) or same_bits(mine, others)
        loss.backward()

    check(Net(plain), offloader, both)


def test_a_generator_of_the_programs_own_draws_on(offloader: Offloader) -> None:
    """The checkpoint does not restore it: the second run has other numbers, and products of them are computed."""
    generator = torch.Generator()

    def drawing(net: Net, x: Tensor) -> Tensor:
        y = x + torch.rand(x.shape, generator=generator)
        return net.down(net.up(y).sin()).sin()

    def begin(loss: Tensor, net: Net) -> None:
        loss.backward()
        generator.manual_seed(0)

    generator.manual_seed(0)
    check(Net(drawing), offloader, begin)


def test_without_the_state_of_random_numbers_no_region_runs_in_part(offloader: Offloader) -> None:
    gradients(Net(with_dropout, preserve_rng_state=False), offloader)
    assert offloader.statistics().regions_in_part == 0


def test_a_subclass_ends_the_numbering(offloader: Offloader) -> None:
    """What it holds may change unseen, so the region caches nothing."""

    def wrapped(net: Net, x: Tensor) -> Tensor:
        y = net.up(x)
        inner = TwoTensor(y.detach(), y.detach()).mul_(2).a
        return net.down(y.sin() * inner).sin()

    check(Net(wrapped), offloader)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_module_is_one_operator(offloader: Offloader) -> None:
    compiled = torch.compile(lambda y: (y.sin() * 2 + y.cos()).tanh(), backend="aot_eager")

    def compiling(net: Net, x: Tensor) -> Tensor:
        return net.down(compiled(net.up(x))).sin()

    check(Net(compiling), offloader)


def test_operators_that_save_other_tensors_under_a_mode(make_offloader: MakeOffloader) -> None:
    """Both runs of each region have a mode, also in a recorded step."""
    lengths = torch.full((4,), 8), torch.full((4,), 3)

    def ctc(net: Net, x: Tensor) -> Tensor:
        spoken = net.up(x).sin().log_softmax(-1)
        return x * F.ctc_loss(spoken, torch.ones(4, 3, dtype=torch.long), *lengths).sin()

    offloader = make_offloader(policy="all", checkpoints="selective", min_bytes=0)
    net = Net(ctc)
    expected = gradients(net, nullcontext())
    for chosen in (frozenset[int](), frozenset(map(in_part, (0, 1)))):
        offloader.store.regions.follow(chosen)
        offloader.store.profiler.begin()
        assert_same_bits(gradients(net, offloader), expected, "gradient")


def test_a_mode_leaves_the_stack_from_below_another() -> None:
    """A checkpoint that does not throw into its generator leaves the mode to a finalizer."""
    below, above = Passing(), Passing()
    below.__enter__()
    with above:
        below.__exit__(None, None, None)
        assert _get_current_dispatch_mode_stack() == [above]
    assert _get_current_dispatch_mode_stack() == []


def test_what_raises_in_a_second_run_leaves_nothing(offloader: Offloader) -> None:
    def raising(net: Net, x: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() != -1:
            raise ValueError("the program's")
        return plain(net, x)

    with pytest.raises(ValueError, match="the program's"):
        gradients(Net(raising), offloader)
    assert _get_current_dispatch_mode_stack() == []
    assert_empty(offloader)
    check(Net(plain), offloader)


def test_what_raises_leaves_nothing(offloader: Offloader) -> None:
    def raising(net: Net, x: Tensor) -> Tensor:
        plain(net, x)
        raise ValueError("the program's")

    with pytest.raises(ValueError, match="the program's"):
        gradients(Net(raising), offloader)
    assert_empty(offloader)
    check(Net(plain), offloader)


def test_a_call_that_draws_random_numbers_is_no_result_to_cache() -> None:
    """The operators after it draw the next numbers, so it has to draw again. No attention of a CPU has dropout."""
    attend, x = torch.ops.aten._scaled_dot_product_flash_attention.default, torch.ones(2)
    assert may_stand_in(attend, (x, x, x), {})
    assert may_stand_in(attend, (x, x, x, 0.0), {})
    assert not may_stand_in(attend, (x, x, x, 0.1), {})
    assert not may_stand_in(attend, (x, x, x), {"dropout_p": 0.1})
    assert not may_stand_in(torch.ops.aten.sin.default, (x,), {})


# -- plans ------------------------------------------------------------------------------------------------------------


def test_the_plan_of_a_forward_can_be_followed(make_offloader: MakeOffloader, offloader: Offloader) -> None:
    net = Net(plain)
    expected = gradients(net, nullcontext())
    gradients(net, offloader)
    made = Plan.from_json(offloader.plan.to_json())
    assert (made.in_part, made.once, made.regions) == ((0, 1), (), 2)
    other = make_offloader(policy=made, checkpoints="selective", min_bytes=0)
    for _ in range(2):
        assert_same_bits(gradients(net, other), expected, "gradient")
    assert other.plan.difference(made) == ()
    assert "2 checkpointed regions: 0 ran once, 2 again in part, 0 ran again in backward" in other.report()


def test_such_a_plan_needs_the_option(make_offloader: MakeOffloader) -> None:
    for value in ("plan", "leave"):
        with pytest.raises(ConfigError, match="give 'selective'") as caught:
            make_offloader(policy=Plan((), in_part=(0,), regions=2), checkpoints=value)
        assert caught.value.field == "checkpoints"


@pytest.mark.parametrize("own", [create_selective_checkpoint_contexts, actoffload.create_selective_checkpoint_contexts])
def test_contexts_of_the_programs_own_stay(own: Any, offloader: Offloader) -> None:
    net = Net(plain, context_fn=partial(own, [torch.ops.aten.addmm.default]))
    expected = gradients(net, nullcontext())
    assert_same_bits(gradients(net, offloader), expected, "gradient")
    statistics = offloader.statistics()
    assert (statistics.regions, statistics.regions_in_part) == (2, 0)


def test_without_the_option_no_mode_is_entered(make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch) -> None:
    def entered(*_: Any) -> None:
        raise AssertionError("a mode was entered")

    for mode in (Caching, Noting):
        monkeypatch.setattr(mode, "__enter__", entered)
    offloader = make_offloader(policy="all", min_bytes=0)
    offloader.store.regions.follow(frozenset({in_part(0)}))
    net = Net(plain)
    for _ in range(2):
        offloader.store.profiler.begin()
        gradients(net, offloader)
    assert offloader.statistics().regions_in_part == 0


def test_a_recorded_step_notes_what_a_run_in_part_would_cache(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy="all", checkpoints="selective", min_bytes=0)
    net = Net(large)
    gradients(net, offloader)
    offloader.store.profiler.begin()
    gradients(net, offloader)
    profile = offloader.store.profiler.profile()
    assert profile is not None
    nbytes = LARGER * 8 * 4 * WIDTH * 4
    for region in profile.regions:
        # The last product follows the last saved tensor: the second run ends before it.
        assert [result.nbytes for result in region.results] == [nbytes] * PRODUCTS
        assert 0 < region.in_part_s < region.recompute_s
    offloader.store.regions.follow(frozenset(map(in_part, (0, 1))))
    offloader.store.profiler.begin()
    gradients(net, offloader)
    profile = offloader.store.profiler.profile()
    assert profile is not None
    assert (profile.in_part, profile.once) == ((0, 1), ())
    cached = [storage.nbytes for storage in profile.storages if storage.region is not None]
    assert cached == [nbytes] * 2 * PRODUCTS, "as noted"


PRODUCTS, LARGER = 6, 64


def large(net: Net, x: Tensor) -> Any:
    """Products that take longer than to note them."""
    x = x.repeat(LARGER, 1, 1)
    for _ in range(PRODUCTS):
        x = net.up(x).sin()
    return net.down(x)[:8]


# -- on a device ------------------------------------------------------------------------------------------------------

SEEDS = 6


def _on_another_stream(net: Net, x: Tensor) -> Any:
    """A product on another stream, while the first one saves something. Nothing orders the two before the end."""
    main, side = torch.accelerator.current_stream(), torch.Stream(x.device)
    w = net.up.weight
    side.wait_stream(main)
    with side:
        y = x.flatten(0, 1).mm(w)
    z = x.sin() * x.cos()
    main.wait_stream(side)
    return (y.sin() * z.flatten(0, 1)).view_as(x)


def _wrong(device: SimulatedDevice, body: Body) -> int:
    """In how many of some seeds, each with another delay, gradients differ."""
    net, wrong = Net(body).to(NAME), 0
    for _ in range(2):  # the first backward of a process rounds otherwise
        expected = [grad.cpu() for grad in gradients(net, nullcontext())]
    for seed in range(SEEDS):
        device.reset()
        device.delay(0.002, seed)
        with simulated(checkpoints="selective", pending_bytes=1, announce="none") as offloader:
            offloader.store.regions.follow(frozenset(map(in_part, (0, 1))))
            found = gradients(net, offloader)
            assert offloader.statistics().regions_in_part == 2
            device.synchronize()
            wrong += not all(map(same_bits, [grad.cpu() for grad in found], expected))
    device.reset()
    device.take_violations()
    return wrong


@pytest.mark.simulated
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")
@pytest.mark.parametrize(
    "body", [plain, in_place_later, freed, freed_later, _on_another_stream], ids=lambda body: body.__name__
)
def test_on_a_device_a_result_is_copied_after_it_was_computed(body: Body, device: SimulatedDevice) -> None:
    assert _wrong(device, body) == 0
