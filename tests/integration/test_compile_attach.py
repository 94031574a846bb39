"""``torch.compile`` and `attach` in every order, the names of compiled modules, and copies of attached models."""

from __future__ import annotations

import contextlib
import copy
import io
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

import actoffload
from actoffload import Offloader, Policy
from actoffload.policy import Decision, TensorFacts
from tests.harness import assert_same_gradients, gradients
from tests.integration.compiled import STEPS, WIDTH, Tower, gradients_of, tokens, tower, train
from tests.integration.evidence import Run, assert_evidence

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # by Dynamo
]


def attach_and_compile(model: Tower, order: str, options: dict[str, Any]) -> tuple[Any, actoffload.Attachment]:
    """The callable that trains, and the attachment."""
    if order in ("before", "in place before"):
        attachment = actoffload.attach(model, **options)
    if order.startswith("in place"):
        model.compile(backend="aot_eager", fullgraph=True)
        call: Any = model
    else:
        call = torch.compile(model, backend="aot_eager", fullgraph=True)
    if order == "after a call":
        call(tokens(0)).backward()
        model.zero_grad()
    if order in ("after", "in place after", "after a call"):
        attachment = actoffload.attach(model, **options)
    elif order == "to what is compiled":
        attachment = actoffload.attach(call, **options)
    return call, attachment


@pytest.fixture(scope="module")
def plain() -> Run:
    return train(tower("whole", layers=1))


@pytest.mark.parametrize(
    "order", ["before", "after", "after a call", "to what is compiled", "in place before", "in place after"]
)
def test_attach_in_every_order(order: str, plain: Run, tmp_path: Path) -> None:
    """One graph without a break, every forward inside the context, the same bits; and no context after detach()."""
    options = {"target": "nvme", "path": str(tmp_path), "min_bytes": 0, "policy": "greedy"}
    model = tower("eager", layers=1)
    call, attachment = attach_and_compile(model, order, options)
    offloader = attachment.offloader
    offloaded = train(model, call=call, attached=offloader)
    offloaded.statistics = offloader.statistics()
    assert offloaded.statistics.steps == STEPS
    assert_evidence(offloaded, plain, peak_falls=None)
    again = order == "after a call"  # attaching changes the module's class, which is a guard of the graph
    assert counters["stats"]["unique_graphs"] == 1 + again
    assert not counters["graph_break"]
    attachment.detach()
    call(tokens(9)).backward()
    assert offloader.statistics().steps == STEPS
    offloader.close()


class SeenNames(Policy):
    """Moves everything and counts the saved tensors of each module."""

    def __init__(self) -> None:
        self.names: Counter[str | None] = Counter()

    def decide(self, facts: TensorFacts) -> Decision:
        self.names[facts.module] += 1
        return Decision.OFFLOAD


def _losses_and_gradients(model: nn.Module, context: Any = None) -> dict[str, Tensor]:
    found = {}
    for step in range(2):
        with context if context is not None else contextlib.nullcontext():
            loss = model(tokens(step))
        if context is not None:
            context.synchronize()
        loss.backward()
        found[f"{step} loss"] = loss.detach()
        found |= {f"{step} {name}": gradient for name, gradient in gradients(model).items()}
    return found


@cache
def compiled_blocks_alone(layers: int) -> dict[str, Tensor]:
    found = _losses_and_gradients(tower("blocks", layers=layers))
    torch._dynamo.reset()
    counters.clear()
    return found


@pytest.mark.parametrize("first", ["attach", "compile"])
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_names_with_compiled_blocks(how: str, first: str, make_offloader: Callable[..., Offloader]) -> None:
    """Nine equal blocks share one graph, as without offloading, and a pattern finds each by its own name.

    Nine, because Dynamo compiles a function eight times at most.
    """
    layers = 9
    plain = compiled_blocks_alone(layers)
    model, seen = tower("eager", layers=layers), SeenNames()
    offloader = make_offloader(policy=seen, include="blocks.*", exclude="blocks.7")

    def compile_blocks() -> None:
        blocks = model.blocks
        for index, block in enumerate(blocks):
            if how == "in place":
                block.compile(backend="aot_eager", fullgraph=True)
            else:
                wrapped: Any = torch.compile(block, backend="aot_eager", fullgraph=True)
                blocks[index] = wrapped

    for act in (lambda: offloader.use(model), compile_blocks)[:: 1 if first == "attach" else -1]:
        act()
    found = _losses_and_gradients(model, offloader)
    found = {name.replace("._orig_mod", ""): tensor for name, tensor in found.items()}
    assert_same_gradients(found, plain)
    assert counters["stats"]["unique_graphs"] == 1
    expected = {f"blocks.{index}" for index in range(layers)} - {"blocks.7"}
    assert seen.names.keys() == expected
    assert len(set(seen.names.values())) == 1
    assert offloader.statistics().kept_bytes["module excluded"] > 0
    offloader.close()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_model_with_names_inlined_in_a_larger_graph(make_offloader: Callable[..., Offloader]) -> None:
    """The compiler leaves the hooks for names out of the graph: no break, and no names."""
    model = tower("eager")
    plain = gradients_of(model, torch.compile(model, backend="aot_eager"), tokens(0))
    torch._dynamo.reset()
    counters.clear()
    seen = SeenNames()
    offloader = make_offloader(policy=seen)
    model = tower("eager")
    offloader.use(model)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x) * 1.0
        return loss

    with offloader:
        loss = torch.compile(step, backend="aot_eager", fullgraph=True)(tokens(0))
    offloader.synchronize()
    loss.backward()
    assert_same_gradients(gradients(model) | {"loss": loss.detach()}, plain)
    assert counters["stats"]["unique_graphs"] == 1
    assert seen.names.keys() == {None}
    assert offloader.statistics().nvme_read_bytes > 0


def test_a_copy_of_an_attached_model_shares_its_offloader(tmp_path: Path) -> None:
    """A deep copy, as for averaged weights, offloads too; a pickled model does not."""
    model = tower("eager", layers=2)
    attachment = actoffload.attach(model, target="nvme", path=str(tmp_path), min_bytes=0, include="blocks.*")
    twin = copy.deepcopy(model)
    twin(tokens(0)).backward()
    assert attachment.offloader.statistics().steps == 1
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=False)(tokens(0)).backward()
    assert attachment.offloader.statistics().steps == 1
    attachment.offloader.close()


@pytest.mark.parametrize("order", ["before", "after"])
def test_compiled_blocks_that_run_again_are_compiled_once(order: str, tmp_path: Path) -> None:
    """``recompute=`` is traced with the block: a guard on an object of one call would fail in the next call."""
    blocks, compiled = tower("eager").blocks, list[str]()
    x = torch.randn(4, 64, WIDTH)

    def step(model: nn.Module) -> dict[str, Tensor]:
        model(x).square().sum().backward()
        return gradients(model)

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        compiled.append("graph")
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    model = nn.Sequential(*blocks)
    expected = step(model)
    if order == "before":
        for block in model:
            block.compile(backend=backend, fullgraph=True)
    attachment = actoffload.attach(
        model, target="nvme", path=str(tmp_path), min_bytes=0, policy="all", recompute=True, announce="none"
    )
    if order == "after":
        for block in model:
            block.compile(backend=backend, fullgraph=True)
    for _ in range(3):
        assert_same_gradients(step(model), expected)
    # The first block's input needs no gradient, so its graph is another one.
    assert len(compiled) == 2
    kept = attachment.offloader.statistics()
    assert kept.packed_bytes < 3 * len(model) * 3 * x.nbytes, "the blocks save little more than their inputs"
