"""`actoffload.checkpoint`, the checkpoints of programs, and the blocks that ``recompute=`` names."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint_activation as composable
from torch.utils import checkpoint as plain

import actoffload
from actoffload import Offloader, Plan, Profile, checkpoint, no_offload
from actoffload.autograd import checkpoints
from actoffload.autograd.hook_stack import top
from actoffload.errors import ConfigError, SavedTensorModifiedError
from actoffload.planning.regions import choosable, with_regions
from actoffload.testing.gpt import GPT, GPTConfig
from actoffload.testing.simulated_device import NAME
from tests.harness import (
    WAIT_S,
    Chain,
    MakeOffloader,
    accounts_of,
    assert_empty,
    assert_same_bits,
    assert_same_gradients,
    autopilot_of,
    batch,
    budget_of,
    following,
    gradients,
    lock_of,
    note_rooms,
    profile_of,
    recorder_of,
    run_in_threads,
    train_step,
    until_recorded,
)

ACTIVATION = batch().nbytes


class Blocks(nn.Module):
    """Blocks under a checkpoint each, which count their runs."""

    def __init__(self, depth: int = 3, call: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Chain(64, 2) for _ in range(depth))
        self.runs: list[int] = []
        self.call = call or (lambda function, x: plain.checkpoint(function, x, use_reentrant=False))
        for place, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(lambda _module, _args, place=place: self.runs.append(place))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x

    def step(self, offloader: Offloader | None = None, **options: Any) -> tuple[dict[str, Tensor], list[int]]:
        """Gradients, and the blocks in the order in which they ran."""
        self.runs.clear()
        return train_step(self, batch(), offloader, **options), list(self.runs)

    def again(self, loss: Tensor) -> list[int]:
        """The blocks that run again in the backward of a loss."""
        self.runs.clear()
        loss.backward()
        return self.runs


# -- regions that run once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("call", [None, checkpoint, nn.Module.__call__], ids=["PyTorch's", "ours", "composable"])
def test_regions_that_a_plan_names_run_once_and_all_others_again(
    make_offloader: MakeOffloader, call: Any, inside: bool
) -> None:
    model = Blocks(call=call)
    for layer in model.layers if call is nn.Module.__call__ else []:
        composable.checkpoint(layer)
    expected, runs = model.step()
    assert runs == [0, 1, 2, 2, 1, 0]
    offloader = following(make_offloader(), 1)
    for _ in range(2):
        found, runs = model.step(offloader, inside=inside)
        assert runs == [0, 1, 2, 2, 0]
        assert_same_gradients(found, expected)
        assert_empty(offloader)
    statistics = offloader.statistics()
    assert (statistics.regions, statistics.regions_once) == (3, 1)
    plan = offloader.plan
    assert (plan.regions, plan.once) == (3, (1,))


@pytest.mark.parametrize(
    ("options", "reentrant", "named"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"policy": "greedy"}, True, False),
        ({"checkpoints": "leave"}, True, False),
    ],
)
def test_reentrant_checkpoints_are_named_once_and_what_to_set_instead(
    options: dict[str, Any], reentrant: bool, named: bool, tmp_path: Path
) -> None:
    lines: list[str] = []
    model = Blocks(call=lambda function, x: plain.checkpoint(function, x, use_reentrant=reentrant))
    attachment = actoffload.attach(model, target="nvme", path=str(tmp_path), announce=lines.append, **options)
    x = batch().requires_grad_()
    for _ in range(3):
        model(x).sum().backward()
    said = "3 checkpointed blocks run again in backward in any case, because their checkpoints are reentrant"
    assert sum(said in line for line in lines) == named
    assert (f"note: {said}" in attachment.offloader.report()) is named


def test_reentrant_checkpoints_count_where_their_forward_makes_a_node(make_offloader: MakeOffloader) -> None:
    lines: list[str] = []
    run = partial(checkpoint, use_reentrant=True)
    with make_offloader(policy="auto", announce=lines.append):
        x = batch().requires_grad_()
        y = run(lambda x: run(torch.exp, x), x)
        with torch.no_grad():
            run(torch.exp, x)
        with no_offload():
            run(torch.exp, x)
        y.sum().backward()  # runs the inner one with gradients
    assert sum("1 checkpointed blocks run again" in line for line in lines) == 1


def test_pytorchs_class_of_reentrant_checkpoints_serves_programs_as_before(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep, subclass or pickle it, and put another class in its place."""
    offloader = make_offloader()
    theirs: Any = plain.CheckpointFunction
    assert pickle.loads(pickle.dumps(theirs.apply)) == theirs.apply

    class Named(theirs):
        @staticmethod
        def forward(function: Any, x: Tensor, times: int = 1) -> Any:
            return function(x) * times

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return None, gradients[0] * ctx.saved_tensors[0], None

    monkeypatch.setattr(plain, "CheckpointFunction", Named)
    for times, call in (1, partial(theirs.apply, torch.exp, True)), (2, partial(Named.apply, torch.exp, times=2)):
        x = batch().requires_grad_()
        with offloader:
            loss = call(x).sum()
        loss.backward()
        assert x.grad is not None
        assert_same_gradients({"x": x.grad}, {"x": times * batch().exp()})


