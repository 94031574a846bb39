"""Whoever is given a saved tensor that stays may empty or replace it: what was saved is there the next time.

Autograd itself hands out the very tensor that was saved, where it is an input, and then finds what was made of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload.errors import SavedTensorModifiedError
from tests.harness import MakeOffloader, assert_empty, same_bits
from tests.unit.keeping import BYTES, ELEMENTS, activation, plan_of

pytestmark = pytest.mark.usefixtures("either")

Use = Callable[[Any, Tensor], Tensor]


def product(use: Use) -> Any:
    """A function that saves what it multiplies with, and whose backward treats that as ``use`` does."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
            # Without a history: of any other tensor autograd hands out a copy, whatever a hook gives it.
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
    """As Transformer Engine does, to have the memory back at once."""
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


KINDS = ["below min_bytes", "policy"]


def run(kind: str, use: Use, retains: tuple[bool, ...], make_offloader: MakeOffloader | None) -> list[Any]:
    """The gradients of several backwards, or what they raise."""
    x = torch.linspace(1, 2, ELEMENTS).requires_grad_()
    function = product(use)

    def forward() -> Tensor:
        first = (x * 1.0).sin()
        out: Tensor = function.apply(first, activation(3))
        return out.sum()

    if make_offloader is None:
        out = forward()
    else:
        least = 1 if kind == "policy" else BYTES + 1
        offloader = make_offloader(policy=plan_of([True] * 8), min_bytes=least, engine="memory")
        with offloader:
            out = forward()
        assert kind in offloader.statistics().kept_bytes
    found: list[Any] = []
    for retain in retains:
        try:
            found.append(torch.autograd.grad(out, x, retain_graph=retain)[0])
        except RuntimeError as error:
            found.append(error.with_traceback(None))  # whose frames hold the graph
    del out
    if make_offloader is not None:
        assert_empty(offloader)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", [emptied, replaced, read_once])
@pytest.mark.parametrize("retains", [(False,), (True, False), (True, True, False)])
def test_each_backward_gets_what_was_saved(
    kind: str, use: Use, retains: tuple[bool, ...], make_offloader: MakeOffloader
) -> None:
    (expected,) = run(kind, read_once, (False,), None)
    found = run(kind, use, retains, make_offloader)
    assert [same_bits(one, expected) for one in found] == [True] * len(retains)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retains", [(False,), (True, False)])
def test_so_does_each_read_or_it_is_an_error(
    kind: str, retains: tuple[bool, ...], make_offloader: MakeOffloader
) -> None:
    (expected,) = run(kind, read_twice, (False,), None)
    assert [same_bits(one, expected) for one in run(kind, read_twice, retains, make_offloader)] == [True] * len(retains)
    (expected,) = run(kind, read_once, (False,), None)
    for one in run(kind, replaced_between_reads, retains, make_offloader):
        if isinstance(one, RuntimeError):
            assert isinstance(one, SavedTensorModifiedError)
            assert "read ctx.saved_tensors once" in str(one)
        else:
            assert same_bits(one, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_changed_in_place_is_an_error_the_next_time(kind: str, make_offloader: MakeOffloader) -> None:
    for offloader in (None, make_offloader):
        first, second = run(kind, changed_in_place, (True, False), offloader)
        assert isinstance(first, Tensor)
        assert isinstance(second, RuntimeError)
        assert "modified by an inplace operation" in str(second)


@pytest.mark.parametrize("kind", KINDS)
def test_outside_of_backward_each_gets_its_own(kind: str, make_offloader: MakeOffloader) -> None:
    least = 1 if kind == "policy" else BYTES + 1
    offloader = make_offloader(policy=plan_of([True] * 8), min_bytes=least, engine="memory")
    with offloader:
        h = activation(1).sin()
        out = h.sin()
    for _ in range(3):
        saved = out.grad_fn._saved_self  # type: ignore[union-attr]
        assert same_bits(saved, h)
        saved.data = torch.zeros(0)
    del h, out, saved
    assert_empty(offloader)


@pytest.mark.xfail(strict=True, reason="known gap: docs/design.md, section 4")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_the_saved_tensor_lies_elsewhere(kind: str, make_offloader: MakeOffloader) -> None:
    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
            ctx.save_for_backward(gradient)
            return x.sum()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return ctx.saved_tensors[0], None

    gradient = activation(1).detach()
    for offloader in (None, make_offloader):
        x = torch.ones(ELEMENTS, requires_grad=True)
        if offloader is None:
            Given.apply(x, gradient).backward()
        else:
            least = 1 if kind == "policy" else BYTES + 1
            with offloader(policy=plan_of([True] * 8), min_bytes=least, engine="memory"):
                out = Given.apply(x, gradient)
            out.backward()
        assert x.grad is not None
        assert same_bits(x.grad, gradient)
        shared = x.grad.data_ptr() == gradient.data_ptr()
        assert offloader is not None or not shared, "without hooks it is copied"
    assert not shared
