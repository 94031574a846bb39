"""Saved tensor hooks of the program inside a context: autograd calls them in place of ours, and a warning says so."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import actoffload
from actoffload import Offloader, attach, offload_activations
from tests.harness import Chain, batch, same_bits
from tests.unit.saving import Doubled

SAID = "hooks of the program's own"


class Direct:
    """Pushes hooks as verl, ms-swift and TransformerEngine do, past PyTorch's context."""

    def pack(self, tensor: Tensor) -> tuple[int, Tensor]:
        return 1, tensor.clone()

    def unpack(self, packed: tuple[int, Tensor]) -> Tensor:
        return packed[1]

    def __enter__(self) -> None:
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    def __exit__(self, *exc: object) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()


WAYS: dict[str, tuple[Callable[[], Any], str]] = {
    "save_on_cpu": (save_on_cpu, "save_on_cpu"),
    "a pair": (lambda: saved_tensors_hooks(lambda x: x.clone(), lambda x: x), "<lambda>"),
    "pushed": (Direct, "Direct.unpack"),
}


class Layer(nn.Module):
    """Enters hooks around modules, around plain functions, or around a custom function."""

    def __init__(self, hooks: Callable[[], Any] | None, around: str) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        self.hooks, self.around = hooks, around

    def forward(self, x: Tensor) -> Tensor:
        if self.hooks is None:
            y: Tensor = self.inner(x)
            return y
        if self.around == "modules":
            with self.hooks():
                y = self.inner(x)
            return y
        x = self.inner(x)
        with self.hooks():
            y = x.sin() if self.around == "functions" else Doubled.apply(x)
        return y


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"target": "nvme", "path": str(tmp_path), "min_bytes": 0, "policy": "all", "announce": "none"}


def network(hooks: Callable[[], Any] | None, around: str = "modules") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(None, ""), Layer(hooks, around), Layer(None, ""), Layer(hooks, around))


def hook_count(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("by", ["attach", "model="])
@pytest.mark.parametrize("around", ["modules", "functions", "custom"])
@pytest.mark.parametrize("way", WAYS)
def test_inner_hooks_are_named_once_with_the_module_and_counted(
    way: str, around: str, by: str, options: dict[str, Any]
) -> None:
    hooks, owner = WAYS[way]
    model = network(hooks, around)
    attachment = attach(model, **options) if by == "attach" else None
    before = hook_count(model)

    def step() -> Offloader:
        if attachment is not None:
            model(batch()).sum().backward()
            return attachment.offloader
        with offload_activations(model=model, **options) as offloader:
            loss = model(batch()).sum()
        loss.backward()
        return offloader

    with pytest.warns(RuntimeWarning, match=SAID) as printed:
        step()
    (text,) = (str(one.message) for one in printed)
    assert owner in text
    assert "inside of '1' and 1 more modules" in text
    tensors = {"modules": 4, "functions": 1, "custom": 1}[around] * 2
    assert tensors - 2 <= int(text.partition(": ")[2].partition("'s: ")[2].split()[0]) <= tensors + 4
    offloader = step()  # a second warning would be an error
    assert str(offloader.report()).count(SAID) == 1
    assert hook_count(model) - before <= 1, "the hooks that searched are gone"


@pytest.mark.parametrize("reentrant", [False, True])
def test_no_warning_without_inner_hooks_nor_of_a_checkpoint(reentrant: bool, options: dict[str, Any]) -> None:
    class Checkpointed(Chain):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(super().forward, x * 1, use_reentrant=reentrant)
            return y

    model = nn.Sequential(Chain(), Checkpointed())
    attachment = attach(model, **options)
    for _ in range(2):
        model(batch().requires_grad_()).sum().backward()
        assert SAID not in str(attachment.offloader.report())


def test_no_search_for_inner_hooks_under_a_compiler(options: dict[str, Any]) -> None:
    """Hooks on modules would break its graph, and their removal would make it compile again."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(*(Layer(None, "") for _ in range(3)))
    expected = model(batch())
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        with offload_activations(model=model, **options):
            found = compiled(batch())
        assert same_bits(found, expected)
    alone = len(graphs)
    torch._dynamo.reset()
    graphs.clear()
    attach(model, **options)
    for _ in range(3):
        compiled(batch())
    assert len(graphs) <= max(alone, 2)
    torch._dynamo.reset()


def test_the_model_and_the_graph_are_not_held(options: dict[str, Any]) -> None:
    model = network(save_on_cpu)
    attachment = attach(model, **options)
    with pytest.warns(RuntimeWarning, match=SAID):
        loss = model(batch()).sum()
    loss.backward()
    reference = weakref.ref(model)
    del model, loss
    attachment.detach()
    del attachment
    gc.collect()
    assert reference() is None


def test_a_failed_forward_takes_the_hooks_away(options: dict[str, Any]) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    model = nn.Sequential(Layer(None, ""), Fails())
    attachment = actoffload.attach(model, **options)
    before = hook_count(model)
    with pytest.raises(ValueError, match="no"):
        model(batch())
    assert hook_count(model) == before
    attachment.detach()