def test_where_no_plan_may_choose_all_is_pytorchs_own(make_offloader: MakeOffloader) -> None:
    """Outside of a context, without gradients, without offload, inside of other hooks, and by the option."""
    model = Blocks()
    offloader = following(make_offloader(), 0, 1, 2)
    assert model.step()[1] == [0, 1, 2, 2, 1, 0]
    with offloader, torch.no_grad():
        model(batch())
    with offloader, no_offload():
        loss = model(batch()).sum()
    assert model.again(loss) == [2, 1, 0]
    assert offloader.statistics().regions == 0
    with offloader, torch.autograd.graph.save_on_cpu():  # the program's own hooks are the innermost
        loss = model(batch()).sum()
    assert model.again(loss) == [2, 1, 0]
    leaving = following(make_offloader(checkpoints="leave"), 0, 1, 2)
    assert model.step(leaving)[1] == [0, 1, 2, 2, 1, 0]
    statistics = leaving.statistics()
    assert (statistics.regions, statistics.recompute_peak_bytes) == (0, 0)


def test_the_innermost_offloader_chooses(make_offloader: MakeOffloader) -> None:
    model, outer, inner = Blocks(), following(make_offloader(), 0), following(make_offloader(), 2)
    expected = model.step()[0]
    with outer, inner:
        loss = model(batch()).square().sum()
    assert model.again(loss) == [1, 0]
    assert (outer.statistics().regions, inner.statistics().regions) == (0, 3)
    assert_same_gradients(gradients(model), expected)


@pytest.mark.parametrize(("once", "outer_runs"), [((), 2), ((0,), 1)])
def test_a_nested_region_runs_as_pytorch_runs_it(
    make_offloader: MakeOffloader, once: tuple[int, ...], outer_runs: int
) -> None:
    runs = Counter[str]()
    nested: Any = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach)

    def inner(x: Tensor) -> Tensor:
        runs["inner"] += 1
        return torch.tanh(x).exp()

    def outer(x: Tensor) -> Tensor:
        runs["outer"] += 1
        y: Tensor = checkpoint(inner, x.sin())
        with nested:  # another context does not change that
            z: Tensor = checkpoint(inner, y)
        return z

    def gradient(context: Any) -> tuple[Tensor, ...]:
        runs.clear()
        x = batch().requires_grad_()
        with context:
            loss = checkpoint(outer, x.exp()).sum()
        return torch.autograd.grad(loss, x)

    expected = gradient(contextlib.nullcontext())
    assert runs == {"outer": 2, "inner": 4}
    offloader, nested = (following(make_offloader(), *places) for places in (once, (0,)))
    assert_same_bits(gradient(offloader), expected)
    assert runs == {"outer": outer_runs, "inner": 4}
    assert (offloader.statistics().regions, nested.statistics().regions) == (1, 0)


def test_each_forward_of_a_step_counts_its_own_regions(make_offloader: MakeOffloader) -> None:
    """Micro-batches: in contexts of their own, and in one that is open all the time."""
    model, offloader = Blocks(), following(make_offloader(), 0)
    with offloader:
        first = model(batch()).sum()
    with offloader:
        second = model(batch(seed=2)).sum()
    assert [*model.again(second), *model.again(first)] == [2, 1, 2, 1]
    with offloader:
        for _ in range(2):
            assert model.again(model(batch()).sum()) == [2, 1]


def test_a_recomputation_ends_its_forward_before_backward_reaches_a_tensor(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy="all")
    x = batch().requires_grad_()
    with offloader:
        alive = (x * 1.0001).sin()  # of a branch that this backward leaves alone
        checkpoint(torch.sin, x).sum().backward()
        checkpoint(torch.sin, x)
    assert offloader.statistics().regions == 1
    alive.sum().backward()


def test_threads_count_for_themselves(make_offloader: MakeOffloader) -> None:
    offloader = following(make_offloader(), 1)
    models = [Blocks() for _ in range(3)]
    expected = models[0].step()

    def work(model: Blocks) -> None:
        for _ in range(5):
            found, runs = model.step(offloader)
            assert runs == [0, 1, 2, 2, 0]
            assert_same_gradients(found, expected[0])

    run_in_threads(*(partial(work, model) for model in models))


def raised(x: Tensor) -> list[Any]:
    """The generator of a region that has raised, as releases before 2.13 leave it: only its death closes it."""
    generator = getattr(plain, checkpoints.NAME)(torch.exp, True, plain.noop_context_fn, "default", False, True, x)
    next(generator)
    return [generator]


def test_a_region_that_raises_or_whose_generator_is_closed_is_left(make_offloader: MakeOffloader) -> None:
    """An open region would make every later one count as nested in it."""

    def fails(x: Tensor) -> Tensor:
        raise ArithmeticError(x.exp().sum())

    x = batch().requires_grad_()
    for once in ((), (0,)):
        offloader = following(make_offloader(), *once)
        with offloader:
            kept = x.exp()  # holds the forward alive
            with pytest.raises(ArithmeticError):
                checkpoint(fails, kept)
            raised(kept).clear()
            checkpoint(torch.tanh, kept).sum().backward()
        assert offloader.statistics().regions == 3


