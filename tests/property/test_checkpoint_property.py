"""Any set of checkpointed regions of any kind runs once: gradients have the bits of PyTorch's checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import actoffload
from actoffload import OffloadConfig, Offloader, Plan
from tests.harness import (
    ON_EACH_DEVICE,
    accounts_of,
    assert_empty,
    assert_same_bits,
    following,
    profile_of,
    recorder_of,
    same_bits,
)

WIDTH, ROWS = 32, 16
MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


@dataclass(frozen=True)
class Kind:
    dropout: bool = False
    nested: str = ""  # "", "once" or "twice": checkpoints inside
    arguments: str = "position"  # or "keyword", "closure"
    contexts: str = ""  # "", "ours", "PyTorch's" (selective), "own"
    early_stop: bool = True
    stashes_random: bool = True
    tied: bool = False
    unused: bool = False  # its output has no part in the loss
    raises: str = ""  # "", "first" (the program tries again without a checkpoint)
    entry: str = "PyTorch's"  # or "ours"
    reentrant: bool = False  # a region that is no region of ours


@dataclass(frozen=True)
class Step:
    kinds: tuple[Kind, ...]
    once: frozenset[int]
    policy: str = "all"
    forwards: int = 1
    inside: bool = False
    backward: str = "plain"  # or "retained", "double"
    autocast: bool = False
    recorded: bool = False
    in_order: bool = False
    planned: bool = False
    budget: bool = False


class Error(Exception):
    """Raised by a region of the program."""


class Net(nn.Module):
    """Blocks, each a checkpointed region of its kind; some share one weight."""

    def __init__(self, kinds: tuple[Kind, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kinds = kinds
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.ups = nn.ModuleList(self.shared if kind.tied else nn.Linear(WIDTH, WIDTH) for kind in kinds)
        self.downs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in kinds)
        self.log: list[str] = []

    def block(self, place: int, x: Tensor, scale: Tensor) -> Tensor:
        kind = self.kinds[place]
        inner = partial(self.inner, place)
        if kind.nested and not kind.reentrant:
            y = checkpoint(inner, x, scale, use_reentrant=False)
            y = checkpoint(inner, y, scale, use_reentrant=False) if kind.nested == "twice" else y
        else:
            y = inner(x, scale)
        found: Tensor = x + y
        return found

    def inner(self, place: int, x: Tensor, scale: Tensor) -> Tensor:
        kind = self.kinds[place]
        y = torch.tanh(self.ups[place](x)) * torch.sigmoid(x) * scale
        y = F.dropout(y, 0.3) if kind.dropout else y
        return F.gelu(self.downs[place](y))

    def region(self, place: int, x: Tensor, scale: Tensor) -> Tensor:
        """Call a checkpoint of this region's kind."""
        kind, block = self.kinds[place], partial(self.block, place)
        if kind.reentrant:
            found: Tensor = checkpoint(block, x, scale, use_reentrant=True)
            return found
        options: dict[str, Any] = {"early_stop": kind.early_stop, "preserve_rng_state": kind.stashes_random}
        contexts = {"": None, "own": self.own_contexts}
        contexts["ours"] = partial(actoffload.create_selective_checkpoint_contexts, MATMULS)
        contexts["PyTorch's"] = partial(create_selective_checkpoint_contexts, MATMULS)
        if contexts[kind.contexts] is not None:
            options["context_fn"] = contexts[kind.contexts]
        call: Any = actoffload.checkpoint
        if kind.entry != "ours":
            call = partial(checkpoint, use_reentrant=False)
        if kind.raises:
            with contextlib.suppress(Error):
                call(partial(self.raising, block), x, scale, **options)
        if kind.arguments == "keyword":
            y: Tensor = call(lambda x, scale=None: block(x, scale), x, scale=scale, **options)
        elif kind.arguments == "closure":
            y = call(lambda x: block(x, scale), x, **options)
        else:
            y = call(block, x, scale, **options)
        return x if kind.unused else y

    def own_contexts(self) -> tuple[Any, Any]:
        """The program's own contexts, which note the same in the first run whether a second run follows or not."""
        return self.noted("first"), contextlib.nullcontext()

    @contextlib.contextmanager
    def noted(self, word: str) -> Any:
        """Note the entry, and whether an error left it."""
        try:
            yield
        except Error:
            self.log.append(f"{word} raised")
            raise
        self.log.append(word)

    @staticmethod
    def raising(block: Any, *args: Any) -> Tensor:
        """Compute, and fail at the end."""
        block(*args)
        raise Error

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin().exp()  # needs a gradient, as a reentrant checkpoint requires, and saves a tensor that is used
        scale = torch.sigmoid(x[:1] * self.shared.bias)
        for place in range(len(self.kinds)):
            x = self.region(place, x, scale)
        return x


def run(net: Net, step: Step, device: str, offloader: Offloader | None) -> tuple[list[Any], Tensor, list[str]]:
    """One step: gradients, the random state afterwards, and the notes of the program's contexts."""
    torch.manual_seed(5)
    net.log.clear()
    inputs = [torch.randn(ROWS, WIDTH).to(device).requires_grad_() for _ in range(step.forwards)]
    losses: list[Tensor] = []
    context: Callable[[], Any] = contextlib.nullcontext if offloader is None else lambda: offloader
    if step.recorded and offloader is not None:
        recorder_of(offloader).begin()
    for x in inputs:
        with context():
            with torch.autocast(device, torch.bfloat16) if step.autocast else contextlib.nullcontext():
                losses.append(net(x).float().square().mean())
            if step.inside:
                backward(net, losses.pop(), inputs, step)
    if not step.in_order:
        losses.reverse()
    while losses:
        backward(net, losses.pop(0), inputs, step)
    found = [parameter.grad for parameter in net.parameters()] + [x.grad for x in inputs]
    net.zero_grad(set_to_none=True)
    if step.recorded and offloader is not None:
        recorder_of(offloader).finish()
        if device != "cpu":
            torch.accelerator.synchronize()
        check_profile(offloader, step)
    return found, torch.get_rng_state(), list(net.log)


