"""What collectives bring under selective checkpointing: their operations return before the bytes are there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from actoffload import Offloader
from tests.harness import (
    MakeOffloader,
    assert_empty,
)
from tests.selective import (
    MUTATED,
    assert_same,
    gradients_of,
    matrix,
    region,
    scoped_op,
)


class Late(dist._Work):  # type: ignore[name-defined,misc]
    """A collective whose bytes are there when somebody has waited for it."""

    def __init__(self, result: Tensor, source: Tensor) -> None:
        super().__init__()
        self.result, self.source = result, source

    def wait(self, timeout: Any = None) -> bool:
        self.result.copy_(self.source)
        return True


@pytest.fixture
def offloader(make_offloader: MakeOffloader) -> Offloader:
    """Moves everything."""
    return make_offloader(policy="all")


@pytest.fixture
def late_op() -> Iterator[Any]:
    """An operation that returns at once, as collectives do; the bytes of its result come later."""

    def late(x: Tensor) -> Tensor:
        result = torch.full_like(x, float("nan"))
        torch._C._distributed_c10d._register_work(result, Late(result, x.clone()))
        return result

    with scoped_op("_c10d_functional", "actoffload_late(Tensor x) -> Tensor") as (library, op):
        library.impl("actoffload_late", late, "CPU")
        yield op


def test_what_a_collective_brings_moves_when_it_is_there(late_op: Any, offloader: Offloader) -> None:
    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            result: Tensor = late_op(x)
            return result

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    def function(x: Tensor) -> Tensor:
        y = Gathered.apply(x @ x)
        packed.append(offloader.statistics().packed_tensors)
        offloader.synchronize()
        waited: Tensor = torch.ops._c10d_functional.wait_tensor(y)
        return waited.sin().cos()

    packed: list[int] = []
    x = matrix()
    expected = gradients_of(lambda x: (x @ x).sin().cos(), x)
    with offloader:
        loss = region(function, x, policy=[late_op]).sum()
    assert packed == [1], "only the input of the checkpoint so far"
    assert offloader.statistics().packed_tensors == 2
    assert_same(list(torch.autograd.grad(loss, [x])), expected)
    del loss
    assert_empty(offloader)


def test_what_a_collective_brings_is_awaited_before_it_moves(late_op: Any, offloader: Offloader) -> None:
    """Also when the region itself has no need of it."""

    class Unread(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            late: Tensor = late_op(x.detach() * 2)
            ctx.save_for_backward(late)
            return x * 1, late

        @staticmethod
        def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
            late: Tensor = ctx.saved_tensors[0]
            return gradient * late

    x = matrix()
    with offloader:
        y, late = region(Unread.apply, x, policy=[late_op])
    offloader.synchronize()
    torch.ops._c10d_functional.wait_tensor(late)
    assert_same(list(torch.autograd.grad(y.sum(), [x])), [x.detach() * 2])


def test_what_comes_late_into_an_argument_is_taken_from_there(offloader: Offloader) -> None:
    """As with c10d's own operations, which say of nothing that it is an alias or that it is changed."""
    with scoped_op("actoffload_tests", "late_into(Tensor x) -> Tensor") as (library, op):
        library.impl("late_into", lambda x: x, "CPU")
        x = matrix()

        def function(x: Tensor) -> Tensor:
            buffer = torch.full((64, 64), float("nan"))
            late: Tensor = op(buffer)
            offloader.synchronize()
            buffer.view(torch.uint8).untyped_storage().copy_(x.detach().untyped_storage())  # no version counts this
            return (late * x).sin()

        expected = gradients_of(lambda x: (x.detach() * x).sin(), x)
        assert_same(gradients_of(partial(region, function, policy=[op]), x, context=offloader), expected)


def test_what_a_collective_brings_and_is_changed_raises(late_op: Any, offloader: Offloader) -> None:
    x = matrix()

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            y: Tensor = torch.ops._c10d_functional.wait_tensor(late_op(x)).mul_(2)
        return (x * y).sin()

    with offloader:
        loss = region(function, x, policy=[late_op]).sum()
    with pytest.raises(RuntimeError, match=MUTATED):
        loss.backward()