class Own(contextlib.nullcontext):  # type: ignore[type-arg]  # it may be a child of the one that does nothing
    """A context of the program, which may swallow errors."""

    def __init__(self, entered: list[str], word: str, swallows: bool = False) -> None:
        self.entered, self.word, self.swallows = entered, word, swallows

    def __enter__(self) -> None:
        self.entered.append(self.word)

    def __exit__(self, *error: object) -> bool:  # type: ignore[override]
        return self.swallows


@pytest.mark.parametrize("once", [(), (0,)])
def test_a_region_with_contexts_of_its_programs_runs_again(
    make_offloader: MakeOffloader, once: tuple[int, ...]
) -> None:
    """The first context may note data that the second run reads, as in torch_remat."""
    entered: list[str] = []
    x = batch().requires_grad_()

    def contexts(swallows: bool = False) -> tuple[Any, Any]:
        return Own(entered, "first", swallows), Own(entered, "second")

    def fails(x: Tensor) -> Tensor:
        raise ArithmeticError

    with following(make_offloader(), *once) as offloader:
        loss = checkpoint(torch.tanh, x.exp(), context_fn=contexts).sum()
    loss.backward()
    assert entered == ["first", "second"]
    assert offloader.statistics().regions == 0
    with following(make_offloader(), *once), pytest.raises((RuntimeError, ArithmeticError)):
        checkpoint(fails, x.exp(), context_fn=lambda: contexts(True))


def test_a_selective_checkpoint_without_a_second_run_caches_nothing(make_offloader: MakeOffloader) -> None:
    """A region that runs once saves its matrix product's result once, as a saved tensor."""
    saved = {}
    for make in (plain.create_selective_checkpoint_contexts, actoffload.create_selective_checkpoint_contexts):
        offloader = following(make_offloader(policy="keep"), 0)
        with offloader:
            x = batch().requires_grad_()
            contexts = partial(make, [torch.ops.aten.mm.default])
            loss = checkpoint(lambda x: torch.tanh(x @ x.mT).exp(), x * 2, context_fn=contexts).sum()
        saved[make] = [entry.nbytes for entry in offloader.plan.entries]
        loss.backward()
        assert offloader.statistics().regions_once == 1
    assert len({tuple(sizes) for sizes in saved.values()}) == 1


def test_after_an_interrupt_regions_belong_to_the_new_store(make_offloader: MakeOffloader) -> None:
    model, offloader = Blocks(), make_offloader()
    expected, _ = model.step()
    graphs = []
    for _ in range(4):
        assert_same_gradients(model.step(offloader)[0], expected)
        assert offloader.statistics().recompute_peak_bytes > 0
        with offloader:
            graphs.append(model(batch()))  # keeps parts of the ended store alive
        offloader.store.abort_if_interrupted(KeyboardInterrupt())


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_reentrant_checkpoints_stay_as_they_are(make_offloader: MakeOffloader, inside: bool) -> None:
    """A checkpoint nested in one saves tensors only in backward, where our hooks may be the innermost."""

    def nested(function: Any, x: Tensor) -> Any:
        return checkpoint(function, x)

    model = Blocks(call=lambda function, x: checkpoint(nested, function, x.requires_grad_(), use_reentrant=True))
    expected = model.step()
    offloader = following(make_offloader(), 0, 1, 2)
    found = model.step(offloader, inside=inside)
    assert found[1] == expected[1]
    assert_same_gradients(found[0], expected[0])
    assert offloader.statistics().regions == 0


