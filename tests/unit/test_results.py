"""``codec="exact"``: products and activations that backward computes again have every bit, and are not saved."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu
from torch.utils.checkpoint import checkpoint

import actoffload
from actoffload import Offloader
from actoffload.autograd import results
from actoffload.errors import SavedTensorModifiedError, StateError
from actoffload.runtime.backward_end import BackwardEnd
from actoffload.storage.engines.base import IoKind
from actoffload.testing.simulated_device import NAME, SimulatedDevice
from actoffload.tiers.record import State
from tests.harness import (
    ADVERSARIES,
    ON_EACH_DEVICE,
    Adversary,
    accounts_of,
    assert_empty,
    assert_same_bits,
    autopilot_of,
    fill_device,
    following,
    forget_failed_backward,
    lock_of,
    on_stream,
    records_of,
    same_bits,
    simulated,
    tier_of,
    wait_until,
)
from tests.harness import MakeOffloader as Make
from tests.unit.coded import assert_streams_read_their_own, assert_survives, gradient_after_a_capture
from tests.unit.simulated_programs import LateEngine

NBYTES = 4 * 64 * 64
"""Of each tensor of the programs below."""


@pytest.fixture
def offloader(make_offloader: Make) -> Offloader:
    return make_offloader(codec="exact", policy="all", debug=True)


def inputs(where: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(64, 64), torch.randn(64, 64)
    x[0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40])
    return tuple(one.to(where, dtype).requires_grad_() for one in (x, weight, weight + 1))  # type: ignore[return-value]


def finite_inputs(where: str) -> tuple[Tensor, ...]:
    """Inputs whose gradients have no NaN, so that these show each change."""
    return tuple(one.detach().nan_to_num(1.0, 1.0).requires_grad_() for one in inputs(where))


def gated(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    """The feed-forward part of a Llama: of four saved tensors, two are functions of the others."""
    return (silu(x @ weight) * (x @ other)) @ weight


def scaled(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    """A norm's weight, which a shard's owner may free until backward, and transposed operands."""
    return ((x * 1.0 * other[0]) @ weight) + (((x @ weight).t() * (x @ other)[:1].t()) @ weight)


def activated(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    return gelu(x @ weight) @ other + gelu(x @ other, approximate="tanh").view(-1).view(64, 64).t() @ weight


def gradients(
    program: Callable[..., Tensor], tensors: tuple[Tensor, ...], offloader: Offloader | None, *, twice: bool = False
) -> list[Tensor]:
    """Of one step, whose saved tensors are all away before backward begins."""
    with offloader or nullcontext():
        loss = program(*tensors).square().mean()
    found: list[Tensor] = []
    for again in [True, False] if twice else [False]:
        if offloader is not None:
            offloader.synchronize()
        found += torch.autograd.grad(loss, tensors, retain_graph=again)
    return found


@ON_EACH_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("program", "products", "activations"), [(gated, 1, 1), (scaled, 1, 0), (activated, 0, 2)])
def test_every_bit_comes_back(
    where: str,
    dtype: torch.dtype,
    program: Any,
    products: int,
    activations: int,
    offloader: Offloader,
    make_offloader: Make,
) -> None:
    """On the CPU activations are saved: their last bits may depend on the number of threads."""
    tensors, derived = inputs(where, dtype), products + activations * (where != "cpu")
    expected = gradients(program, tensors, None, twice=True)
    plain = make_offloader(policy="all")
    assert_same_bits(gradients(program, tensors, plain, twice=True), expected)
    for step in (1, 2, 3):
        assert_same_bits(gradients(program, tensors, offloader, twice=True), expected)
        found, nbytes = offloader.statistics(), NBYTES * dtype.itemsize // 4
        assert found.derived_bytes == step * derived * nbytes
        saved_bytes = step * plain.statistics().activation_bytes
        assert found.activation_bytes + found.derived_bytes + found.halved_bytes == saved_bytes
        assert_empty(offloader)


@ON_EACH_DEVICE
@pytest.mark.parametrize(
    ("dtype", "casts"),
    [
        (torch.bfloat16, [torch.float32]),
        (torch.bfloat16, [torch.float32, torch.bfloat16]),
        (torch.float32, [torch.bfloat16]),
        (torch.float64, [torch.float32]),
    ],
)
def test_the_cast_of_a_product_is_computed_again(
    where: str, dtype: torch.dtype, casts: list[torch.dtype], offloader: Offloader
) -> None:
    """As adapters in float32 save it, and autocast. On the CPU a NaN's bits after rounding depend on the threads."""
    tensors = *inputs(where, dtype), torch.randn(64, 64).to(where, casts[-1]).requires_grad_()

    def program(x: Tensor, weight: Tensor, other: Tensor, adapter: Tensor) -> Tensor:
        product = (x @ weight) * (x @ other)
        for one in casts:
            product = product.to(one)
        return product @ adapter

    expected = gradients(program, tensors, None, twice=True)
    for step in (1, 2, 3):
        assert_same_bits(gradients(program, tensors, offloader, twice=True), expected)
        widened = casts == [torch.float32] and dtype is torch.bfloat16
        nbytes = 64 * 64 * casts[-1].itemsize if widened or where != "cpu" else 0
        assert offloader.statistics().derived_bytes == step * nbytes
        assert offloader.statistics().halved_bytes == 0, "it is not saved at all"
    assert_empty(offloader)


