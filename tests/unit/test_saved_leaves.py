"""A custom Function reads the very leaf that it saved, and the attributes of other saved tensors."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from actoffload import Offloader
from actoffload.errors import SavedTensorModifiedError
from tests.harness import MakeOffloader, assert_empty, flush_autograd, no_garbage_collection, same_bits

pytestmark = pytest.mark.usefixtures("both_hooks")
WIDTH = 64
SPACES: dict[str, dict[str, Any]] = {
    "moves": {"policy": "all", "min_bytes": 1},
    "small": {"min_bytes": "1MiB"},
    "kept": {"policy": "keep", "min_bytes": 1},
}


def _numbers(seed: int) -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed))


def _saving(seen: Callable[[tuple[Tensor, ...]], Any]) -> Any:
    """A function that saves its two inputs. Its backward reads them and passes them to ``seen``.

    Both gradients are ones, unless ``seen`` returns others.
    """

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            gradients = seen(ctx.saved_tensors)
            return (torch.ones(WIDTH, WIDTH),) * 2 if gradients is None else gradients

    return Saves.apply


class _Sub(torch.Tensor):
    """A subclass without inner tensors, as quantised weights have."""


LEAVES: dict[str, Callable[[], Tensor]] = {
    "parameter": lambda: nn.Parameter(_numbers(1)),
    "frozen parameter": lambda: nn.Parameter(_numbers(1), requires_grad=False),
    "buffer": lambda: nn.Buffer(_numbers(1)),
    "leaf": lambda: _numbers(1).requires_grad_(),
    "subclass": lambda: nn.Parameter(_numbers(1).as_subclass(_Sub)),
}


@pytest.mark.parametrize("kind", LEAVES)
@pytest.mark.parametrize("options", SPACES)
def test_a_leaf_is_itself(make_offloader: MakeOffloader, kind: str, options: str) -> None:
    """Attributes set on the leaf are there in backward, and backward's are on the leaf (`main_grad`, FP8 scales)."""
    owner = nn.Module()
    owner.leaf = leaf = LEAVES[kind]()
    leaf.main_grad = torch.zeros(WIDTH, WIDTH)  # type: ignore[attr-defined]
    x = _numbers(2).requires_grad_()

    def seen(saved: tuple[Tensor, ...]) -> None:
        assert saved[0] is x
        assert saved[1] is leaf
        saved[1].main_grad.add_(1)  # type: ignore[attr-defined]
        saved[1].added = True  # type: ignore[attr-defined]

    offloader = make_offloader(**SPACES[options])
    with offloader:
        loss = _saving(seen)(x, leaf).sum()
    offloader.synchronize()
    loss.backward(retain_graph=True)
    assert leaf.added  # type: ignore[attr-defined]
    loss.backward()
    assert leaf.main_grad.sum() == 2 * WIDTH * WIDTH  # type: ignore[attr-defined]


def test_a_leaf_is_checked_and_may_be_swapped(make_offloader: MakeOffloader) -> None:
    weight, read = nn.Parameter(_numbers(1)), list[Tensor]()
    gathered = StorageWeakRef(weight.untyped_storage())
    with make_offloader(**SPACES["moves"]):
        saves = _saving(lambda saved: read.append(saved[1].detach().clone()))
        loss = saves(_numbers(2).requires_grad_() * 1.0, weight).sum()
    weight.data = _numbers(3)
    assert gathered.expired(), "FSDP frees the memory of gathered parameters so"
    loss.backward(retain_graph=True)
    assert same_bits(read[0], _numbers(3))
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(SavedTensorModifiedError):
        loss.backward()
    flush_autograd()


def test_a_graph_that_dies_lets_go_of_its_leaves(make_offloader: MakeOffloader) -> None:
    """Reference counts alone free the leaves, also after backward has read them."""
    offloader = make_offloader(**SPACES["moves"])
    with no_garbage_collection():
        for backward in (False, True):
            weight = nn.Parameter(_numbers(1))
            weight.scale = 3.0  # type: ignore[attr-defined]
            died = weakref.ref(weight)
            with offloader:
                h = _numbers(2).requires_grad_() * 1.0
                h.scale = 2.0  # type: ignore[attr-defined]
                loss = _saving(lambda saved: None)(h, weight).sum()
            if backward:
                loss.backward(retain_graph=True)
            del weight, h, loss
            assert died() is None
    assert_empty(offloader)


def test_a_tensor_from_other_hooks_is_not_replaced(make_offloader: MakeOffloader) -> None:
    """The program's own hooks, inside ours, decide which tensors backward reads."""
    weight = nn.Parameter(_numbers(1))

    def seen(saved: tuple[Tensor, ...]) -> None:
        assert saved[1] is not weight
        assert same_bits(saved[1].detach(), 2 * weight.detach())

    with make_offloader(**SPACES["moves"]), torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        loss = _saving(seen)(_numbers(2).requires_grad_() * 1.0, weight).sum()
    loss.backward()