@pytest.mark.parametrize("there", ["nothing", "a function", "other arguments"])
def test_without_pytorchs_function_nothing_is_patched_and_one_line_reports_it(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    def other(function: Any, rng: bool) -> Iterator[None]:
        yield

    found: Any = {"a function": lambda *args: iter(args), "other arguments": other}.get(there)
    monkeypatch.setattr(plain, checkpoints.NAME, found)
    if found is None:
        monkeypatch.delattr(plain, checkpoints.NAME)
    offloader = make_offloader()
    assert getattr(plain, checkpoints.NAME, None) is found
    with pytest.warns(RuntimeWarning, match=rf"this PyTorch \({torch.__version__.replace('+', '.')}\) has no function"):
        train_step(Chain(), batch(), offloader)
    assert "checkpointed regions stay as they are" in offloader.report()


def test_an_output_that_is_changed_in_place_is_an_error_that_names_the_option(make_offloader: MakeOffloader) -> None:
    """A recomputation would have made the last operator's saved tensor anew."""

    def loss_of(**options: Any) -> Tensor:
        x = batch().requires_grad_()
        with following(make_offloader(**options), 0):
            y = checkpoint(lambda x: torch.tanh(x * 2), x.exp())
            loss: Tensor = (y.add_(1) * 2).sum()
        return loss

    loss_of(checkpoints="leave").backward()
    with pytest.raises(SavedTensorModifiedError, match=r"modified by an inplace operation.*checkpoints='leave'"):
        loss_of().backward()


def add_to_output(y: Tensor, layer: nn.Module) -> None:
    """A network with skips does so."""
    y.add_(1)


def fill_output(y: Tensor, layer: nn.Module) -> None:
    """A mask does so."""
    y.detach()[0] = 0


def change_weight(y: Tensor, layer: nn.Module) -> None:
    """An optimizer that steps in between does so."""
    with torch.no_grad():
        next(layer.parameters()).mul_(2)


@pytest.mark.pairs
@pytest.mark.parametrize("change", [add_to_output, fill_output, change_weight])
@pytest.mark.parametrize("selective", [False, True], ids=["plain", "selective"])
@pytest.mark.parametrize("raises", [False, True], ids=["", "after one that raises"])
def test_a_region_whose_saves_are_changed_in_place_goes_on_running_again(
    make_offloader: MakeOffloader, change: Callable[[Tensor, nn.Module], None], selective: bool, raises: bool
) -> None:
    """The program trains without an error, so no plan may cause one."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    contexts = partial(plain.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    options: dict[str, Any] = {"context_fn": contexts} if selective else {}
    offloader = make_offloader()
    recorder_of(offloader).begin()
    with offloader:
        kept = batch().requires_grad_().exp()  # holds the forward alive
        if raises:
            with pytest.raises(ZeroDivisionError):
                checkpoint(lambda x: x.exp().sum() / (1 // 0), kept, **options)
        x = kept
        for place, layer in enumerate(layers):
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, **options)
            if place == 1:
                change(x, layer)
    assert top() is None
    x.square().sum().backward()
    recorder_of(offloader).finish()
    assert choosable(profile_of(offloader)) == [raises, raises + 2]


class _SavesOddTensors(torch.autograd.Function):
    """Saves a quantized tensor and a nested one, which have no plain memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        quantized = torch.quantize_per_tensor(x.detach(), 0.05, 0, torch.qint8)
        ctx.save_for_backward(quantized, torch.nested.nested_tensor([x.detach()[:3], x.detach()[3:]]))
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        quantized, nested = ctx.saved_tensors
        found: Tensor = grads[0] * quantized.dequantize() * nested.unbind()[1].sum()
        return found


def saves_odd_tensors(function: Any, x: Tensor) -> Any:
    # PyTorch's check reads the shape, which a nested tensor has not.
    return checkpoint(lambda y: function(_SavesOddTensors.apply(y)), x, determinism_check="none")


def saves_lazy_views(function: Any, x: Tensor) -> Any:
    """Views with a conjugation or a negation that nobody has computed yet."""

    def region(y: Tensor) -> Any:
        lazy = torch.complex(y, function(y)).conj()
        return (lazy * lazy.imag).abs()

    return checkpoint(region, x)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of such tensors, and of what the simulated device lacks
@pytest.mark.parametrize(
    ("call", "where"),
    [
        (saves_odd_tensors, "cpu"),
        (saves_lazy_views, "cpu"),
        pytest.param(saves_lazy_views, NAME, marks=pytest.mark.simulated),
    ],
)
def test_a_recorded_region_may_save_any_tensor(make_offloader: MakeOffloader, call: Any, where: str) -> None:
    model, x = Blocks(call=call).to(where), batch().to(where)
    expected = train_step(model, x)
    offloader = make_offloader(policy="auto").use(model)
    until_recorded(offloader, lambda: assert_same_gradients(train_step(model, x, offloader), expected))


def test_a_region_that_raised_is_forgotten_without_a_lock(make_offloader: MakeOffloader) -> None:
    """A finalizer closes its generator, in any thread, while a step is recorded."""
    offloader = following(make_offloader(), 0, 1)
    recorder_of(offloader).begin()
    with offloader:
        x = batch().requires_grad_().exp()
        left = raised(x)
        with lock_of(offloader):
            run_in_threads(left.clear)
        checkpoint(torch.tanh, x.sin().cos()).sum().backward()
    profile = profile_of(offloader)
    assert [storage.region for storage in profile.storages] == [None, None, 1], "the outputs of exp, sin and tanh"


@pytest.fixture
def one_process() -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("known", [True, False], ids=["counted", "not counted"])
def test_a_region_in_which_ranks_communicate_is_known(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    def reduces(x: Tensor) -> Tensor:
        dist.all_reduce(torch.ones(1))
        return x.tanh()

    def communicate() -> list[bool]:
        offloader = following(make_offloader(), 1)
        recorder_of(offloader).begin()
        with offloader:
            x = batch().requires_grad_().exp()
            for function in (torch.tanh, reduces, reduces):
                x = checkpoint(function, x)
        x.sum().backward()
        return [region.communicates for region in profile_of(offloader).regions]

    assert communicate() == [False] * 3, "no other rank"
    monkeypatch.setattr(dist.distributed_c10d, "get_world_size", lambda: 2)
    if not known:  # some backends do not count
        refuse = Mock(side_effect=RuntimeError("ProcessGroup does not support sequence numbers"))
        monkeypatch.setattr(dist.ProcessGroup, "_get_sequence_number_for_group", refuse)
    assert communicate() == ([False, True, True] if known else [True] * 3)


def test_a_plan_does_not_change_the_shape_of_a_forward_without_a_model(make_offloader: MakeOffloader) -> None:
    """A region that runs once saves no input: its first storage, of another size, would be taken for another shape."""
    offloader = make_offloader(policy="auto", device_budget="1GiB", min_bytes=1)

    def region(x: Tensor) -> Tensor:
        return x[:, :8].exp().sum() * torch.tanh(x)

    once = set()
    for _ in range(8):
        with offloader:
            x = batch().requires_grad_()
            for _ in range(3):
                x = checkpoint(region, x)
            loss = x.sum()
        loss.backward()
        once.add(offloader.statistics().regions_once)
    pilot = autopilot_of(offloader)
    assert max(once) > 0
    assert not [reason for reason in pilot.history if "inputs" in reason], "which tells shapes apart"


@pytest.mark.parametrize("first", [torch.neg, torch.sin], ids=["", "its argument too"])
def test_on_paper_the_first_of_the_regions_that_run_once_saves_what_several_get_from_outside(
    make_offloader: MakeOffloader, first: Callable[[Tensor], Tensor]
) -> None:
    """By keyword or closure, as Transformers' layers get position embeddings: else all later places would differ."""
    offloader = make_offloader(policy="all", min_bytes=1)

    def step(*once: int) -> Profile:
        following(offloader, *once)
        recorder_of(offloader).begin()
        x = batch().requires_grad_()

        def region(y: Tensor, *, turned: Tensor) -> Tensor:
            return (first(y) * turned * row * gate).exp().sin()

        with offloader:
            turned, row, gate = batch() + 1.0, batch()[:1] + 2.0, torch.sigmoid(x)
            y = x * gate  # which saves the gate
            for _ in range(4):
                y = checkpoint(partial(region, turned=turned), y)
            loss = y.sum()
        loss.backward()
        return profile_of(offloader)

    base = step()
    for once in ((1,), (0, 2), (1, 2, 3), (0, 1, 2, 3)):
        steps = with_regions(base, once), step(*once)
        paper, found = ([s.nbytes for s in one.storages if s.index is not None] for one in steps)
        assert paper == found


# -- memory of a recomputation ----------------------------------------------------------------------------------------


class Held(list[int]):
    """The bytes that recomputations hold as backward comes to each tensor that was noted."""

    def __init__(self, offloader: Offloader) -> None:
        super().__init__()
        self.offloader, self.accounts = offloader, accounts_of(offloader)

    def note(self, tensor: Tensor) -> Tensor:
        tensor.register_hook(lambda grad: self.append(self.accounts.recomputed_bytes))
        return tensor

    def add_step(self, *regions: Callable[[Tensor], Tensor]) -> None:
        """Take a step of regions that follow each other."""
        with self.offloader:
            x = batch().requires_grad_() * 2
            for region in regions:
                x = checkpoint(region, x)
            loss = x.sum()
        loss.backward()

    def in_step(self, *regions: Callable[[Tensor], Tensor]) -> list[int]:
        """The bytes that were held in one more step."""
        self.clear()
        self.add_step(*regions)
        return list(self)


@pytest.fixture
def keeping(make_offloader: MakeOffloader) -> Offloader:
    """An offloader that keeps all, so that only recomputations change what is resident."""
    return make_offloader(policy="keep")


@pytest.fixture
def held(keeping: Offloader) -> Held:
    return Held(keeping)


def test_tensors_of_a_recomputation_are_resident_until_backward_has_used_them(keeping: Offloader, held: Held) -> None:
    def region(x: Tensor) -> Tensor:
        return held.note(torch.tanh(x.exp())).sin() * scale

    x = batch().requires_grad_()
    with keeping:
        scale = torch.sigmoid(x)
        loss = checkpoint(region, x * 2)
        loss = checkpoint(region, loss).sum()
    assert held.accounts.recomputed_bytes == 0
    loss.backward()
    assert max(held) == 3 * ACTIVATION, "exp, tanh and sin; the scale was there before"
    statistics = keeping.statistics()
    assert statistics.recompute_peak_bytes == 3 * ACTIVATION
    assert statistics.resident_peak_bytes == (3 + 3) * ACTIVATION
    assert held.accounts.resident_bytes == 0
    assert "2 checkpointed regions: 0 ran once, 2 ran again in backward and held up to 96.0 KiB" in keeping.report()


def test_the_count_of_a_recomputation_is_remembered_for_shapes_of_its_inputs(keeping: Offloader, held: Held) -> None:
    """So that later steps do not look at each tensor that it saves. An interrupted recomputation has saved too few."""
    hooks, fails = list[str](), [True]

    def region(x: Tensor) -> Tensor:
        hooks.append(torch._C._autograd._top_saved_tensors_default_hooks(False)[0].__module__)
        y = x.exp()
        if len(hooks) > 2 and fails:
            fails.clear()
            raise ConnectionError
        return held.note(torch.tanh(y)).sin()

    def short(x: Tensor) -> Tensor:
        hooks.append("torch")
        return held.note(x).sin()  # which saves the input

    steps = [(1, True), (1, True), (1, False), (0, False), (2, True), (1, False), (2, False)]
    for number, (size, counted) in enumerate(steps):
        held.clear()
        hooks.clear()
        x = torch.cat([batch()] * max(size, 1)).requires_grad_()
        run = region if size else short
        with keeping:
            loss = checkpoint(run, checkpoint(run, x * 2)).sum()
        with pytest.raises(ConnectionError) if not number else contextlib.nullcontext():
            loss.backward()
        assert {name.partition(".")[0] for name in hooks[2:]} == {"actoffload" if counted else "torch"}
        if number:
            assert max(held) == size * 2 * ACTIVATION, "exp and tanh; backward has left the other region"
        del loss
        assert held.accounts.recomputed_bytes == 0


def test_a_recomputation_whose_count_is_remembered_ends_as_backward_leaves_its_region(
    keeping: Offloader, held: Held
) -> None:
    """Its regions save no input in a hook of the library: they read one that is there."""
    x = batch().requires_grad_()
    for _ in range(2):
        held.clear()
        with keeping:
            y = x
            z = held.note((x * 2).exp()).sin()
            for _ in range(2):
                y = y + checkpoint(lambda: held.note(torch.tanh(x.exp())).sin())
            loss = (z * y).sum()
        loss.backward()
        assert held == [2 * ACTIVATION, 2 * ACTIVATION, 0], "exp and tanh of each region, and not those of both"


def test_modules_that_compare_equal_have_counts_of_their_own(held: Held) -> None:
    @dataclass
    class Equal(nn.Module):  # and without a hash
        times: int = field(compare=False)

        def __post_init__(self) -> None:
            super().__init__()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                x = x.exp()
            return held.note(x).sin()

    modules = [Equal(1), Equal(2)]
    assert modules[0] == modules[1]
    for _ in range(2):
        for module in modules:
            assert held.in_step(module) == [module.times * ACTIVATION]


def test_a_remembered_count_ends_with_its_own_backward(keeping: Offloader, held: Held) -> None:
    """Another thread's backward, or one within, does not end it. A backward that raises does not leave it behind."""

    def other_backward() -> None:
        with keeping:
            loss = (batch().requires_grad_() * 2).exp().sin().sum()
        loss.backward()

    def look(grad: Tensor) -> None:
        if step == 2:
            raise ConnectionError
        run_in_threads(other_backward)

    def region(x: Tensor) -> Tensor:
        y = torch.tanh(x.exp())
        y.register_hook(look)
        return held.note(y).sin()

    for step in range(4):
        if step == 2:
            with pytest.raises(ConnectionError):
                held.in_step(region)
            assert held == []
        else:
            assert held.in_step(region) == [2 * ACTIVATION]
        with keeping:
            assert held.accounts.recomputed_bytes == 0


def _with_keyword(large: bool) -> Callable[[Tensor], Tensor]:
    """As Hugging Face's layers pass all but the first argument."""

    def region(x: Tensor, other: Tensor) -> Tensor:
        return x * torch.tanh(other.exp()).sum()

    return partial(region, other=torch.cat([batch()] * (4 if large else 1)).requires_grad_())


def _with_module(large: bool) -> Callable[[Tensor], Tensor]:
    """As older models of Hugging Face do it: the same code runs another module, if the program leaves out a layer."""
    layers = Chain(64, 3 if large else 1)

    def region(x: Tensor) -> Tensor:
        out: Tensor = layers(x)
        return out

    return region


_DROPOUT = nn.Sequential(nn.Tanh(), nn.Dropout(0.5), nn.Tanh())


def _with_mode(large: bool) -> Callable[[Tensor], Tensor]:
    return _DROPOUT.train(large)


@pytest.mark.parametrize("make", [_with_keyword, _with_module, _with_mode])
def test_a_count_is_remembered_for_all_that_a_region_is_given(keeping: Offloader, held: Held, make: Any) -> None:
    found = []
    for large in (False, False, True, False):
        region = make(large)
        held.add_step(region)
        found.append(keeping.statistics().recompute_peak_bytes)
    assert found[0] == found[1] < found[2] == found[3]


def test_a_count_that_has_changed_is_noticed(held: Held) -> None:
    """In one region of sixteen; from then on all are counted again, and those of which that was seen always."""
    depth = 1

    def region(x: Tensor) -> Tensor:
        y = held.note(x.exp())
        for _ in range(depth):
            y = torch.tanh(y)
        return y.sin()

    for step in range(24):
        depth = 2 if 3 <= step < 21 else 1
        found, right = held.in_step(*[region] * 4), (1 + depth) * ACTIVATION
        if step >= 21:
            assert right in found
        elif step < 3 or step > 18 or right in found:
            assert found == [right] * 4


def test_a_thread_does_not_leave_the_region_of_another(held: Held) -> None:
    barrier = threading.Barrier(2, timeout=WAIT_S)

    def wait(grad: Tensor) -> None:
        if remembered:
            barrier.wait()  # each has run its region again

    def region(x: Tensor) -> Tensor:
        y = x.exp()
        y.register_hook(wait)
        held.note(y).register_hook(wait)
        return torch.tanh(y).sin()

    remembered = False
    held.add_step(region)
    held.clear()
    remembered = True
    run_in_threads(*[lambda: held.add_step(region)] * 2)
    assert held == [4 * ACTIVATION] * 2
    assert held.accounts.recomputed_bytes == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_as_the_input_of_a_region(keeping: Offloader) -> None:
    """It has no shape."""
    parts = [batch().requires_grad_(), batch(64).requires_grad_()]
    for _ in range(2):
        with keeping:
            nested = torch._nested_tensor_from_tensor_list(parts)
            nested = checkpoint(torch.relu, nested, determinism_check="none")
        found = torch.autograd.grad(torch.nested.to_padded_tensor(nested, 0.0).sum(), parts)
        assert all(map(torch.equal, found, [(part > 0).float() for part in parts]))


@pytest.mark.parametrize("once", [(), (0,)])
def test_tensors_of_a_nested_recomputation_count_too(make_offloader: MakeOffloader, once: tuple[int]) -> None:
    def outer(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda x: torch.tanh(x.exp()).sin(), x)
        return y

    offloader = following(make_offloader(policy="keep"), *once)
    recorder_of(offloader).begin()
    with offloader:
        loss = checkpoint(outer, batch().requires_grad_() * 2).sum()
    loss.backward()
    assert offloader.statistics().recompute_peak_bytes == 2 * ACTIVATION
    held = [s.nbytes for s in profile_of(offloader).storages if s.kept == "recomputed"]
    assert held == [2 * ACTIVATION]


def test_room_is_made_for_a_recomputation_before_it_begins(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Blocks()
    expected = model.step()[0]
    offloader = make_offloader(policy="all", device_budget=8 * ACTIVATION)
    asked = note_rooms(monkeypatch)
    for _ in range(2):
        asked.clear()
        assert_same_gradients(model.step(offloader)[0], expected)
    held = offloader.statistics().recompute_peak_bytes
    assert asked.count(held) == 3, "each region holds the same bytes"
    assert budget_of(offloader).again == {0: held, 1: held, 2: held}
    assert offloader.statistics().resident_peak_bytes <= 8 * ACTIVATION
    following(offloader, 0, 1, 2)
    assert not budget_of(offloader).again, "no region runs again"


# -- a plan from the user ----------------------------------------------------------------------------------------------


def test_a_plan_from_the_user_is_followed_and_has_to_fit(make_offloader: MakeOffloader) -> None:
    model = Blocks()
    expected = model.step()[0]
    for once in ((), (0, 2)):
        recorder = following(make_offloader(policy="all"), *once)
        model.step(recorder)
        offloader = make_offloader(policy=Plan.from_json(recorder.plan.to_json()))
        for _ in range(2):
            found, runs = model.step(offloader)
            assert runs == [0, 1, 2, *(place for place in (2, 1, 0) if place not in once)]
            assert_same_gradients(found, expected)
    for depth, reported in ((2, "the forward has 2;"), (4, "the forward has more than 3;")):
        other = make_offloader(policy=Plan((), once=(0, 2), regions=3))
        with pytest.raises(ConfigError, match=f"a plan of 3 checkpointed regions.*{reported}"):
            Blocks(depth).step(other)


def test_an_evaluation_before_the_first_step_proves_nothing(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=Plan((), once=(0,), regions=3))
    with torch.no_grad(), offloader:
        Chain()(batch())
    assert Blocks().step(offloader)[1] == [0, 1, 2, 2, 1]


# -- recompute= -------------------------------------------------------------------------------------------------------


class Keyword(nn.Module):
    """A block with tensors by keyword and in a tuple, dropout, and a tuple as output; it reads a tensor's value."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(
        self, x: Tensor, other: Tensor, *, scale: Tensor, debug: str, pair: tuple[Tensor, str]
    ) -> tuple[Tensor, str]:
        y = self.linear(x) if x is other else x - other
        y = nn.functional.dropout(torch.tanh(y) * scale, 0.5, self.training)
        return y * torch.sigmoid(pair[0]), pair[1] + debug


class Unchecked(nn.Module):
    """A model without checkpoints of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(64, 64)
        self.layers = nn.ModuleDict({name: Keyword() for name in "abc"})
        self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        x = self.stem(x)
        scale = torch.exp(x)
        for layer in self.layers.values():
            x, _ = layer(x, x, scale=scale, debug="!", pair=(x, "text"))
        head: Tensor = self.head(x)
        return head


def wrapped(model: nn.Module) -> list[str]:
    """The modules with a forward of their own in place of their class's."""
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (True, ["layers.a", "layers.b", "layers.c"]),
        ("layers.*", ["layers.a", "layers.b", "layers.c"]),
        (["layers.a", "layers.b.linear", "head"], ["layers.a", "layers.b.linear", "head"]),
        (["layers", "layers.a"], ["layers"]),
        (False, []),
    ],
)
def test_the_blocks_that_are_named_run_as_regions(make_offloader: MakeOffloader, wanted: Any, found: list[str]) -> None:
    model = Unchecked()
    expected = train_step(model, batch())
    offloader = make_offloader(recompute=wanted).use(model).use(model)
    assert wrapped(model) == found
    with offloader, torch.no_grad():
        model(batch())
    assert offloader.statistics().regions == 0
    ran = [] if "layers" in found else found  # a container has no forward that runs
    for once in (False, True):
        following(offloader, *(range(len(ran)) if once else ()))
        assert_same_gradients(train_step(model, batch(), offloader), expected)
        assert offloader.statistics().regions == len(ran)
        assert offloader.statistics().regions_once == len(ran) * once
        assert_empty(offloader)
    offloader.forget(model)
    assert wrapped(model) == []
    offloader.use(model)
    assert wrapped(model) == found
    offloader.close()
    assert wrapped(model) == []
    assert_same_gradients(train_step(model, batch()), expected)


def test_a_region_is_named_by_its_block(make_offloader: MakeOffloader) -> None:
    model = Unchecked()
    expected = train_step(model, batch())
    offloader = make_offloader(recompute=True, policy="auto").use(model)
    until_recorded(offloader, lambda: assert_same_gradients(train_step(model, batch(), offloader), expected))
    assert offloader.profile is not None
    assert [region.name for region in offloader.profile.regions] == ["layers.a", "layers.b", "layers.c"]


@pytest.mark.parametrize(("wanted", "missing"), [("layers.d", "layers.d"), (["head", "x*"], r"x\*")])
def test_a_pattern_that_matches_nothing_is_an_error(make_offloader: MakeOffloader, wanted: Any, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"'{missing}' matches no module"):
        make_offloader(recompute=wanted).use(Unchecked())


def test_the_members_of_outermost_containers_of_equals_are_the_blocks(make_offloader: MakeOffloader) -> None:
    gpt = GPT(GPTConfig(layers=3, width=32))
    nested = nn.ModuleDict({"one": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "two": nn.ReLU()})
    for model, found in ((gpt, [f"stack.blocks.{n}" for n in range(3)]), (nested, ["one.0", "one.1"])):
        make_offloader(recompute=True).use(model)
        assert wrapped(model) == found
    for without in (nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.ReLU())):
        with pytest.raises(ConfigError, match="no repeated blocks"):
            make_offloader(recompute=True).use(without)


