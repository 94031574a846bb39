"""Gradients have the same bits however one trains: {eager, compiled} x checkpoints x backward in/outside x shapes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
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

SHAPES = ("one", "many", "retained", "unused")


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


class Step:
    """One training step: a shape, with backward inside or outside the context; see `gradients` for ``settled``."""

    def __init__(
        self, model: Tower, offloader: Offloader | None = None, *, inside: bool, settled: bool = False
    ) -> None:
        self.model = model
        self.offloader = offloader
        self.inside = inside
        self.settled = settled
        self.device = next(model.parameters()).device.type

    def run(self, shape: str) -> list[Tensor | None]:
        """The losses and every gradient."""
        self.model.zero_grad()
        torch.manual_seed(3)
        losses: list[Tensor] = getattr(self, shape)()
        return [*losses, *(parameter.grad for parameter in self.model.parameters())]

    def one(self) -> list[Tensor]:
        return self._each([0], lambda loss, side: loss + side.mean())

    def many(self) -> list[Tensor]:
        """Micro-batches; with backward outside the forwards all come first, and backward begins with the first."""
        return self._each([0, 1, 2], lambda loss, side: loss + side.mean())

    def retained(self) -> list[Tensor]:
        return self._each([0], lambda loss, side: loss + side.mean(), times=2)

    def unused(self) -> list[Tensor]:
        """The side branch is alive during backward and never differentiated."""
        return self._each([0, 1], lambda loss, side: loss)

    def _each(self, seeds: list[int], total: Callable[[Tensor, Tensor], Tensor], times: int = 1) -> list[Tensor]:
        losses, sides = [], []
        for seed in seeds:
            with self.offloader or nullcontext():
                loss, side = self.model(tokens(seed, self.device))
                losses.append(total(loss, side))
                sides.append(side)
                if self.inside:
                    self._backward(losses[-1], times)
        if not self.inside:
            for loss in losses:
                self._backward(loss, times)
        return [loss.detach() for loss in losses]

    def _backward(self, loss: Tensor, times: int) -> None:
        for remaining in reversed(range(times)):
            if self.settled:
                settle(self.offloader)
            loss.backward(retain_graph=remaining > 0)


def check(model: Tower, shape: str, offloader: Offloader, maker: Maker, *, inside: bool) -> None:
    reference = Step(model, inside=inside).run(shape)
    assert sum(gradient is not None for gradient in reference) > 20
    before = offloader.statistics()
    assert_same_bits(Step(model, offloader, inside=inside, settled=True).run(shape), reference)
    maker.assert_moved(offloader, before)
    for _ in range(2):  # the learned order; copies still under way when backward begins
        assert_same_bits(Step(model, offloader, inside=inside).run(shape), reference)
    assert offloader.statistics().live_records == 0


def cases() -> Iterator[Any]:
    """Backend, shape, checkpoint; PyTorch itself refuses ``retain_graph`` through an eager selective checkpoint."""
    for backend, shape, kind in itertools.product((None, "aot_eager"), SHAPES, CHECKPOINTS):
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