RETURNS: dict[str, Callable[[tuple[Tensor, ...]], Any]] = {
    "the leaf": lambda saved: (None, saved[1]),
    "the activation": lambda saved: (None, saved[0]),
    "views": lambda saved: (None, saved[0].t().t() + saved[1]),
}


@pytest.mark.parametrize("returned", RETURNS)
@pytest.mark.parametrize("options", SPACES)
def test_a_gradient_does_not_share_memory_with_a_saved_tensor(
    make_offloader: MakeOffloader, returned: str, options: str
) -> None:
    """If they shared memory, a second backward would add to the saved tensor, and an optimizer would change it."""

    def run(context: Any) -> list[Tensor]:
        weight, x = _numbers(1).requires_grad_(), _numbers(2).requires_grad_()
        with context:
            h = x * 1.0
            loss = _saving(RETURNS[returned])(h, weight).sum() + (h * h).sum() + (weight.detach() * x).sum()
        if isinstance(context, Offloader):
            context.synchronize()
        del h
        loss.backward(retain_graph=True)
        assert weight.grad is not None
        weight.grad.mul_(3)
        loss.backward()
        assert x.grad is not None
        return [weight.detach(), weight.grad, x.grad]

    for found, expected in zip(run(make_offloader(**SPACES[options])), run(contextlib.nullcontext()), strict=True):
        assert same_bits(found, expected)


# -- attributes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wants_gradient", [True, False])
@pytest.mark.parametrize("options", SPACES)
def test_numbers_and_texts_among_a_tensors_attributes_come_back(
    make_offloader: MakeOffloader, options: str, wants_gradient: bool
) -> None:
    read: list[dict[str, Any]] = []
    saves = _saving(lambda saved: read.append(dict(vars(saved[0]))))
    offloader = make_offloader(**SPACES[options])
    with no_garbage_collection():
        with offloader:
            h = _numbers(2).requires_grad_() * 1.0
            h = h if wants_gradient else h.detach()
            h.scale, h.layout_name = 3.0, ("rows", torch.float8_e4m3fn)  # type: ignore[attr-defined]
            loss = saves(h, nn.Parameter(_numbers(1))).sum()
        offloader.synchronize()
        del h
        loss.backward(retain_graph=True)
        loss.backward()
        del loss
        assert read == [{"scale": 3.0, "layout_name": ("rows", torch.float8_e4m3fn)}] * 2
        assert_empty(offloader)


@pytest.mark.parametrize("options", SPACES)
def test_lost_attributes_cause_one_warning(make_offloader: MakeOffloader, options: str) -> None:
    read: list[dict[str, Any]] = []
    saves = _saving(lambda saved: read.append(dict(vars(saved[0]))))
    offloader = make_offloader(**SPACES[options])

    def steps() -> None:
        for _ in range(3):
            with offloader:
                h = _numbers(2).requires_grad_() * 1.0
                h.cache = [h]  # type: ignore[attr-defined]
                h.scale = 2  # type: ignore[attr-defined]
                loss = saves(h, nn.Parameter(_numbers(1))).sum()
            loss.backward()
            del h.cache  # type: ignore[attr-defined]

    with pytest.warns(RuntimeWarning, match="has the attribute 'cache'") as printed:
        steps()
    assert len(printed) == 1
    assert read == [{"scale": 2}] * 3


def test_a_functions_own_output_has_none_as_without_hooks(make_offloader: MakeOffloader) -> None:
    read: list[dict[str, Any]] = []

    class SavesOutput(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            out = x.exp()
            out.scale = 2.0  # type: ignore[attr-defined]
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            (out,) = ctx.saved_tensors
            read.append(dict(vars(out)))
            return gradients[0] * out

    contexts: list[Any] = [contextlib.nullcontext(), *(make_offloader(**options) for options in SPACES.values())]
    for context in contexts:
        with context:
            loss = SavesOutput.apply(_numbers(1).requires_grad_() * 1.0).sum()
        loss.backward()
    assert read == [{}] * 4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_that_was_changed_in_place_is_autograds_error(make_offloader: MakeOffloader) -> None:
    """A nested tensor of the strided layout has no shape to show."""
    parts = [torch.randn(2), torch.randn(3)]
    with make_offloader(**SPACES["moves"]):
        b = torch.nested.nested_tensor(parts, requires_grad=True).clone()
        c = b * b
    b.add_(b.detach())
    with pytest.raises(SavedTensorModifiedError, match="modified by an inplace operation"):
        c.backward(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    flush_autograd()
