"""Programs under selective checkpointing: what PyTorch allows and refuses, nested, in threads, dropped, failing."""

from __future__ import annotations

import contextlib
import gc
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as plain_contexts

from actoffload import Offloader, create_selective_checkpoint_contexts, no_offload
from actoffload.engines.base import IoKind
from actoffload.errors import StorageReadError
from actoffload.testing.faults import FailingEngine
from tests.harness import (
    MakeOffloader,
    assert_empty,
    forget_failed_backward,
    no_garbage_collection,
)
from tests.selective import (
    AGAIN,
    ATEN,
    MATMULS,
    assert_same,
    gradients_of,
    matrix,
    region,
    save_all,
)


@pytest.fixture
def offloader(make_offloader: MakeOffloader) -> Offloader:
    """Moves everything."""
    return make_offloader(policy="all")


# -- what PyTorch's own does -------------------------------------------------------------------------------------------


def test_calls_of_one_operation_keep_their_order(offloader: Offloader) -> None:
    x = matrix()

    def function(x: Tensor) -> Tensor:
        for scale in (1.0, 0.5, 0.25):
            x = ((x * scale) @ x).tanh() + (x @ x.t()).sin()
        return x

    expected = gradients_of(function, x)
    assert_same(gradients_of(partial(region, function, policy=MATMULS), x, context=offloader), expected)


