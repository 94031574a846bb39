"""Saved tensors that stay on the device: unpack returns their memory, checks it, and no receiver can spoil it.

Autograd itself returns the very tensor that was saved if it is an input; changes to that object are then seen by its
owner.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from actoffload import Offloader, Plan
from actoffload.autograd import native
from actoffload.errors import SavedTensorModifiedError
from actoffload.planning.plan import PlanEntry
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice
from tests.harness import (
    ADVERSARIES,
    Adversary,
    MakeOffloader,
    accounts_of,
    assert_empty,
    hinder,
    lock_of,
    no_garbage_collection,
    profile_of,
    recorder_of,
    run_in_threads,
    same_bits,
    simulated,
)
from tests.unit.saved_tensors import KeepsByIndex, activation, in_python

ELEMENTS = 4096
NBYTES = 4 * ELEMENTS
COUNT = 8
Use = Callable[[Any, Tensor], Tensor]
KINDS = pytest.mark.parametrize("kind", ["below min_bytes", "policy"])
BOTH_HOOKS = pytest.mark.usefixtures("both_hooks")


def _plan(*moving: int, count: int = COUNT, prefetch_bytes: int | None = None) -> Plan:
    """A plan by which ``count`` storages stay, except these numbers."""
    entries = [PlanEntry(index=n, nbytes=NBYTES, action="offload" if n in moving else "keep") for n in range(count)]
    return Plan(entries=tuple(entries), prefetch_bytes=prefetch_bytes)


def _keeping(make_offloader: MakeOffloader, kind: str) -> Offloader:
    """An offloader that keeps the tensors of these tests, for this reason."""
    offloader = make_offloader(policy=_plan(), min_bytes=1 if kind == "policy" else NBYTES + 1, engine="memory")
    with offloader:  # from the second forward on the plan is proven
        _sines(_input())
    return offloader


def product(use: Use) -> Any:
    """A function that saves one of its factors; ``use`` is its backward."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
            # A tensor without a history: of any other, autograd returns a copy, in place of a hook's result.
            ctx.save_for_backward(other.detach())
            return x * other

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return use(ctx, grads[0]), None

    return Product


def read_once(ctx: Any, gradient: Tensor) -> Tensor:
    result: Tensor = gradient * ctx.saved_tensors[0]
    return result


def emptied(ctx: Any, gradient: Tensor) -> Tensor:
    """Transformer Engine does so, to have the memory back at once."""
    (saved,) = ctx.saved_tensors
    result: Tensor = gradient * saved
    saved.data = torch.empty(0)
    return result


def replaced(ctx: Any, gradient: Tensor) -> Tensor:
    (saved,) = ctx.saved_tensors
    result: Tensor = gradient * saved
    saved.data = torch.zeros_like(saved)
    saved.requires_grad_()
    return result


def read_twice(ctx: Any, gradient: Tensor) -> Tensor:
    result: Tensor = gradient * ctx.saved_tensors[0] * ctx.saved_tensors[0]
    return result


def replaced_between_reads(ctx: Any, gradient: Tensor) -> Tensor:
    ctx.saved_tensors[0].data = torch.zeros(ELEMENTS)
    result: Tensor = gradient * ctx.saved_tensors[0]
    return result


def changed_in_place(ctx: Any, gradient: Tensor) -> Tensor:
    result: Tensor = gradient * ctx.saved_tensors[0]
    ctx.saved_tensors[0].mul_(2)
    return result


def run(kind: str, use: Use, retains: tuple[bool, ...], make_offloader: MakeOffloader | None) -> list[Any]:
    """The gradients of several backwards, or the errors that they raise."""
    x = torch.linspace(1, 2, ELEMENTS).requires_grad_()
    offloader = None if make_offloader is None else _keeping(make_offloader, kind)
    with offloader or contextlib.nullcontext():
        out: Tensor = product(use).apply((x * 1.0).sin(), activation(3, ELEMENTS)).sum()
    found: list[Any] = []
    for retain in retains:
        try:
            found.append(torch.autograd.grad(out, x, retain_graph=retain)[0])
        except RuntimeError as error:
            found.append(error.with_traceback(None))  # the frames of a traceback hold the graph
    del out
    if offloader is not None:
        assert kind in offloader.statistics().kept_bytes
        assert_empty(offloader)
    return found


