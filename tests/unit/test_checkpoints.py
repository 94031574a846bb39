"""Checkpoints inside a context: PyTorch's selective contexts pass cached tensors to our hooks, below autograd."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import actoffload
from actoffload import Offloader
from actoffload.errors import SavedTensorModifiedError
from tests.harness import MakeOffloader, assert_empty, assert_same_gradients, batch, same_bits, train_step

ASKS = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
asks = pytest.mark.skipif(not ASKS, reason="this PyTorch's checkpoint() does not ask about hooks")
MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Cache(TorchDispatchMode):
    """Packs the output of sine with the active hooks, as PyTorch does on request from 2.14 on."""

    def __init__(self, hooks: Hooks) -> None:
        super().__init__()
        self.hooks = hooks
        self.packed: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if func is torch.ops.aten.sin.default:
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                alias = out.detach()
            self.packed.append(self.hooks[0](alias))
        return out

    def unpacked(self, x: Tensor) -> Tensor:
        """The packed tensor, as an operation returns it below autograd."""
        (packed,), hooks = self.packed, self.hooks

        class Replay(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return hooks[1](packed)

        with Replay():
            return x.sin()


def active_hooks() -> Hooks:
    hooks: Hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


@pytest.mark.parametrize("held", [True, False], ids=["of the saved tensor", "of the unpacked one"])
@pytest.mark.parametrize("options", [{}, {"min_bytes": "1GiB"}, {"min_bytes": "1GiB", "device_budget": "1GiB"}])
def test_a_tensor_packed_below_autograd_is_checked_for_changes(
    options: dict[str, Any], held: bool, make_offloader: MakeOffloader
) -> None:
    """Moved, kept without a record, and kept by Python; an alias with its own version counter would hide the change."""
    x = batch()
    with make_offloader(**options), Cache(active_hooks()) as cache:
        saved: Tensor | None = x.sin()
    if not held:
        saved = None
    found = cache.unpacked(x)
    assert same_bits(found, x.sin())
    (found if saved is None else saved).add_(1)
    with pytest.raises(SavedTensorModifiedError, match="modified by an inplace operation"):
        cache.unpacked(x)


class Blocks(nn.Module):
    """Linear layers, each under a selective checkpoint."""

    def __init__(self, contexts: Any, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.options = {"context_fn": partial(contexts, MATMULS), "use_reentrant": False, **options}

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(layer(x)) * torch.sigmoid(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.block, layer, x, **self.options)
        return x


@asks
@pytest.mark.pairs
@pytest.mark.parametrize("shape", [(128, 64), (4, 32, 64)], ids=["2d", "3d"])
@pytest.mark.parametrize("respects", [True, False, None])
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "PyTorch's"])
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")  # without a choice PyTorch warns
def test_each_answer_has_the_same_gradients(ours: bool, respects: Any, shape: Any, offloader: Offloader) -> None:
    x = batch().reshape(shape)
    contexts = actoffload.create_selective_checkpoint_contexts if ours else create_selective_checkpoint_contexts
    expected = train_step(Blocks(create_selective_checkpoint_contexts), x)
    model = Blocks(contexts, respect_saved_tensors_hooks=respects)
    for between in (None, offloader.synchronize):
        assert_same_gradients(train_step(model, x, offloader, between=between), expected)
        assert_empty(offloader)
    entries = sum(entry.nbytes for entry in offloader.plan.entries)
    # Each block's input, and the output of its matrix product.
    assert entries >= (6 if ours or respects else 3) * x.nbytes


@asks
def test_a_cached_tensor_that_changes_is_an_error(offloader: Offloader) -> None:
    def function(x: Tensor) -> Tensor:
        y = x @ x
        return y.add_(1).sin()

    x = torch.randn(64, 64, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, MATMULS)
    with offloader:
        out = checkpoint(function, x, use_reentrant=False, context_fn=contexts, respect_saved_tensors_hooks=True)
    with pytest.raises(SavedTensorModifiedError):
        out.sum().backward()


@asks
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_a_selective_region_inside_of_one_that_runs_again(inside: bool, offloader: Offloader) -> None:
    """The hooks that count a recomputation are not the user's: PyTorch passes nothing to them below autograd."""
    model, x = Blocks(create_selective_checkpoint_contexts, respect_saved_tensors_hooks=True), batch()
    expected = train_step(model, x)
    outer = Outer(model)
    found = train_step(outer, x, offloader, inside=inside)
    assert_same_gradients({name.removeprefix("inner."): grad for name, grad in found.items()}, expected)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


@pytest.fixture
def offloader(make_offloader: MakeOffloader) -> Offloader:
    return make_offloader(policy="all")