@pytest.mark.parametrize("name", ["MUST_SAVE", "PREFER_SAVE", "MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD", "a bool"])
def test_random_operations_are_not_run_again(name: str, offloader: Offloader) -> None:
    policy = True if name == "a bool" else getattr(CheckpointPolicy, name, None)
    if policy is None:
        pytest.skip(f"PyTorch {torch.__version__} has no {name}")
    runs = 0

    def counted(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return torch.rand_like(x) * x

    def chosen(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | bool:
        assert not context.is_recompute
        return policy if op is ATEN.rand_like.default else CheckpointPolicy.MUST_RECOMPUTE

    x = matrix()
    torch.manual_seed(7)
    expected = gradients_of(lambda x: counted(x).sin(), x)
    torch.manual_seed(7)
    with offloader:
        loss = checkpoint(
            lambda x: counted(x).sin(),
            x,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(create_selective_checkpoint_contexts, chosen),
        ).sum()
    assert_same(list(torch.autograd.grad(loss, [x])), expected)
    assert runs == 3


def test_what_is_no_tensor_is_kept_as_it_is(offloader: Offloader) -> None:
    x = matrix()

    def function(x: Tensor) -> Tensor:
        scale = x.detach().max().item()  # a number is what this operation returns
        values, indices = torch.topk(x @ x, 8)
        torch._assert_async(values.max() > 0)  # and this one returns nothing
        return (values * scale + indices).sin()

    expected = gradients_of(function, x)
    assert_same(gradients_of(partial(region, function, policy=save_all), x, context=offloader), expected)


def test_complex_and_empty_tensors(offloader: Offloader) -> None:
    x = torch.randn(32, 32, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def function(x: Tensor) -> Tensor:
        y = (x.conj() @ x).conj() * x[:0].sum()
        return torch.view_as_real((y + x @ x.mH).exp()).sin()

    expected = gradients_of(function, x)
    assert_same(gradients_of(partial(region, function, policy=save_all), x, context=offloader), expected)


def test_wrapper_subclasses_are_moved_inside(offloader: Offloader) -> None:
    def leaf() -> Tensor:
        return TwoTensor(matrix().detach(), matrix(seed=1).detach()).requires_grad_()

    def run(context: Any) -> Any:
        x = leaf()
        with context:
            out = region(lambda x: torch.mm(x, x).sin().cos(), x)
        return torch.autograd.grad(out.sum(), x)[0]

    expected, found = run(contextlib.nullcontext()), run(offloader)
    assert_same([found.a, found.b], [expected.a, expected.b])
    assert offloader.core.accounts.moved_bytes == 2 * expected.a.nbytes  # of the product; x is a leaf
    assert offloader.statistics().live_records == 0


@pytest.mark.parametrize("again", [True, False], ids=["ours", "pytorch"])
def test_a_second_backward_raises(again: bool, offloader: Offloader) -> None:
    x = matrix()
    make = create_selective_checkpoint_contexts if again else plain_contexts
    with offloader, no_garbage_collection():
        loss = region(lambda x: (x @ x).sin().cos(), x, make=make).sum()
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        with pytest.raises(RuntimeError, match=AGAIN):
            torch.autograd.grad(loss, x)
    assert_same([first], gradients_of(lambda x: (x @ x).sin().cos(), x))
    del loss
    forget_failed_backward()
    assert offloader.statistics().live_records == 0


def test_two_backwards_over_different_regions_of_a_retained_graph(offloader: Offloader) -> None:
    x = matrix()
    with offloader:
        one = region(lambda x: (x @ x).sin().cos(), x)
        other = region(lambda x: (x @ x.t()).cos().sin(), one)
    (first,) = torch.autograd.grad(other.sum(), one, retain_graph=True)
    (second,) = torch.autograd.grad(one, x, first)
    function = lambda x: ((y := (x @ x).sin().cos()) @ y.t()).cos().sin()  # noqa: E731
    assert_same([second], gradients_of(function, x))


def test_gradients_of_gradients_are_refused_as_by_pytorch(offloader: Offloader) -> None:
    x = matrix()
    for make in (plain_contexts, create_selective_checkpoint_contexts):
        with offloader:
            loss = region(lambda x: (x @ x).sin().cos(), x, make=make).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match=AGAIN):
            gradient.sum().backward()


def test_an_operation_that_only_backward_runs_raises(offloader: Offloader) -> None:
    x = matrix()
    calls = 0

    def fickle(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return ((x @ x) if calls == 1 else (x.exp() @ x)).sin().cos()

    with offloader:
        loss = region(fickle, x).sum()
    with pytest.raises(RuntimeError, match="not among those of the forward"):
        loss.backward()


# -- nested, threads, ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [create_selective_checkpoint_contexts, plain_contexts], ids=["ours", "pytorch"])
@pytest.mark.parametrize("inner", [create_selective_checkpoint_contexts, plain_contexts], ids=["ours", "pytorch"])
def test_nested(outer: Any, inner: Any, offloader: Offloader) -> None:
    """Also that an outer region sees nothing of what we do: PyTorch's counts every operation."""
    x, w = matrix(), matrix(seed=1)

    def inside(x: Tensor, w: Tensor) -> Tensor:
        return torch.empty(3).fill_(2.0)[0] * (x @ w).sin() @ w

    def outside(x: Tensor, w: Tensor) -> Tensor:
        y = region(inside, (x @ w).cos(), w, make=inner, policy=save_all)
        return region(inside, y.tanh() @ w, w, make=inner, policy=MATMULS).exp()

    def everything(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return bool(save_all(context, op) is CheckpointPolicy.PREFER_SAVE and op is not ATEN.empty.memory_format)

    expected = gradients_of(outside, x, w)
    for policy in (MATMULS, everything):
        for _ in range(2):
            found = gradients_of(partial(region, outside, make=outer, policy=policy), x, w, context=offloader)
            assert_same(found, expected)
    assert offloader.statistics().live_records == 0
    ours = create_selective_checkpoint_contexts in (outer, inner)
    assert (offloader.core.accounts.moved_bytes > 0) is ours


def test_inside_of_a_plain_checkpoint(offloader: Offloader) -> None:
    """The hooks on top are the outer checkpoint's: the offloader is found below them."""
    x, w = matrix(), matrix(seed=1)

    def outside(x: Tensor, w: Tensor) -> Tensor:
        return region(lambda x, w: (x @ w).sin() @ w, x.cos(), w).exp()

    expected = gradients_of(outside, x, w)
    with offloader:
        loss = checkpoint(outside, x, w, use_reentrant=False).sum()
    statistics = offloader.statistics()
    assert statistics.packed_bytes == 4 * x.nbytes  # the inputs of the outer one, and two products
    assert_same(list(torch.autograd.grad(loss, [x, w])), expected)


def test_two_threads_each_with_its_own_offloader(make_offloader: MakeOffloader, tmp_path: Path) -> None:
    offloaders = [make_offloader(policy="all") for _ in range(2)]
    together = threading.Barrier(2)
    x = matrix()

    def function(x: Tensor) -> Tensor:
        for _ in range(8):
            x = region(lambda x: (x @ x / 64).sin().cos(), x)
        return x

    expected = gradients_of(function, x)
    found: dict[int, list[Tensor]] = {}

    def work(number: int) -> None:
        mine = matrix()
        together.wait()
        for _ in range(4):
            found[number] = gradients_of(function, mine, context=offloaders[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, offloader in enumerate(offloaders):
        assert_same(found[number], expected)
        assert offloader.statistics().packed_tensors == 4 * 8 * 2
        assert_empty(offloader)


def test_contexts_that_are_used_in_another_thread_keep(offloader: Offloader) -> None:
    x = matrix()
    with offloader:
        contexts = create_selective_checkpoint_contexts(MATMULS)
    losses: list[Tensor] = []

    def work() -> None:
        out = checkpoint(lambda x: (x @ x).sin().cos(), x, use_reentrant=False, context_fn=lambda: contexts)
        losses.append(out.sum())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert offloader.statistics().packed_tensors == 0
    assert_same(list(torch.autograd.grad(losses.pop(), [x])), gradients_of(lambda x: (x @ x).sin().cos(), x))


def test_a_dropped_graph_leaves_nothing(offloader: Offloader) -> None:
    x = matrix()
    with no_garbage_collection():
        with offloader:
            loss = region(lambda x: (x @ x).sin().cos(), x).sum()
        assert offloader.statistics().live_records == 1
        del loss
        assert_empty(offloader)


def test_what_the_recomputation_does_not_come_to_leaves_nothing(offloader: Offloader) -> None:
    """It stops when it has all that was saved; the last product is not needed."""
    x = matrix()
    with no_garbage_collection():
        expected = gradients_of(lambda x: x.sin() @ x, x)
        assert_same(gradients_of(partial(region, lambda x: x.sin() @ x), x, context=offloader), expected)
        assert_empty(offloader)


def test_an_error_in_the_forward_leaves_nothing(offloader: Offloader) -> None:
    x = matrix()

    def fails(x: Tensor) -> Tensor:
        y = (x @ x).sin()
        if x is not None:
            raise KeyError("in the forward")
        return y

    with pytest.raises(KeyError), offloader:
        region(fails, x)
    gc.collect()
    assert_empty(offloader)


def test_a_failed_read_fails_the_step(make_offloader: MakeOffloader) -> None:
    engine = partial(FailingEngine, kind=IoKind.READ, first=2, count=None)  # the first is the checkpoint's input
    offloader = make_offloader(policy="all", engine=engine)
    x = matrix() + 0
    with offloader:
        loss = region(lambda x: (x @ x).sin().cos(), x).sum()
    del x
    offloader.synchronize()
    with pytest.raises(StorageReadError):
        loss.backward()
    del loss
    forget_failed_backward()
    assert_empty(offloader)


# -- where PyTorch's own contexts are used -----------------------------------------------------------------------------


def contexts_are_ours(**options: Any) -> bool:
    """Whose contexts one gets here and now."""
    contexts = create_selective_checkpoint_contexts(MATMULS, **options)
    whose = {type(context).__module__.partition(".")[0] for context in contexts}
    assert len(whose) == 1
    return whose == {"actoffload"}


def test_whose_contexts_one_gets(offloader: Offloader) -> None:
    assert not contexts_are_ours()
    with offloader:
        assert contexts_are_ours()
        assert not contexts_are_ours(allow_cache_entry_mutation=True)
        with torch._subclasses.FakeTensorMode():
            assert not contexts_are_ours()
        x = matrix()
        found: list[bool] = []
        y = x * 2
        y.register_hook(lambda gradient: found.append(contexts_are_ours()))
        y.sum().backward()
        assert found == [False], "what is saved during backward is wanted at once"
    assert not contexts_are_ours()


def test_of_two_offloaders_the_inner_one_moves(make_offloader: MakeOffloader) -> None:
    outer, inner = make_offloader(policy="all"), make_offloader(policy="all")
    x = matrix()
    function = partial(region, lambda x: (x @ x).sin().cos())
    expected = gradients_of(lambda x: (x @ x).sin().cos(), x)
    with outer:
        assert_same(gradients_of(function, x, context=inner), expected)
    assert (outer.statistics().packed_tensors, inner.statistics().packed_tensors) == (0, 2)


def test_left_alone_in_a_region_that_is(offloader: Offloader) -> None:
    x = matrix()
    function = partial(region, lambda x: (x @ x).sin().cos())
    with no_offload():
        found = gradients_of(function, x, context=offloader)
    assert_same(found, gradients_of(lambda x: (x @ x).sin().cos(), x))
    assert offloader.statistics().kept_bytes == {"parameter": x.nbytes, "no_offload()": x.nbytes}


@pytest.mark.parametrize(("policy", "error"), [(3, TypeError), ([ATEN.mm], ValueError), (["mm"], ValueError)])
def test_errors_are_pytorchs(policy: Any, error: type[Exception], offloader: Offloader) -> None:
    for context in (contextlib.nullcontext(), offloader):
        with context, pytest.raises(error):
            create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize("around", [True, False], ids=["compiled around", "compiled inside"])
def test_compiled(around: bool, offloader: Offloader) -> None:
    x = matrix()

    def function(x: Tensor) -> Tensor:
        return (x @ x).sin().cos()

    inner = function if around else torch.compile(function, backend="aot_eager", fullgraph=True)
    checkpointed: Any = partial(region, inner)
    if around:
        checkpointed = torch.compile(checkpointed, backend="aot_eager", fullgraph=True)
    expected = gradients_of(function, x)
    for _ in range(2):
        assert_same(gradients_of(checkpointed, x, context=offloader), expected)
    assert offloader.statistics().live_records == 0