@pytest.mark.pairs
@KINDS
@pytest.mark.parametrize("use", [emptied, replaced, read_once, read_twice])
@pytest.mark.parametrize("retains", [(False,), (True, True, False)])
def test_each_backward_gets_the_saved_bits(
    kind: str, use: Use, retains: tuple[bool, ...], make_offloader: MakeOffloader
) -> None:
    (expected,) = run(kind, read_twice if use is read_twice else read_once, (False,), None)
    found = run(kind, use, retains, make_offloader)
    assert [same_bits(one, expected) for one in found] == [True] * len(retains)


@KINDS
@pytest.mark.parametrize("retains", [(False,), (True, False)])
def test_a_node_that_replaces_data_between_reads_gets_the_same_or_an_error(
    kind: str, retains: tuple[bool, ...], make_offloader: MakeOffloader
) -> None:
    (expected,) = run(kind, read_once, (False,), None)
    for one in run(kind, replaced_between_reads, retains, make_offloader):
        if isinstance(one, RuntimeError):
            assert isinstance(one, SavedTensorModifiedError)
            assert "read ctx.saved_tensors once" in str(one)
        else:
            assert same_bits(one, expected)


@KINDS
def test_an_inplace_change_is_an_error_in_the_next_backward(kind: str, make_offloader: MakeOffloader) -> None:
    for maker in (None, make_offloader):
        first, second = run(kind, changed_in_place, (True, False), maker)
        assert isinstance(first, Tensor)
        assert isinstance(second, RuntimeError)
        assert "modified by an inplace operation" in str(second)


@KINDS
def test_outside_of_backward_each_read_gets_its_own_alias(kind: str, make_offloader: MakeOffloader) -> None:
    offloader = _keeping(make_offloader, kind)
    with offloader:
        h = activation(1, ELEMENTS).sin()
        out = h.sin()
    for _ in range(3):
        saved = out.grad_fn._saved_self  # type: ignore[union-attr]
        assert saved.data_ptr() == h.data_ptr(), "unpack returns the same memory"
        assert same_bits(saved, h)
        saved.data = torch.zeros(0)
    del h, out, saved
    assert_empty(offloader)


# -- under a plan ------------------------------------------------------------------------------------------------------


def _input() -> Tensor:
    return torch.linspace(0, 1, ELEMENTS, requires_grad=True)


def _sines(x: Tensor) -> Tensor:
    """A chain that saves `COUNT` storages."""
    h = x * 1.0
    for _ in range(COUNT):
        h = h.sin()
    return h


def test_views_and_conjugates_of_kept_storages_come_back_as_they_were(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=_plan(1, count=3), engine="memory")
    with offloader:
        first, second = _input() * 1.0, _input() * 2.0
        turned = torch.view_as_complex((_input() * 3.0).view(-1, 2)).conj()
        saved = [first, first.view(2, -1), second, turned]
        graphs = [one.sin() for one in saved]
    offloader.synchronize()
    saved[2] = second.clone()
    del second  # has moved; a storage that is alive is returned as it is
    for place, (graph, expected) in enumerate(zip(graphs, saved, strict=True)):
        found = graph.grad_fn._saved_self  # type: ignore[union-attr]
        assert same_bits(found, expected)
        assert found.is_conj() == expected.is_conj()
        assert (found.data_ptr() == expected.data_ptr()) == (place != 2)
    statistics = offloader.statistics()
    assert statistics.kept_bytes == {"policy": 2 * NBYTES}
    assert statistics.nvme_read_bytes > 0
    del first, turned, saved, graphs, graph, expected, found
    assert_empty(offloader)


@pytest.mark.parametrize("first_out", [0, 1])
def test_memory_of_a_kept_storage_dies_with_the_last_graph(first_out: int, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=_plan(count=1))
    with offloader, no_garbage_collection():
        saved = _input() * 1.0
        graphs = [saved.sin(), saved.cos()]
        memory = StorageWeakRef(saved.untyped_storage())
        del saved
        del graphs[first_out]
        assert not memory.expired()
        graphs.clear()
        assert memory.expired()
    assert_empty(offloader)


@pytest.mark.parametrize("budget", [None, (COUNT + 2) * NBYTES], ids=["no budget", "budget"])
@pytest.mark.parametrize("moving", [(), (0,), (0, 3, 4), tuple(range(COUNT))])
def test_a_second_backward_under_a_plan_finds_all_again(
    moving: tuple[int, ...], budget: int | None, make_offloader: MakeOffloader
) -> None:
    x = _input()
    (expected,) = torch.autograd.grad(_sines(x).sum(), x)
    plan = _plan(*moving, prefetch_bytes=2 * NBYTES)
    offloader = make_offloader(policy=plan, engine="memory", device_budget=budget)
    for _ in range(2):
        with offloader:
            out = _sines(x)
        offloader.synchronize()
        for retain in (True, False):
            (gradient,) = torch.autograd.grad(out.sum(), x, retain_graph=retain)
            assert same_bits(gradient, expected)
        del out
        assert_empty(offloader)
    assert (offloader.statistics().nvme_read_bytes > 0) == bool(moving)


