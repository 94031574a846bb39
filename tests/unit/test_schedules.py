"""`layer_major` in one process: gradients, the order of calls, arguments, errors, memory and virtual time."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from actoffload import OffloadConfig, Offloader, schedules
from actoffload.errors import ConfigError
from actoffload.planning.microbatches import Taken, propose_microbatches
from actoffload.planning.profile import Profile, Storage
from actoffload.planning.search import Limits
from actoffload.testing.simulated_device import NAME, SimulatedDevice
from tests import pages, scaled_llama
from tests.blocks import Block
from tests.harness import assert_same_bits, assert_same_gradients, gradients, simulated
from tests.host_bound import use_virtual_time

WIDTH, WORDS = 64, 32


class Model(nn.Module):
    def __init__(self, form: str = "eager", blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block(WIDTH, form) for _ in range(blocks))
        for block in self.blocks if form == "compiled" else ():
            block.compile(backend="aot_eager")

    def after(self, x: Tensor, *rest: Tensor) -> Tensor:
        loss: Tensor = self.out(x).logsumexp(-1).mean()
        return loss

    def loop(self, inputs: list[Tensor]) -> None:
        for tokens in inputs:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            self.after(x).backward()

    def forward(self, inputs: list[Any]) -> list[Tensor]:
        return schedules.layer_major(self.blocks, inputs, before=self.embed, after=self.after)


def batches(count: int = 4) -> list[Tensor]:
    return list(torch.randint(WORDS, (count, 8, 16), generator=torch.Generator().manual_seed(1)))


def step(model: nn.Module, inputs: list[Any], context: Any = None) -> dict[str, Tensor]:
    with context or contextlib.nullcontext():
        total: Any = sum(model(inputs))
    if context is not None:
        context.synchronize()  # backward finds copies that have left
    total.backward()
    return gradients(model)


# -- gradients --------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {"plain": None, "offloaded": {"boundaries": "all"}, "boundaries": {"boundaries": "only"}}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("form", ["eager", "checkpointed", "compiled", "lora", "in place"])
def test_gradients_equal_a_loops(form: str, options: str, tmp_path: Path) -> None:
    loop, model = Model(form), Model(form)
    loop.loop(batches())
    expected = gradients(loop)
    passed = OPTIONS[options]
    if passed is None:
        assert_same_gradients(step(model, batches()), expected)
        return
    config = OffloadConfig(
        target="nvme", path=tmp_path, min_bytes=0, announce="none", policy="all", keep_last_bytes=0, **passed
    )
    offloader = Offloader(config)
    assert_same_gradients(step(model, batches(), offloader), expected)
    statistics = offloader.statistics()
    offloader.close()
    assert statistics.live_records == 0
    if options == "offloaded":
        assert statistics.moved_share > 0.8
    elif form == "checkpointed":
        assert statistics.nvme_written_bytes >= len(batches()) * 2 * 8 * 16 * WIDTH * 4, "boundaries of two blocks"


def test_a_tied_weight_adds_up_the_heads_gradients_first() -> None:
    """Autograd adds the gradients of a tied weight up in the order of backward, and a loop has another order."""
    tied, apart, loop = Model(), Model(), Model()
    for model in (tied, loop):
        model.out.weight = model.embed.weight
    apart.out.weight = nn.Parameter(apart.embed.weight.detach().clone())
    found = step(tied, batches())["embed.weight"]
    heads, embeds = [], []
    for one in batches():
        apart.loop([one])
        of_this = gradients(apart)
        heads.append(of_this["out.weight"])
        embeds.append(of_this["embed.weight"])
    in_order = heads[0]
    for one in (*heads[1:], *embeds):
        in_order = in_order + one
    assert_same_bits([found], [in_order])
    loop.loop(batches())
    torch.testing.assert_close(found, gradients(loop)["embed.weight"])


# -- calls and their arguments -----------------------------------------------------------------------------------------


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = (text for name, text in pages.BLOCKS.items() if name.startswith("docs/schedules.md"))
    names: dict[str, Any] = {}
    exec(block, names)
    assert all(parameter.grad is not None for parameter in names["model"].parameters())
    assert names["attachment"].offloader.statistics().nvme_written_bytes > 0
    names["attachment"].detach()


def test_every_block_runs_all_micro_batches_before_the_next_one() -> None:
    calls: list[tuple[str, int]] = []

    class Noted(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            calls.append((self.name, int(x[0])))
            y, number = x * 1, int(x[0])
            y.register_hook(lambda _: calls.append((f"{self.name} backward", number)))
            return y

    inputs = [torch.full((1,), float(n), requires_grad=True) for n in range(3)]
    losses = schedules.layer_major([Noted("a"), Noted("b")], inputs)
    assert [loss.item() for loss in losses] == [0, 1, 2], "in the order of the inputs"
    assert calls == [("a", 2), ("a", 1), ("a", 0), ("b", 2), ("b", 1), ("b", 0)]
    calls.clear()
    total: Any = sum(losses)
    total.backward()
    assert [name for name, _ in calls] == ["b backward"] * 3 + ["a backward"] * 3
    assert [number for _, number in calls] == [0, 1, 2] * 2, "so gradients add up as in a loop"


def test_elements_beside_the_first_go_to_every_block_and_to_after() -> None:
    x, factor, label = torch.ones(2, WIDTH), torch.full((1,), 2.0), torch.tensor(3.0)
    blocks = nn.ModuleList([Block(WIDTH)])
    got: list[Any] = []

    def after(x: Tensor, *rest: Tensor) -> Tensor:
        got.append(rest)
        return x.mean()

    (loss,) = schedules.layer_major(blocks, [(x, factor)], after=after)
    assert torch.equal(loss, blocks[0](x, factor).mean())
    assert got == [(factor,)]

    def before(x: Tensor, label: Tensor) -> tuple[Tensor, ...]:
        return (x + label, factor)

    (loss,) = schedules.layer_major(blocks, [(x, label)], before=before, after=after)
    assert torch.equal(loss, blocks[0](x + label, factor).mean())
    assert got == [(factor,), (label,)], "the elements of the micro-batch, not of `before`"


def test_blocks_may_return_a_tuple_of_one() -> None:
    class Tuple(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x + 1,)

    (found,) = schedules.layer_major([Tuple()], [torch.zeros(2)])
    assert torch.equal(found, torch.ones(2))


class _Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


ONE = [torch.ones(2)]
BLOCKS = [nn.Identity()]


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("inputs", lambda: schedules.layer_major(BLOCKS, [])),
        ("inputs", lambda: schedules.layer_major(BLOCKS, torch.ones(2))),  # type: ignore[arg-type]
        ("inputs", lambda: schedules.layer_major(BLOCKS, [()])),
        ("inputs", lambda: schedules.layer_major(BLOCKS, [(1, torch.ones(2))])),
        ("inputs", lambda: schedules.layer_major(BLOCKS, [{"x": 1}])),  # type: ignore[list-item]
        ("blocks", lambda: schedules.layer_major([], ONE)),
        ("blocks", lambda: schedules.layer_major(nn.Linear(2, 2), ONE)),  # type: ignore[arg-type]
        ("blocks", lambda: schedules.layer_major([torch.sin], ONE)),  # type: ignore[list-item]
        ("blocks", lambda: schedules.layer_major([_Two()], ONE)),
        ("before", lambda: schedules.layer_major(BLOCKS, ONE, before=3)),  # type: ignore[arg-type]
        ("before", lambda: schedules.layer_major(BLOCKS, ONE, before=lambda x: (2, x))),
        ("before", lambda: schedules.layer_major(BLOCKS, ONE, before=lambda x: None)),
        ("after", lambda: schedules.layer_major(BLOCKS, ONE, after="mean")),  # type: ignore[arg-type]
        ("after", lambda: schedules.layer_major(BLOCKS, ONE, after=lambda x: x)),
        ("after", lambda: schedules.layer_major(BLOCKS, ONE, after=lambda x: float(x.sum()))),
    ],
)
def test_bad_arguments_are_named(field: str, call: Callable[[], object]) -> None:
    with pytest.raises(ConfigError) as raised:
        call()
    assert raised.value.field == field


# -- sharded modules --------------------------------------------------------------------------------------------------


class Sharded(nn.Module):
    """Has FSDP2's setters and no more, and counts gathers and reductions; each may take virtual time."""

    def __init__(self, inner: nn.Module, collective: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.inner, self.collective = inner, collective
        self.set = {"reshard_after_forward": True, "reshard_after_backward": True, "requires_gradient_sync": True}
        self.gathered, self.gathers, self.reductions = False, 0, 0

    def set_reshard_after_forward(self, value: bool, *, recurse: bool = True) -> None:
        self.set["reshard_after_forward"] = value

    def set_reshard_after_backward(self, value: bool, *, recurse: bool = True) -> None:
        self.set["reshard_after_backward"] = value

    def set_requires_gradient_sync(self, value: bool, *, recurse: bool = True) -> None:
        self.set["requires_gradient_sync"] = value

    def reshard(self) -> None:
        self.gathered = False

    def gather(self, *_: Any) -> None:
        if not self.gathered:
            self.gathered, self.gathers = True, self.gathers + 1
            self.collective()

    def forward(self, x: Tensor, *rest: Tensor) -> Any:
        self.gather()
        y = self.inner(_AfterBackward.apply(self, x), *rest)
        self.gathered = not self.set["reshard_after_forward"]
        y.register_hook(self.gather)
        return y


class _AfterBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: Sharded, x: Tensor) -> Tensor:
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        if ctx.module.set["requires_gradient_sync"]:
            ctx.module.reductions += 1
            ctx.module.collective()
        ctx.module.gathered = not ctx.module.set["reshard_after_backward"]
        return None, gradient