def backward(net: Net, loss: Tensor, inputs: list[Tensor], step: Step) -> None:
    if step.backward == "double":
        wanted = [*net.parameters(), *inputs]
        grads = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        torch.stack([grad.square().sum() for grad in grads if grad is not None]).sum().backward()
        return
    if step.backward == "retained":
        loss.backward(retain_graph=True)
    loss.backward()


def check_profile(offloader: Offloader, step: Step) -> None:
    """The recorded step is a profile: a region that ran once has saved tensors, any other has saved them again."""
    profile = profile_of(offloader)
    held = sum(storage.kept == "recomputed" for storage in profile.storages)
    assert held >= sum(bool(region.saves) for region in profile.regions)
    for region in profile.regions:
        assert (region.again_s is None) or region.place not in step.once
    inside = {storage.region for storage in profile.storages} - {None}
    assert inside <= step.once


def regions_of(kinds: tuple[Kind, ...]) -> int:
    """How many regions of ours a forward has: one that raised was one as well."""
    return sum(1 + bool(kind.raises) for kind in kinds if not kind.reentrant and kind.contexts != "own")


@st.composite
def steps(draw: Any) -> Step:
    """Any step that PyTorch itself can do."""
    backward = draw(st.sampled_from(["plain", "plain", "retained", "double"]))
    flags = {name: draw(st.booleans()) for name in ("inside", "autocast", "recorded", "in_order", "planned", "budget")}
    kinds = []
    for _ in range(draw(st.integers(1, 4))):
        dropout = draw(st.booleans())
        selective = ["", "", "own"] if backward != "plain" else ["", "own", "ours", "PyTorch's"]
        reentrant = backward == "plain" and draw(st.integers(0, 5)) == 0
        kinds.append(
            Kind(
                dropout=dropout,
                nested=draw(st.sampled_from(["", "", "once", "twice"])),
                arguments=draw(st.sampled_from(["position", "keyword", "closure"])),
                contexts=draw(st.sampled_from(selective)),
                early_stop=draw(st.booleans()),
                stashes_random=dropout or draw(st.booleans()),
                tied=draw(st.booleans()),
                unused=draw(st.integers(0, 5)) == 0,
                raises=draw(st.sampled_from(["", "", "", "first"])),
                entry=draw(st.sampled_from(["ours", "PyTorch's"])),
                reentrant=reentrant,
            )
        )
    once = draw(st.frozensets(st.integers(0, regions_of(tuple(kinds)))))
    policy = draw(st.sampled_from(["all", "greedy", "keep"]))
    return Step(tuple(kinds), once, policy, forwards=draw(st.integers(1, 3)), backward=backward, **flags)


def check(step: Step, device: str, **options: Any) -> None:
    count = regions_of(step.kinds)
    policy: Any = step.policy
    if step.planned:
        policy = Plan((), once=tuple(sorted(place for place in step.once if place < count)), regions=count)
    if step.budget:
        options["device_budget"] = 40 << 10
    net = Net(step.kinds).to(device)
    try:
        # A process's first backward on the simulated device rounds otherwise, without us.
        for _ in range(1 if device == "cpu" else 2):
            expected = run(net, step, device, None)
    except RuntimeError:  # a selective checkpoint meets autocast's cache of another region, for example
        reject()
    fields: dict[str, Any] = {"min_bytes": 0, "keep_last_bytes": 0, "announce": "none"}
    offloader = Offloader(OffloadConfig(policy=policy, **fields, **options)).use(net)
    try:
        if not step.planned:
            following(offloader, *step.once)
        for _ in range(2):
            found = run(net, step, device, offloader)
            try:
                assert_same_bits(found[0], expected[0], "gradient")
            except AssertionError:
                if step.backward == "double" and not is_reproducible(net, step, device, expected[0]):
                    reject()
                raise
            assert torch.equal(found[1], expected[1]), "the random numbers that follow"
            assert found[2] == expected[2], "the notes of the program's own contexts"
            if not (step.inside and step.backward == "double"):  # the penalty is a forward without regions
                assert offloader.statistics().regions == count
                assert offloader.statistics().regions_once == len([place for place in step.once if place < count])
            offloader.statistics()  # counts the tensors that are alive
            accounts = accounts_of(offloader)
            assert (accounts.recomputed_bytes, accounts.baseline_bytes) == (0, 0)
        if options["target"] != "host":
            assert_empty(offloader)
    finally:
        offloader.abort()


def is_reproducible(net: Net, step: Step, device: str, expected: list[Any]) -> bool:
    """Whether PyTorch alone computes the same bits again.

    It numbers the nodes of each thread apart, and of the nodes that are ready it runs the one with the highest number.
    So the order and the sums of a graph that a device's thread has built depend on earlier steps.
    """
    again = [run(net, step, device, None)[0] for _ in range(4)]
    return all(same_bits(one, other) for each in again for one, other in zip(each, expected, strict=True))


@ON_EACH_DEVICE
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(step=steps(), target=st.sampled_from(["nvme", "host"]))
def test_any_regions_run_once(where: str, step: Step, target: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check(step, where, target=target, path=str(tmp_path_factory.getbasetemp()))