@BOTH_HOOKS
def test_a_second_backward_reads_nothing_that_it_has_passed(make_offloader: MakeOffloader) -> None:
    """A storage that stays was saved twice: backward comes to it first of all, and again when it is nearly done."""
    plan = _plan(0, *range(2, COUNT), prefetch_bytes=4 * NBYTES)
    offloader = make_offloader(policy=plan, engine="memory")
    x = _input()
    for _ in range(2):
        with offloader:
            kept = (x * 1.0).sin() * 1.0
            out = kept.sin()
            for _ in range(COUNT - 2):
                out = (out * 1.0).sin()
            out = (out + kept.cos()).sum()
        offloader.synchronize()
        left = []
        for _ in range(3):
            torch.autograd.grad(out, x, retain_graph=True)
            left.append(accounts_of(offloader).resident_bytes)
        del kept, out
        assert left == [NBYTES] * 3
    assert_empty(offloader)


@pytest.mark.simulated
@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_tensors_stay_and_move_side_by_side_on_a_device(device: SimulatedDevice, adversary: Adversary) -> None:
    """No copy touches a storage that stays, nor memory with a new owner."""
    x = _input().detach().to(NAME).requires_grad_()
    (expected,) = torch.autograd.grad(_sines(x).sum(), x)
    accelerator = SimulatedAccelerator()
    hinder(device, accelerator, adversary)
    with simulated(accelerator, policy=_plan(0, 2, 5), debug=True) as offloader:
        for _ in range(3):
            with offloader:
                out = _sines(x)
            (gradient,) = torch.autograd.grad(out.sum(), x)
            del out
            assert same_bits(gradient, expected)
        statistics = offloader.statistics()
        assert statistics.kept_bytes == {"policy": 3 * 5 * NBYTES}
        assert statistics.host_written_bytes > 0
        assert statistics.live_records == 0


def _saved_by_another_thread(offloader: Offloader, x: Tensor, saved: Tensor) -> Tensor:
    """The output of a forward in a thread of its own, which saves a tensor that this thread has saved."""
    outputs: list[Tensor] = []

    def forward() -> None:
        with offloader:
            outputs.append((x * 3.0).sin().sum() + saved.cos().sum())

    run_in_threads(forward)
    return outputs.pop()


def _saves_in_many_ways(offloader: Offloader) -> tuple[list[Tensor], list[Plan]]:
    """Steps that save storages again: whole, as views, changed, with other counters, moved, and never unpacked.

    Returns:
        The gradients, and the decisions on each forward.
    """
    found: list[Tensor] = []
    plans = []
    for _ in range(3):
        x = _input()
        with offloader:
            first, second, third = (x * 1.0 for _ in range(3))
            turned = torch.view_as_complex(second.view(-1, 2)).conj()
            out = first.sin() + first.view(2, -1).cos().view(-1)
            out = out + second.sin() + second.cos() + (turned * turned).abs().sum() + third.detach().mul_(2).sum()
            chunks = third.clone().unsafe_chunk(2)
            with torch.no_grad():
                second.detach()[:7].mul_(1)
            out = out + second.sin().sum()  # another version, which has a place of its own
            out = out + sum(chunk.sin().sum() for chunk in chunks) + (x[:3] * 1.0).exp().sum()
            out = out + first[: ELEMENTS // 4].exp().sum()
            parts = x * 1.0
            out = out + parts[512:515].sin().sum() + parts[:3].cos().sum()
            moved, beside = x * 1.0, x * 1.0
            out = out + moved.sin().sum() + beside.sin().sum()
            moved.untyped_storage().resize_(3 * NBYTES)  # to another address, and no version counter shows that
            out = out + moved.cos().sum()
        plans.append(offloader.plan)
        found += torch.autograd.grad(_saved_by_another_thread(offloader, x, beside), x, retain_graph=True)
        offloader.synchronize()  # else chance decides whether backward forwards a storage from its write
        with contextlib.suppress(SavedTensorModifiedError):
            found += torch.autograd.grad(out.sum(), x, retain_graph=True)
        out = first.sin()
        with offloader:
            out = ((first * 1.0).sin() * third).sum()
            unused = [(x * factor).sin() for factor in (1.0, 2.0)]
            del unused[0]
            unused.clear()
        plans.append(offloader.plan)
        offloader.synchronize()
        for retain in (True, False):
            found += torch.autograd.grad(out, x, retain_graph=retain)
        del first, second, third, turned, out, chunks, parts, moved, beside
    return found, plans


COUNTED = (
    "packed_tensors", "packed_bytes", "deduplicated_bytes", "kept_bytes", "steps", "microbatches", "live_records",
    "baseline_peak_bytes",
)  # fmt: skip


@pytest.mark.parametrize("moving", [(), (3, 6)])
def test_places_count_as_records_do(moving: tuple[int, ...], make_offloader: MakeOffloader) -> None:
    """A plan that keeps the storages which a policy has kept gives the same bits, decisions and statistics."""

    def outcome(policy: Any) -> Any:
        offloader = make_offloader(policy=policy, engine="memory", min_bytes=64, prefetch_bytes=NBYTES)
        found, plans = _saves_in_many_ways(offloader)
        statistics = offloader.statistics()
        assert_empty(offloader)
        return found, plans, [getattr(statistics, name) for name in COUNTED]

    expected, plans, counts = outcome(KeepsByIndex(tuple(place not in moving for place in range(100))))
    assert len(plans[0].entries) < 100
    assert [entry.action for entry in plans[0].entries].count("offload") == len(moving)
    for hooks in (contextlib.nullcontext(), in_python()):
        with hooks:
            found, planned, counted = outcome(plans[0])
        assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))
        assert [plan.entries for plan in planned] == [plan.entries for plan in plans]
        assert counted == counts