def test_fsdp2_is_known_by_its_setters_alone_and_a_second_backward_is_as_the_first() -> None:
    """A PyTorch that keeps its settings under other names gets its defaults back."""
    model = Model()
    blocks = [Sharded(block) for block in model.blocks]
    model.blocks = nn.ModuleList(blocks)
    total: Any = sum(model(batches()))
    total.backward(retain_graph=True)
    assert {(block.gathers, block.reductions, block.gathered) for block in blocks} == {(2, 1, False)}
    assert all(all(block.set.values()) for block in blocks)
    first = gradients(model)
    total.backward()
    assert_same_gradients(gradients(model), first)
    assert {(block.gathers, block.reductions, block.gathered) for block in blocks} == {(3, 2, False)}
    assert all(all(block.set.values()) for block in blocks)


# -- on the simulated device ------------------------------------------------------------------------------------------


class _Boundaries:
    """Layer-major steps of checkpointed layers of `scaled_llama`, of which only the inputs move, in virtual time.

    Args:
        device: the simulated device.
        patch: of the test.
        share: the time of a gather and a reduction, as a share of a layer's compute for one micro-batch.
    """

    LAYERS = 3

    def __init__(self, device: SimulatedDevice, patch: pytest.MonkeyPatch, share: float = 0.0) -> None:
        use_virtual_time(device, patch)
        scaled_llama.scale(patch)
        self.device = device
        self.collective_s = 0.0
        alone = scaled_llama.Step(device, 6e-6, self.LAYERS, checkpointed=True)
        self.layers = nn.ModuleList(Sharded(layer, self._collective) for layer in alone.model)
        self.layer_s = self._take(lambda: self.loop(self.inputs(2))) / 2 / self.LAYERS
        self.collective_s = share * self.layer_s

    def _collective(self) -> None:
        if self.collective_s:
            self.device.sleep(self.collective_s)

    def inputs(self, count: int) -> list[Tensor]:
        shape = scaled_llama.TOKENS, scaled_llama.WIDTH
        return [torch.randn(shape).to(NAME).requires_grad_() for _ in range(count)]

    def loop(self, inputs: list[Tensor]) -> None:
        """Micro-batch after micro-batch; gradients are reduced with the last one."""
        for x in inputs:
            for layer in self.layers:
                layer.set["requires_gradient_sync"] = x is inputs[-1]  # type: ignore[index,operator]
            for layer in self.layers:
                x = layer(x)
            x.square().mean().backward()

    def forward(self, inputs: list[Tensor]) -> Tensor:
        total: Any = sum(schedules.layer_major(self.layers, inputs, after=lambda x: x.square().mean()))
        return cast(Tensor, total)

    def _take(self, work: Callable[[], None]) -> float:
        self.device.synchronize()
        began_s = self.device.clock_s
        work()
        self.device.synchronize()
        return self.device.clock_s - began_s

    def loop_s(self, count: int) -> float:
        """Seconds of a loop that moves nothing."""
        inputs = self.inputs(count)
        return self._take(lambda: self.loop(inputs))

    def layer_major(self, count: int) -> dict[str, float]:
        """A layer-major step: its seconds, the seconds that it waited, and its peaks in boundaries."""
        inputs = self.inputs(count)
        boundary = inputs[0].nbytes
        found: dict[str, float] = {}
        with simulated(boundaries="only", announce="none", host_budget=1 << 28) as offloader:

            def take() -> None:
                with offloader:
                    total = self.forward(inputs)
                total.backward()

            for _ in range(3):
                before = offloader.statistics()
                torch.accelerator.reset_peak_memory_stats()
                there = torch.accelerator.memory_allocated()
                found["step_s"] = self._take(take)
                found["allocated"] = (torch.accelerator.max_memory_allocated() - there) / boundary
            after = offloader.statistics()
            found["waited_s"] = after.wait_s - before.wait_s
            found["moved"] = (after.moved_bytes - before.moved_bytes) / boundary
            found["resident"] = after.resident_peak_bytes / boundary
        return found