class SaveCast(torch.autograd.Function):
    """Saves what others have cast, as kernels for eight bits do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cast: Tensor) -> Tensor:
        ctx.save_for_backward(cast)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0].to(gradients[0].dtype), None


@ON_EACH_DEVICE
def test_a_product_that_is_cast_to_eight_bits(where: str, offloader: Offloader) -> None:
    *tensors, other = inputs(where)

    def program(x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = SaveCast.apply(x @ weight, ((x @ weight) * (x @ other)).to(torch.float8_e4m3fn))
        return out

    expected = gradients(program, tuple(tensors), None)
    for _ in range(3):
        assert_same_bits(gradients(program, tuple(tensors), offloader), expected)


@pytest.mark.simulated
@pytest.mark.parametrize("devices", [("sim",), ("cpu", "sim")], ids=["", "both move"])
def test_a_product_on_another_device_is_not_computed_again(make_offloader: Make, devices: tuple[str, ...]) -> None:
    offloader = make_offloader(codec="exact", policy="all", devices=devices)
    x, weight, _ = inputs("cpu", torch.bfloat16)
    last = weight.detach().to("sim", torch.float32).requires_grad_()

    def program(x: Tensor, weight: Tensor, last: Tensor) -> Tensor:
        return (x.sin() * (x @ weight)).to("sim", torch.float32) @ last

    expected = gradients(program, (x, weight, last), None)
    for _ in range(3):
        assert_same_bits(gradients(program, (x, weight, last), offloader), expected)
    assert offloader.statistics().derived_bytes == 0


@ON_EACH_DEVICE
def test_an_activation_is_computed_once_for_its_product_and_its_own_node(where: str, offloader: Offloader) -> None:
    """And dies with them."""
    tensors, computed = inputs(where), list[int]()
    note = offloader.store.regions.computed

    def noted(*made: Any) -> None:
        note(*made)
        computed.append(accounts_of(offloader).recomputed_bytes)

    offloader.store.regions.computed = noted  # type: ignore[method-assign]
    results_of_each = 1 if where == "cpu" else 2
    for blocks in (1, 4):
        computed.clear()

        def program(x: Tensor, weight: Tensor, other: Tensor, blocks: int = blocks) -> Tensor:
            for _ in range(blocks):
                x = gated(x, weight, other)
            return x

        gradients(program, tensors, offloader)
        assert len(computed) == blocks * results_of_each
        assert max(computed) == results_of_each * NBYTES


@ON_EACH_DEVICE
def test_a_product_that_two_regions_save_belongs_to_the_last_one(where: str, offloader: Offloader) -> None:
    """Backward needs it there first. If it came to the other region, it would have left this one too early."""
    x, weight, other = inputs(where)
    computed, note = list[int | None](), offloader.store.regions.computed

    def noted(storage: torch.UntypedStorage, region: Any) -> None:
        note(storage, region)
        computed.append(region and region[1])

    def first(x: Tensor) -> tuple[Tensor, ...]:
        one, two = x @ weight, x @ other
        product = one * two
        return product, one, two, (product @ weight).sum()

    def second(product: Tensor, one: Tensor, two: Tensor) -> Tensor:
        return (product @ weight + (one @ weight) * (two @ weight)).sum()

    offloader.store.regions.computed = noted  # type: ignore[method-assign]
    offloader.store.regions.follow(frozenset({0, 1}))
    with offloader:
        *saved, loss = checkpoint(first, x, use_reentrant=False)
        loss = loss + checkpoint(second, *saved, use_reentrant=False)
    del saved
    loss.backward()
    assert computed[:1] == [1]


@ON_EACH_DEVICE
def test_backward_of_backward(where: str, offloader: Offloader) -> None:
    tensors = inputs(where)

    def twice(context: Any) -> tuple[Tensor, ...]:
        with context:
            first = torch.autograd.grad(gated(*tensors).square().mean(), tensors, create_graph=True)
            return torch.autograd.grad(sum(one.square().sum() for one in first), tensors)  # type: ignore[arg-type]

    assert_same_bits(twice(offloader), twice(nullcontext()))
    assert offloader.statistics().derived_bytes == (1 + (where != "cpu")) * NBYTES, "of the forward alone"


@ON_EACH_DEVICE
def test_each_tensor_is_read_back_once(where: str, make_offloader: Make) -> None:
    """The node that saved an operand uses it after the result was computed from it, so it stays until then."""
    offloader = make_offloader(codec="exact", policy="all", prefetch_bytes=1)
    tensors = inputs(where)
    for _ in range(3):
        before = offloader.statistics()
        gradients(gated, tensors, offloader)
    after, moved = offloader.statistics(), offloader.statistics().moved_bytes - before.moved_bytes
    name = "nvme_read_bytes" if where == "cpu" else "host_read_bytes"
    assert getattr(after, name) - getattr(before, name) == moved > 0


@ON_EACH_DEVICE
def test_nothing_is_held_after_backward(where: str, offloader: Offloader) -> None:
    """Not even while the graph is retained: a later backward computes it once more."""
    tensors = inputs(where)
    with offloader:
        loss = gated(*tensors).sum()
    for _ in range(2):
        torch.autograd.grad(loss, tensors, retain_graph=True)
        offloader.synchronize()
        offloader.statistics()
        accounts = accounts_of(offloader)
        assert accounts.recompute_peak_bytes >= (1 + (where != "cpu")) * NBYTES, "it counts while backward holds it"
        accounts.recompute_peak_bytes = 0
    torch.autograd.grad(loss, tensors)
    del loss
    assert_empty(offloader)
    assert accounts.recomputed_bytes == 0


@ON_EACH_DEVICE
@pytest.mark.parametrize("changed", ["result", "operand"])
def test_a_change_in_place_raises(where: str, changed: str, offloader: Offloader) -> None:
    x, weight, other = inputs(where)
    with offloader:
        gate, up = x @ weight, x @ other
        product = gate * up
        loss = (product @ weight).sum()
    with torch.no_grad():
        (product if changed == "result" else up).add_(1)
    del product, gate, up
    offloader.synchronize()
    with pytest.raises(SavedTensorModifiedError, match="modified by an inplace operation"):
        loss.backward()
    del loss
    forget_failed_backward()
    assert_empty(offloader)


@ON_EACH_DEVICE
def test_backward_reads_the_present_contents_of_a_result_that_the_program_holds(
    where: str, offloader: Offloader
) -> None:
    tensors = finite_inputs(where)

    def gradients_after_a_change(context: Any) -> tuple[Tensor, ...]:
        x, weight, other = tensors
        with context:
            product = (x @ weight) * (x @ other)
            loss = (product @ weight).sum()
        product.data.fill_(2.0)  # which bumps no version counter
        return torch.autograd.grad(loss, tensors)

    assert_same_bits(gradients_after_a_change(offloader), gradients_after_a_change(nullcontext()))
    assert offloader.statistics().derived_bytes == NBYTES


@ON_EACH_DEVICE
@pytest.mark.parametrize("before", [0, 3], ids=["first forward", "later"])
def test_a_change_before_the_save_that_bumps_no_counter(where: str, before: int, offloader: Offloader) -> None:
    """In the first forward such a tensor is saved as it is, and in all later ones. Otherwise one step of 16 raises."""
    x, weight, other = finite_inputs(where)

    def program(change: bool) -> Tensor:
        product = (x @ weight) * (x @ other)
        if change:
            product.data[5, 5] += 1.0
            offloader.synchronize()  # so that the CPU does not compare it
        return (product @ weight).sum()

    def step(change: bool) -> tuple[Tensor, ...]:
        with offloader:
            loss = program(change)
        offloader.synchronize()
        return torch.autograd.grad(loss, (x, weight, other))

    for _ in range(before):
        step(False)
    if not before:
        for change in (True, False, True):
            assert_same_bits(step(change), torch.autograd.grad(program(change), (x, weight, other)))
        assert offloader.statistics().derived_bytes == 0
        return

    def steps() -> None:
        for _ in range(results.ONE_IN):
            step(True)

    with pytest.raises(SavedTensorModifiedError, match="codec='none'"):
        steps()
    forget_failed_backward()
    assert_same_bits(step(False), torch.autograd.grad(program(False), (x, weight, other)))
    assert_empty(offloader)


@ON_EACH_DEVICE
@pytest.mark.parametrize("codec", ["auto", "exact"])
def test_a_change_of_one_of_two_products_in_each_forward(where: str, codec: str, make_offloader: Make) -> None:
    """The other one has its bits, and no comparison shows the change where operands have moved away by then."""
    offloader = make_offloader(codec=codec, policy="all")
    following(offloader, 0)
    x, weight, other = finite_inputs(where)

    def block(x: Tensor) -> Tensor:
        right, changed = (x @ weight) * (x @ other), (x @ other) * (x @ other + 1)
        changed.data.mul_(2)
        offloader.synchronize()
        return (right @ weight + changed @ weight).sin()

    expected = torch.autograd.grad(block(x).sum(), (x, weight, other))
    for _ in range(3):
        with offloader:
            loss = checkpoint(block, x, use_reentrant=False).sum()
        offloader.synchronize()
        assert_same_bits(torch.autograd.grad(loss, (x, weight, other)), expected)
    first = NBYTES if where != "cpu" or codec == "exact" else 0
    assert offloader.statistics().derived_bytes == first, "of the first one, before the second one was seen"


def _in_regions(where: str) -> str:
    """The least `codec` with which regions that run once do not save their products."""
    return "exact" if where == "cpu" else "auto"


@ON_EACH_DEVICE
def test_a_change_in_a_region_that_runs_once_later(where: str, make_offloader: Make) -> None:
    """The regions share a module's name, and the results of one were right in all forwards before."""
    offloader = make_offloader(policy="all", codec=_in_regions(where))
    x, weight, other = finite_inputs(where)

    def block(x: Tensor, change: bool) -> Tensor:
        product = (x @ weight) * (x @ other)
        product.data.mul_(2 if change else 1)
        return (product @ weight).sin()

    expected = torch.autograd.grad(block(block(x, False), True).sum(), (x, weight, other))
    for once in ({0}, {0}, {0, 1}, {0, 1}):
        following(offloader, *once)
        with offloader:
            y = checkpoint(block, x, False, use_reentrant=False)
            loss = checkpoint(block, y, True, use_reentrant=False).sum()
        offloader.synchronize()
        assert_same_bits(torch.autograd.grad(loss, (x, weight, other)), expected)
    assert offloader.statistics().derived_bytes == 4 * NBYTES