def test_a_storage_that_a_plan_keeps_counts_as_long_as_it_lives(make_offloader: MakeOffloader) -> None:
    offloader = _keeping(make_offloader, "policy")
    with offloader:
        out = _sines(_input())
    statistics = offloader.statistics()
    assert statistics.live_records == COUNT
    assert statistics.resident_peak_bytes == statistics.baseline_peak_bytes == COUNT * NBYTES
    del out
    assert_empty(offloader)


def test_two_threads_may_save_a_storage_that_a_plan_keeps(make_offloader: MakeOffloader) -> None:
    offloader = _keeping(make_offloader, "policy")
    shared = _input().detach() * 1.0
    meet = threading.Barrier(3, timeout=30)

    def forward() -> None:
        with offloader:
            out = (_input().sin() * 1.0).cos()  # the first storage of a forward has a record
            meet.wait()
            meet.wait()
            (out * shared).sum().backward()

    threads = [threading.Thread(target=forward) for _ in range(2)]
    for thread in threads:
        thread.start()
    meet.wait()
    with lock_of(offloader):
        meet.wait()
        time.sleep(0.2)  # both find that the storage is new, unless they look under the lock
    for thread in threads:
        thread.join()
    assert_empty(offloader)


@pytest.mark.skipif(native.load() is None, reason=native.refusal())
def test_counters_are_compared_in_one_step(monkeypatch: pytest.MonkeyPatch, make_offloader: MakeOffloader) -> None:
    """A bump of the version that another thread sees is an error in its backward, so no Python may come in between."""
    offloader = _keeping(make_offloader, "policy")

    def bump(*_: Any) -> None:
        raise AssertionError("in Python")

    monkeypatch.setattr(torch._C._autograd, "_unsafe_set_version_counter", bump)
    with offloader:
        _sines(_input())
        saved = _input() * 1.0
        graphs = [saved.sin(), saved.cos()]
    assert offloader.statistics().deduplicated_bytes >= NBYTES
    del graphs


