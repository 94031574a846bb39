"""Gradients have the same bits however one trains: {eager, compiled} x checkpoints x backward in/outside x shapes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import Offloader
from tests.harness import assert_same_bits

from .compare import settle
from .places import PLACES, SIMULATED, Maker
from .tower import CHECKPOINTS, LAYERS, Tower, tokens, tower

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")  # warnings of the compiler

SEEDS = {"one": [0], "many": [0, 1, 2], "retained": [0], "unused": [0, 1]}
"""The micro-batches of each shape of a step.

With backward outside of the context, all forwards come first, and backward begins with the first one. The shape
"retained" runs each backward twice. With "unused", the side branch is alive during backward and never differentiated.
"""


@pytest.fixture
def _no_donated_buffers() -> Iterator[None]:
    """Compiled backwards otherwise refuse ``retain_graph``."""
    import torch._functorch.config as config

    with config.patch(donated_buffer=False):
        yield


@pytest.fixture(autouse=True, scope="module")
def _release_the_models() -> Iterator[None]:
    """The models of `tower` lie on the simulated device, whose memory later tests limit and measure."""
    yield
    tower.cache_clear()


def step(
    model: Tower, shape: str, offloader: Offloader | None = None, *, inside: bool, settled: bool = False
) -> list[Tensor | None]:
    """The losses and every gradient of one step, with backward inside or outside; see `gradients` for ``settled``."""

    def backward(loss: Tensor) -> None:
        for remaining in reversed(range(2 if shape == "retained" else 1)):
            if settled:
                settle(offloader)
            loss.backward(retain_graph=remaining > 0)

    model.zero_grad()
    torch.manual_seed(3)
    device = next(model.parameters()).device.type
    losses, sides = [], []
    for seed in SEEDS[shape]:
        with offloader or nullcontext():
            loss, side = model(tokens(seed, device))
            losses.append(loss if shape == "unused" else loss + side.mean())
            sides.append(side)
            if inside:
                backward(losses[-1])
    if not inside:
        for loss in losses:
            backward(loss)
    return [*(loss.detach() for loss in losses), *(parameter.grad for parameter in model.parameters())]


def check(model: Tower, shape: str, offloader: Offloader, maker: Maker, *, inside: bool) -> None:
    reference = step(model, shape, inside=inside)
    assert sum(gradient is not None for gradient in reference) > 20
    before = offloader.statistics()
    assert_same_bits(step(model, shape, offloader, inside=inside, settled=True), reference)
    maker.assert_moved(offloader, before)
    for _ in range(2):  # the learned order; copies still under way when backward begins
        assert_same_bits(step(model, shape, offloader, inside=inside), reference)
    assert offloader.statistics().live_records == 0


def cases() -> Iterator[Any]:
    """Backend, shape, checkpoint; PyTorch itself refuses ``retain_graph`` through an eager selective checkpoint."""
    for backend, shape, kind in itertools.product((None, "aot_eager"), SEEDS, CHECKPOINTS):
        if (backend, shape, kind) != (None, "retained", "selective"):
            yield pytest.param(backend, shape, kind, marks=[pytest.mark.pairs] if backend else [])


ON_DEVICE = [pytest.mark.simulated, pytest.mark.sampled(11)]
AT = [
    pytest.param(PLACES[0], id=PLACES[0].name),  # both places of the CPU are disk
    *(pytest.param(place, id=place.name, marks=ON_DEVICE) for place in SIMULATED),
]


@pytest.mark.usefixtures("_no_donated_buffers")
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize(("backend", "shape", "kind"), list(cases()), ids=lambda value: value or "eager")
@pytest.mark.parametrize("place", AT)
def test_matrix(backend: str | None, shape: str, kind: str, inside: bool, make_offloader: Maker) -> None:
    if (backend, kind) == ("aot_eager", "selective") and make_offloader.place.device != "cpu":
        pytest.skip("PyTorch's compiler knows no random numbers of the simulated device")
    model = tower(kind, backend, make_offloader.place.device)
    check(model, shape, make_offloader(debug=True), make_offloader, inside=inside)


def test_compiled_blocks_are_compiled() -> None:
    loss, _ = tower("none", "aot_eager")(tokens(0))
    seen, queue = set(), [loss.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            queue += [following for following, _ in node.next_functions]
    assert sum(node.name().startswith("CompiledFunction") for node in seen) == LAYERS