def test_the_arguments_of_a_wrapped_block_are_seen_and_moved(make_offloader: MakeOffloader) -> None:
    block = nn.Sequential(Keyword())
    offloader = make_offloader(recompute="0", policy="all").use(block)
    x, scale, other = (torch.randn(128, 64, requires_grad=True) * 1.5 for _ in range(3))
    with offloader:
        loss = block[0](x, x, scale=scale, debug="", pair=(other, "text"))[0].sum()
        saved = offloader.statistics()
    assert saved.live_records == 2, "one tensor passed twice counts once; the checkpoint holds the one in a tuple"
    dead = weakref.ref(scale)
    del scale
    offloader.synchronize()
    assert dead() is None
    loss.backward()


def test_a_forward_that_was_replaced_before_or_after_is_respected(make_offloader: MakeOffloader) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    original, calls = model[0].forward, list[str]()

    def patched(x: Tensor) -> Tensor:
        calls.append("patched")
        y: Tensor = original(x)
        return y

    model[0].forward = patched
    offloader = make_offloader(recompute=True).use(model)
    ours = model[1].forward

    def later(x: Tensor) -> Tensor:
        calls.append("later")
        y: Tensor = ours(x)
        return y

    model[1].forward = later
    offloader.close()
    assert model[0].forward is patched
    assert model[1].forward is later
    model(torch.randn(2, 4)).sum().backward()
    assert calls == ["patched", "later"], "nothing was computed twice"


def test_a_wrapped_model_can_be_copied_and_pickled_and_dies_with_its_offloader(make_offloader: MakeOffloader) -> None:
    model = Unchecked()
    expected = train_step(model, batch())
    offloader = make_offloader(recompute=True).use(model)
    twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    offloader.forget(model)
    nn.init.zeros_(model.get_parameter("layers.a.linear.weight"))
    assert_same_gradients(train_step(twin, batch()), expected)
    assert_same_gradients(train_step(loaded, batch()), expected)
    offloader.use(model)
    dead = weakref.ref(model.layers["a"])
    del model
    gc.collect()
    assert dead() is None, "an offloader holds no model"


def test_two_offloaders_wrap_a_block_once(make_offloader: MakeOffloader) -> None:
    model = Unchecked()
    first, second = (make_offloader(recompute=True).use(model) for _ in range(2))
    with first, second:
        model(batch()).sum().backward()
    assert second.statistics().regions == 3
    second.close()
    assert wrapped(model), "the first offloader's wrapper stays"
    first.close()
    assert wrapped(model) == []