@pytest.mark.simulated
def test_a_step_with_gathers_is_shorter_than_a_loop(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the resident peak grows by less than a boundary for each micro-batch."""
    steps = _Boundaries(device, monkeypatch, share=0.3)
    one, eight = steps.layer_major(1), steps.layer_major(8)
    assert eight["step_s"] <= 0.75 * steps.loop_s(8)
    assert eight["waited_s"] < 0.02 * eight["step_s"]
    assert one["step_s"] <= 1.01 * steps.loop_s(1)
    assert eight["moved"] >= (steps.LAYERS - 1) * 8, "the boundaries of all layers but the first"
    assert eight["resident"] - one["resident"] < 8 - 1


def _taken() -> Taken:
    """Four regions of two micro-batches with three samples; each input has 300 bytes, and all may move."""
    storages = [Storage(index=n, nbytes=300, birth_s=0, need_s=0, last_need_s=0, input_of=n) for n in range(8)]
    profile = Profile(storages=tuple(storages), forward_s=1.0)
    return Taken(profile=profile, batch=3, count=2, fixed_bytes=1000, peak_bytes=4000)


@pytest.mark.parametrize(
    ("memory", "host", "samples", "expected"),
    [
        (10**6, None, 12, (12, 1, 1000 + 12 * 900, 12 * 400)),
        (4000, None, 6, (3, 2, 4000, 2400)),
        (4000, None, 12, (2, 6, 3800, 4800)),
        (10**6, 1200, 12, (3, 1, 3700, 1200)),
        (2000, None, 64, (1, 2, 2000, 800)),
    ],
)
def test_a_proposal_has_as_many_samples_as_there_is_room_for(
    memory: int, host: int | None, samples: int, expected: tuple[int, ...]
) -> None:
    found = propose_microbatches(_taken(), Limits(host_budget=host, tiers=("host",)), memory, samples)
    assert (found.size, found.count, found.device_bytes, found.movable_bytes) == expected


def test_an_impossible_proposal_has_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one sample takes"):
        propose_microbatches(_taken(), Limits(tiers=("host",)), 1800, 4)
    offloader = Offloader(OffloadConfig(target="nvme", path=tmp_path))
    for options, field in (({"batch": 0, "samples": 1}, "batch"), ({"batch": 1, "samples": 1}, "policy")):
        with pytest.raises(ConfigError) as raised:
            offloader.microbatches("1GiB", **options)
        assert raised.value.field == field
    offloader.close()


@pytest.mark.simulated
def test_a_proposal_takes_its_predicted_memory(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # tensors that earlier tests have left would die between the two measurements
    device.synchronize()
    steps = _Boundaries(device, monkeypatch)
    options: dict[str, Any] = {"boundaries": "only", "policy": "auto", "announce": "none", "host_budget": 1 << 28}

    def peak(offloader: Offloader, size: int, count: int) -> int:
        shape = size * scaled_llama.TOKENS, scaled_llama.WIDTH
        inputs = [torch.randn(shape).to(NAME) for _ in range(count)]
        for _ in range(4):
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            with offloader:
                total = steps.forward(inputs)
            total.backward()
            torch.accelerator.synchronize()
        return torch.accelerator.max_memory_allocated()

    with simulated(**options) as offloader:
        small = peak(offloader, 1, 2)
        memory = 2 * small
        proposed = offloader.microbatches(memory, batch=1, count=2, samples=8)
    with simulated(**options) as offloader:
        measured = peak(offloader, proposed.size, proposed.count)
        assert 0 < offloader.plan.offloaded_bytes <= proposed.movable_bytes
    assert measured == pytest.approx(proposed.device_bytes, rel=0.05)
    assert measured <= memory
    assert proposed.count * proposed.size == 8