@ON_EACH_DEVICE
@pytest.mark.parametrize("before", [True, False], ids=["saved before the region", "saved in it alone"])
def test_a_product_that_is_saved_before_a_region_is_not_computed_again(
    where: str, before: bool, make_offloader: Make
) -> None:
    offloader = make_offloader(policy="all")
    following(offloader, 0)
    x, weight, other = inputs(where)
    with offloader:
        product = (x @ weight) * (x @ other)
        loss = product.sin().sum() if before else 0.0
        loss = loss + checkpoint(torch.cos, product, use_reentrant=False).sum()
    assert offloader.statistics().derived_bytes == (0 if before or where == "cpu" else NBYTES)
    loss.backward()


@ON_EACH_DEVICE
def test_one_in_sixteen_is_compared_after_the_first_forward(
    where: str, offloader: Offloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in its turn."""
    compared: list[int] = []
    has_bits_of = results.Results._has_bits_of

    def noted(found: Any, whole: Tensor, *others: Any, **options: Any) -> Any:
        compared.append(round(whole.detach().view(-1)[0].item()))
        return has_bits_of(found, whole, *others, **options)

    monkeypatch.setattr(results.Results, "_has_bits_of", noted)
    ones = torch.ones(64, 64).to(where).requires_grad_()
    count = results.ONE_IN + 1

    def step() -> int:
        compared.clear()
        with offloader:
            loss = sum(((ones * number) * (ones * 1.0)) @ ones for number in range(count)).sum()  # type: ignore[union-attr]
        loss.backward()
        return len(compared)

    assert step() == count
    if where == "cpu":
        assert step() == count
        return
    seen = set()
    for _ in range(results.ONE_IN):
        assert step() <= 2
        seen.update(compared)
    assert seen == set(range(count))


@ON_EACH_DEVICE
def test_what_the_graph_does_not_show_is_saved_as_it_is(where: str, offloader: Offloader) -> None:
    x, weight, other = inputs(where)

    class Product(torch.autograd.Function):
        """Named like an operator of PyTorch."""

        @staticmethod
        def forward(ctx: Any, one: Tensor, two: Tensor) -> Tensor:
            ctx.save_for_backward(one, two)
            return one * two

        @staticmethod
        def backward(ctx: Any, *given: Tensor) -> Any:
            one, two = ctx.saved_tensors
            return given[0] * two, given[0] * one

    Product.__name__ = "MulBackward0"

    def program(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        held = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach() * 1.0, lambda t: t * 1.0)
        with held:  # hooks of the program's own hold the operands
            product = (x @ weight) * (x @ other)
        total: Tensor = product @ weight
        total = total + ((x @ weight) * other.detach()) @ weight  # its node does not save the first operand
        total = total + (x @ weight * 2.0) @ weight + Product.apply(x @ weight, x @ other) @ weight
        return total + (torch.mul(x @ weight, x @ other).add_(1.0)) @ weight

    expected = gradients(program, (x, weight, other), None)
    for _ in range(2):
        assert_same_bits(gradients(program, (x, weight, other), offloader), expected)
    assert offloader.statistics().derived_bytes == 0
    assert_empty(offloader)


@ON_EACH_DEVICE
@pytest.mark.parametrize("views", [False, True], ids=["", "through views"])
def test_a_long_chain_of_products_is_not_computed_at_once(
    where: str, views: bool, offloader: Offloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are more of its nodes read than needed. The graph shows no operation at a view."""
    level, read = results._level, list[Any]()

    def noted(node: Any, *given: Any) -> int:
        read.append(type(node))
        return level(node, *given)

    monkeypatch.setattr(results, "_level", noted)
    factors = tuple((1.0 + torch.rand(64, 64) / 10).to(where).requires_grad_() for _ in range(40))

    def program(*factors: Tensor) -> Tensor:
        product = factors[0] @ factors[1]
        for factor in factors[2:]:
            product = product * (factor @ factors[0])
            product = product.view(-1).view(64, 64) if views else product
        return product

    expected = gradients(program, factors, None)
    for _ in range(2):
        assert_same_bits(gradients(program, factors, offloader), expected)
    assert accounts_of(offloader).recompute_peak_bytes <= (results.LEVELS + 1) * NBYTES
    assert len(read) < 2 * 40 * 2 * 5, "a few for each save"
    assert offloader.statistics().derived_bytes > 0


@ON_EACH_DEVICE
def test_a_tensor_that_the_program_keeps_for_itself_is_no_operand(where: str, offloader: Offloader) -> None:
    x, weight, other = inputs(where)
    with offloader:
        gate, up = x @ weight, actoffload.keep(x @ other)
        product = gate * up
        expected = product.detach().clone()
        loss = product @ weight
        del product
    up.data.fill_(3.0)  # its memory has another use by now
    function: Any = loss.grad_fn
    assert_same_bits([function._saved_self], [expected])


@ON_EACH_DEVICE
@pytest.mark.parametrize(("retained", "most"), [(False, 2), (True, results.HELD + 1)])
def test_backward_holds_few_of_them(where: str, retained: bool, most: int, offloader: Offloader) -> None:
    x, weight, other = inputs(where)
    with offloader:
        total = x
        for _ in range(12):
            total = ((total @ weight) * (total @ other)) @ weight
        loss = total.sum()
    offloader.synchronize()
    loss.backward(retain_graph=retained)
    offloader.statistics()
    assert 0 < accounts_of(offloader).recompute_peak_bytes <= most * NBYTES


@ON_EACH_DEVICE
def test_an_operand_that_its_owner_frees_until_backward(where: str, offloader: Offloader, make_offloader: Make) -> None:
    """As FSDP and ZeRO-3 do with parameters, which are back for the nodes that need them, and Megatron with outputs."""
    x, weight, other = inputs(where)
    parameter = nn.Parameter(torch.randn(64, 64, device=where))
    expected = gradients(lambda *t: ((t[0] @ t[1]) * parameter) @ t[1], (x, weight), None)
    with offloader:
        loss = (((x @ weight) * parameter) @ weight).square().mean()
    held, storage = parameter.detach().clone(), parameter.untyped_storage()

    def fill(gradient: Tensor) -> None:
        storage.resize_(held.nbytes)
        parameter.data.copy_(held)

    storage.resize_(0)
    node: Any = loss.grad_fn
    product = node.next_functions[0][0].next_functions[0][0].next_functions[0][0]
    assert product.name() == "MulBackward0"
    product.register_prehook(lambda given: fill(given[0]))
    assert_same_bits(torch.autograd.grad(loss, (x, weight)), expected)
    assert offloader.statistics().derived_bytes == 0
    del loss, node, product
    assert_empty(offloader)
    keeping = make_offloader(codec="exact", policy="keep")
    with keeping:
        gate, up = x @ weight, x @ other
        loss = ((gate * up) @ weight).sum()
    gate.untyped_storage().resize_(0)
    with pytest.raises(StateError, match="codec='none'"):
        loss.backward()
    del loss, gate, up
    forget_failed_backward()
    assert_empty(keeping)


@ON_EACH_DEVICE
def test_views_that_are_negative_small_or_saved_in_backward_are_saved_as_they_are(
    where: str, offloader: Offloader
) -> None:
    x, weight, other = inputs(where)

    def program(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        product = ((x @ weight) * (x @ other)).view(64, 32, 2)
        # The simulated device has no such views.
        negative = torch.view_as_complex(product).conj().imag if where == "cpu" else -product[..., 1]
        return (product.view(64, 64) @ weight)[:, :32] + negative.square() + product[:, :3, 0] @ weight[:3, :32]

    expected = gradients(program, (x, weight, other), None)
    for _ in range(2):
        assert_same_bits(gradients(program, (x, weight, other), offloader), expected)

    def small(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        return ((x @ weight) * (x @ other))[:3] @ weight

    before = offloader.statistics().derived_bytes
    assert before > 0
    gradients(small, (x, weight, other), offloader)
    assert offloader.statistics().derived_bytes == before


@pytest.mark.simulated
def test_a_scalar_of_the_cpu_is_no_operand(device: SimulatedDevice) -> None:
    x, weight, _ = inputs(NAME)
    scale = torch.tensor(0.5, requires_grad=True)

    def program(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return ((x @ weight) * (scale * 2.0)) @ weight

    with simulated(codec="exact") as offloader:
        tensors = (x, weight, scale)
        assert_same_bits(gradients(program, tensors, offloader), gradients(program, tensors, None))
        assert offloader.statistics().derived_bytes == 0


@pytest.mark.simulated
def test_none_is_computed_while_a_graph_is_captured(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of the flag would be captured, and would run at each replay."""
    x, weight, other = inputs(NAME)
    with simulated(codec="exact", policy="keep") as offloader:  # else the read of an operand is refused already
        with offloader:
            loss = gated(x, weight, other).sum()
        offloader.synchronize()
        gradient_after_a_capture(loss, x, monkeypatch)
        del loss


@pytest.mark.simulated
def test_a_change_stays_known_while_a_handle_of_its_forward_is_alive(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later forward, or the backward of another graph, does not forget it."""
    monkeypatch.setattr(results, "ONE_IN", 1)
    row, column = torch.ones(1, 64, device=NAME).requires_grad_(), torch.ones(64, 1, device=NAME).requires_grad_()
    with simulated(codec="exact", min_bytes=NBYTES) as offloader:

        def forward(change: bool) -> Tensor:
            with offloader:
                product = (row * 2.0) * (column * 2.0)  # small operands make no records
                if change:
                    product.data[5, 5] += 1.0
                return product.sin().sum()

        torch.autograd.grad(forward(False), row)  # the host waits for the first comparison alone
        losses = [forward(True), forward(False)]
        for _ in range(2):
            for loss in losses:
                with pytest.raises(SavedTensorModifiedError):
                    torch.autograd.grad(loss, row, retain_graph=True)
            losses.append(forward(False))
        del loss, losses
        forget_failed_backward()
        torch.autograd.grad(forward(False), row)


@ON_EACH_DEVICE
def test_a_result_that_another_graph_saves_as_well(where: str, offloader: Offloader) -> None:
    """It outlives the graph that shows how it is computed."""
    x, weight, other = inputs(where)

    def program(context: Any) -> list[Tensor]:
        with context:
            product = (x @ weight) * (x @ other)
            first = (product @ weight).sum()
            second = (product.detach() @ weight).sum()
            del product
        found = list(torch.autograd.grad(first, (x, weight, other)))
        del first
        return [*found, *torch.autograd.grad(second, weight)]

    assert_same_bits(program(offloader), program(nullcontext()))
    assert_empty(offloader)


class Layers(nn.Module):
    """Layers with gates, each under a checkpoint."""

    def __init__(self, where: str, count: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers: Any = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(64, 64) for name in ("gate", "up", "down")}) for _ in range(count)
        ).to(where)
        self.x = torch.randn(64, 64).to(where)

    def gradients(self, context: Any) -> list[Tensor | None]:
        def run(layer: Any, x: Tensor) -> Tensor:
            out: Tensor = layer["down"](silu(layer["gate"](x)) * layer["up"](x))
            return x + out

        self.zero_grad()
        x = self.x
        with context:
            for layer in self.layers:
                x = checkpoint(run, layer, x, use_reentrant=False)
            loss = x.square().mean()
        loss.backward()
        return [parameter.grad for parameter in self.parameters()]


@ON_EACH_DEVICE
@pytest.mark.parametrize("codec", ["auto", "exact", "none"])
def test_by_default_no_product_outside_of_regions_is_computed_again(
    where: str, make_offloader: Make, codec: str
) -> None:
    x = torch.randn(64, 64).to(where).requires_grad_()
    offloader = make_offloader(codec=codec, policy="all")
    with offloader:
        loss = ((x * 2).exp() * (x * 3)).square().sum()
    loss.backward()
    assert offloader.statistics().derived_bytes == (NBYTES if codec == "exact" else 0)


@ON_EACH_DEVICE
def test_regions_that_run_once_do_not_save_them(where: str, make_offloader: Make) -> None:
    """And a plan on paper knows that: it is made for the places that the forward then has."""
    model = Layers(where)
    expected = model.gradients(nullcontext())
    offloader = make_offloader(policy="auto", device_budget=16 * NBYTES)
    once, derived = [], []
    for _ in range(16):
        assert_same_bits(model.gradients(offloader), expected)
        statistics = offloader.statistics()
        once.append(statistics.regions_once)
        derived.append(statistics.derived_bytes)
    pilot = autopilot_of(offloader)
    assert any(once), "on a busy machine all may run again in the last steps"
    products = 0 if where == "cpu" else 2  # and its activation; on the CPU that is not the default
    assert derived[-1] == products * sum(once) * NBYTES, "where a region runs again, all is saved as it is"
    assert not [reason for reason in pilot.history if "other sizes" in reason]
    assert offloader.statistics().plan_peak_bytes <= 17 * NBYTES, "as without the codec, at these sizes"
    assert_empty(offloader)


@ON_EACH_DEVICE
def test_a_region_that_has_run_again_gives_its_room_to_a_result(where: str, make_offloader: Make) -> None:
    """The result is the first tensor that backward needs of the region before it. Later steps count no save."""
    model = Layers(where, 2)
    offloader = make_offloader(policy="keep", codec=_in_regions(where))
    following(offloader, 0)
    tier, held = tier_of(offloader), list[int]()
    make_room = tier.make_room

    def noted(nbytes: int) -> Any:
        held.append(accounts_of(offloader).recomputed_bytes if nbytes == NBYTES else 0)
        return make_room(nbytes)

    tier.make_room = noted
    for _ in range(3):
        model.gradients(offloader)
    assert offloader.statistics().derived_bytes
    assert offloader.statistics().recompute_peak_bytes > 2 * NBYTES
    assert max(held) <= NBYTES, "at most another result"


@pytest.mark.simulated
@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("target", ["host", "nvme"])
def test_streams(adversary: Adversary, target: str, tmp_path: Any, device: SimulatedDevice) -> None:
    """Computed on one stream, saved on another, used by backward on both: late kernels and copies change no bit."""
    other = torch.Stream(torch.device(NAME, 0))
    layers = Layers(NAME)

    def step(context: Any) -> list[Tensor]:
        layers.zero_grad()
        x = layers.x
        with context:
            for number, layer in enumerate(layers.layers):
                with on_stream(other) if number % 2 else nullcontext():
                    x = x + layer["down"](silu(layer["gate"](x)) * layer["up"](x))
                z = torch.ones(64, 64, device=NAME) * 7  # may get memory that was freed just now
                x = x * z
                del z
            ahead = torch.accelerator.current_stream()
            product = layers.layers[0]["gate"](x) * layers.layers[0]["up"](x)
            other.wait_stream(ahead)
            x = x + (product * layers.layers[0]["down"].weight).tanh()
            with on_stream(other, ordered=False):  # a second stream saves the product
                y = (product * layers.layers[1]["down"].weight).tanh()
            del product
            z = torch.ones(64, 64, device=NAME) * 7
            ahead.wait_stream(other)
            x = x + y * z
            del y, z
            loss = x.square().mean()
        loss.backward()
        return [parameter.grad for parameter in layers.parameters() if parameter.grad is not None]

    found = assert_survives(device, adversary, step, path=str(tmp_path), codec="exact", target=target)
    assert found.derived_bytes > 0


@pytest.mark.simulated
def test_what_one_stream_computes_another_does_not_take(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not be there yet."""
    x, weight, more = finite_inputs(NAME)
    with simulated(codec="exact", debug=True) as offloader:
        with offloader:
            product = (x @ weight) * (x @ more)
            expected = product.detach().cpu()
            loss = product @ weight
            del product
        function: Any = loss.grad_fn
        offloader.synchronize()
        assert function._saved_self.shape == x.shape  # waits for the flag, so that no later read does
        monkeypatch.setattr(BackwardEnd, "expect", lambda end: True)  # as in backward, which holds what it computes
        assert_streams_read_their_own(device, function, expected)


@pytest.mark.simulated
@pytest.mark.parametrize("share", [0.5, 0.6, 0.8, 0.9])
def test_a_budget_holds_as_a_product_is_computed_from_an_activation(share: float, device: SimulatedDevice) -> None:
    """Both are computed again, and lie beside each other."""

    def train(offloader: Offloader) -> int:
        """Return the allocator's least peak of four steps after the first, in which the host is ahead of the device.

        The simulated device's threads get little time on a busy machine: then memory that copies use is free later.
        """
        tensors, peaks = inputs(NAME), list[int]()
        before = torch.accelerator.memory_allocated()
        for _ in range(5):
            torch.accelerator.reset_peak_memory_stats()
            with offloader:
                x = tensors[0]
                for _ in range(6):
                    x = x + gated(x, *tensors[1:])
                loss = x.sum()
                del x
            torch.autograd.grad(loss, tensors)
            del loss
            peaks.append(torch.accelerator.max_memory_allocated() - before)
        return min(peaks[1:])

    with simulated(codec="exact", device_budget="100GiB") as offloader:
        peak, saved_bytes = train(offloader), offloader.statistics().baseline_peak_bytes
    budget = int(share * saved_bytes)
    with simulated(codec="exact", device_budget=budget) as offloader:
        assert train(offloader) - (peak - saved_bytes) <= budget + NBYTES  # the tensor in use may be another one
        assert offloader.statistics().resident_peak_bytes <= budget


@pytest.mark.simulated
@pytest.mark.parametrize(("target", "engine"), [("host", "memory"), ("nvme", "memory"), ("nvme", LateEngine)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["product", "half"])
def test_records_fetched_ahead_make_room_for_a_tensor_that_backward_computes(
    device: SimulatedDevice, tmp_path: Path, target: str, engine: Any, dtype: torch.dtype
) -> None:
    x, weight = (torch.randn(512, 512).to(NAME).requires_grad_() for _ in range(2))
    narrow = x.detach().to(dtype).requires_grad_()
    options: dict[str, Any] = {"target": target, "engine": engine, "path": tmp_path, "allow_any_filesystem": True}
    with simulated(codec="exact", **options) as offloader:
        with offloader:
            h = x * 1.0
            for _ in range(3):
                h = h.sin()
            operands = x.cos(), x.exp()
            coded = operands[0] * operands[1] if dtype is torch.float32 else narrow.float()
            found = coded @ weight
            expected = coded.clone()
            node: Any = found.grad_fn
            loss = (found + h).sum()
            del coded, found, h
        offloader.synchronize()
        device.synchronize()
        tier = tier_of(offloader)
        half = None if dtype is torch.float32 else node._raw_saved_self.data.record
        held = None if half is None else offloader.store.obtain(half, 0)  # as the program holds the operands
        away = [one for one in records_of(offloader) if not one.on_device and one is not half and one.nbytes == 1 << 20]
        torch.accelerator.empty_cache()
        device.limit(torch.accelerator.memory_reserved() + 2 * (1 << 20))
        with lock_of(offloader):
            for record in away[:2]:
                tier.fetch(record, urgent=False)
        wait_until(lambda: all(record.state is not State.FETCHING for record in away[:2]))
        with lock_of(offloader):
            tier.poll()
        _rest = fill_device()
        saved = node._saved_self
        device.limit(None)
        assert same_bits(saved, expected)
        assert not any(record.on_device for record in away[:2])
        loss.backward()
        del held


class _LateWrites(LateEngine):
    may_write = threading.Event()

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        if kind is IoKind.WRITE:
            self.may_write.wait(60)
        return super()._transfer_once(kind, views, offset)


@pytest.mark.simulated
def test_a_tensor_that_backward_computes_waits_for_writes_from_a_full_device(
    device: SimulatedDevice, tmp_path: Path
) -> None:
    _LateWrites.may_write.clear()
    x, weight = (torch.randn(512, 512).to(NAME).requires_grad_() for _ in range(2))
    options: dict[str, Any] = {"target": "nvme", "engine": _LateWrites, "path": tmp_path, "allow_any_filesystem": True}
    with simulated(codec="exact", **options) as offloader:
        with offloader:
            operands = x.cos(), x.exp()  # held, so that only the product needs memory
            product = operands[0] * operands[1]
            out = product @ weight
            expected, node = product.clone(), cast(Any, out.grad_fn)
            h = x * 1.0
            for _ in range(4):
                h = h.sin()
            loss = (out + h).sum()
            del product, out, h
        device.synchronize()
        torch.accelerator.empty_cache()
        device.limit(torch.accelerator.memory_reserved())
        _rest = fill_device()
        threading.Timer(0.2, _LateWrites.may_write.set).start()
        saved = node._saved_self
        device.limit(None)
        assert same_bits(saved, expected)
        loss.backward()