def test_each_call_of_close_waits(make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may have begun to close it, and has not ended."""
    offloader = _keeping(make_offloader, "policy")
    waited: list[bool] = []
    close = offloader.store.tiers.close

    def noted(*, wait: bool) -> None:
        waited.append(wait)
        close(wait=wait)

    monkeypatch.setattr(offloader.store.tiers, "close", noted)
    offloader.close()
    offloader.close()
    assert waited == [True, True]


@BOTH_HOOKS
def test_a_step_that_is_recorded_under_a_plan_has_all_storages(make_offloader: MakeOffloader) -> None:
    offloader = _keeping(make_offloader, "policy")
    recorder_of(offloader).begin()
    with offloader:
        out = _sines(_input())
    out.sum().backward()
    del out
    recorder_of(offloader).finish()
    assert [storage.nbytes for storage in profile_of(offloader).storages] == COUNT * [NBYTES]


def test_a_closed_offloader_shuts_while_storages_that_a_plan_keeps_live(make_offloader: MakeOffloader) -> None:
    """Nothing of the library's runs as the last of these dies, so their end cannot be waited for."""
    offloader = make_offloader(policy=_plan(count=2))
    for _ in range(2):  # from the second forward on the plan is proven
        x = _input()
        with offloader:
            graphs = [(x * factor).sin() for factor in (1.0, 2.0)]
    offloader.close()
    assert not offloader.store.shared.stopped, "the first storage of a forward has a record"
    del graphs[0]
    for thread in threading.enumerate():
        if thread.name == "actoffload-close":
            thread.join()
    assert offloader.store.shared.stopped
    graphs[0].sum().backward()
    assert same_bits(x.grad, 2.0 * torch.cos(2.0 * x.detach()))
    del graphs
    assert_empty(offloader)


class ReturnsSaved(torch.autograd.Function):
    """Returns the first of its two saved tensors, itself, as a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, saved: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1], inputs[1] * 2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        first, _ = ctx.saved_tensors
        return first, None


def _step_in_a_compiled_function(forward: Callable[[], Tensor]) -> None:
    """A graph break leaves the rest to Python, while PyTorch's compiler looks at each frame."""

    def step() -> None:
        torch._dynamo.graph_break()
        forward().backward(retain_graph=True)

    torch.compile(step, backend="eager")()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # PyTorch's compiler looks at it
@pytest.mark.pairs
@pytest.mark.parametrize("way", ["plain", "vmap", "compiled"])
@BOTH_HOOKS
@pytest.mark.parametrize("kind", ["below min_bytes", "policy", "moves"])
def test_a_saved_tensor_that_is_a_leafs_gradient_is_not_shared_with_it(
    make_offloader: MakeOffloader, kind: str, way: str
) -> None:
    """If they shared memory, an in-place change of the gradient would change the saved tensor and other gradients."""

    def run(context: Any) -> list[Tensor]:
        one, other = torch.zeros(ELEMENTS, requires_grad=True), torch.zeros(ELEMENTS, requires_grad=True)
        saved = torch.arange(ELEMENTS, dtype=torch.float32) * 2
        function = torch.func.vmap(ReturnsSaved.apply) if way == "vmap" else ReturnsSaved.apply
        with context:
            loss = function(one, saved).sum() + function(other, saved).sum()
        if way == "compiled":
            _step_in_a_compiled_function(lambda: loss)
        else:
            loss.backward(retain_graph=True)
        assert one.grad is not None
        assert other.grad is not None
        one.grad.mul_(3)
        loss.backward()
        return [one.grad, other.grad, saved]

    offloader = make_offloader(engine="memory") if kind == "moves" else _keeping(make_offloader, kind)
    for found, expected in zip(run(offloader), run(contextlib.nullcontext()), strict=True):
        assert same_bits(found, expected)


@pytest.mark.pairs
@BOTH_HOOKS
@KINDS
@pytest.mark.parametrize("fails", [False, True])
def test_a_tensor_that_a_function_read_is_released(make_offloader: MakeOffloader, kind: str, fails: bool) -> None:
    """The next Function's unpack releases a tensor that a Function has read; backward's end would be too late."""
    references: list[StorageWeakRef] = []
    alive: list[bool] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
            ctx.save_for_backward(saved)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            (saved,) = ctx.saved_tensors
            alive.append(any(not reference.expired() for reference in references))
            references.append(StorageWeakRef(saved.untyped_storage()))
            if fails and len(alive) == 3:
                raise ValueError("of the test")
            return grads[0], None

    x = torch.ones(ELEMENTS, requires_grad=True)
    with _keeping(make_offloader, kind):
        y = x
        for number in range(3):
            y = Looks.apply(y, activation(number, ELEMENTS).detach())
    with pytest.raises(ValueError, match="of the test") if fails else contextlib.nullcontext():
        y.sum().backward()
    del y
    assert alive == [False, False, False]
    assert all(reference.expired() for reference in references)


@BOTH_HOOKS
@KINDS
def test_a_builtin_nodes_unpack_releases_it_too(make_offloader: MakeOffloader, kind: str) -> None:
    """A fused loss is a Function that saves the most of all, and perhaps no other Function follows it."""
    alive: list[bool] = []
    x, saved = _input(), torch.ones(ELEMENTS)
    reference = StorageWeakRef(saved.untyped_storage())
    with _keeping(make_offloader, kind):
        first = (x * 1.0).sin()
        first.register_hook(lambda gradient: alive.append(not reference.expired()))
        loss = product(read_once).apply(first.sin(), saved).sum()
        del saved
    loss.backward()
    assert alive == [False]
