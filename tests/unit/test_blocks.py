"""Blocks of a model: found, watched, recomputed, and left as they were."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import random
import weakref
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from actoffload import Plan, attach
from actoffload.autotune.blocks import BlockWatch, find_blocks, why_not_recomputed
from actoffload.autotune.recompute import Checkpointed, Recompute, RecomputeMeter
from actoffload.errors import ConfigError
from actoffload.testing.gpt import GPT, GPTConfig
from actoffload.testing.simulated_device import NAME
from tests.harness import MakeOffloader, assert_same_gradients, batch, gradients


class _Keyword(nn.Module):
    """A block that takes tensors by keyword and in a tuple, drops out, and returns a tuple."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, *, scale: Tensor, pair: tuple[Tensor, str]) -> tuple[Tensor, str]:
        y = nn.functional.dropout(torch.tanh(self.linear(x)) * scale, 0.5, self.training)
        return y * torch.sigmoid(pair[0]), pair[1]


class _Model(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(width, width)
        self.layers = nn.ModuleDict({"a": _Keyword(width), "b": _Keyword(width), "c": _Keyword(width)})
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        scale = torch.exp(x)
        for layer in self.layers.values():
            x, _ = layer(x, scale=scale, pair=(x, "text"))
        head: Tensor = self.head(x)
        return head


def _step(model: nn.Module, offloader: Any = None) -> dict[str, Tensor]:
    torch.manual_seed(3)
    x = torch.randn(64, 32)
    with offloader or contextlib.nullcontext():
        loss = model(x).square().sum()
    if offloader is not None:
        offloader.synchronize()
    loss.backward()
    return gradients(model)


def test_blocks_are_the_members_of_outermost_containers_of_equals() -> None:
    assert list(find_blocks(GPT(GPTConfig(layers=3, width=32)))) == [f"stack.blocks.{n}" for n in range(3)]
    assert list(find_blocks(_Model())) == ["layers.a", "layers.b", "layers.c"]
    assert find_blocks(nn.Linear(2, 2)) == {}
    assert find_blocks(nn.Sequential(nn.ReLU(), nn.ReLU())) == {}, "nothing to recompute for"
    nested = nn.ModuleDict({"one": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "two": nn.ReLU()})
    assert list(find_blocks(nested)) == ["one.0", "one.1"]


def test_what_must_not_run_twice_is_named() -> None:
    assert why_not_recomputed(nn.Linear(2, 2)) == ""
    block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert why_not_recomputed(block) == "running statistics would be updated twice"
    assert why_not_recomputed(block.eval()) == ""
    assert why_not_recomputed(cast(nn.Module, torch.compile(nn.Linear(2, 2)))) == "compiled"
    compiled = nn.Linear(2, 2)
    compiled.compile()
    assert why_not_recomputed(compiled) == "compiled"


class _Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * 2


class _Heard:
    def __init__(self) -> None:
        self.words: list[str] = []
        self.active = True

    def block_began(self, name: str, inputs: Mapping[int, Tensor]) -> None:
        self.words.append(f"+{name}({len(inputs)})")

    def block_ended(self, name: str, *, repeatable: bool) -> None:
        self.words.append(f"-{name}{'' if repeatable else '!'}")


def test_a_listener_hears_of_forwards_and_of_changed_buffers_but_not_of_recomputations() -> None:
    heard: Any = _Heard()
    watch = BlockWatch(heard)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), _Counting()), nn.Sequential(nn.Linear(4, 4)))
    watch.watch(model)
    watch.watch(model)
    runs: list[int] = []
    model.get_submodule("1.0").register_forward_pre_hook(lambda *_: runs.append(1))
    recompute = Recompute()
    recompute.follow(watch.blocks, ["1"])
    model(torch.randn(3, 4)).sum().backward()
    assert heard.words == ["+0(1)", "-0!", "+1(1)", "-1"]
    assert len(runs) == 2, "it did run again in backward"
    heard.active = False
    model(torch.randn(3, 4))
    heard.active = True
    watch.remove()
    model(torch.randn(3, 4))
    assert len(heard.words) == 4


def test_a_block_that_fails_is_left() -> None:
    heard: Any = _Heard()
    watch = BlockWatch(heard)
    blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    watch.watch(blocks)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        blocks(torch.randn(3, 5))
    assert heard.words == ["+0(1)", "-0"]


class _Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class _Changes(nn.Module):
    """A block that is another one after each forward, without a new version of any tensor."""

    scale: Tensor

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(()))
        self.what, self.count, self.dice = what, 0, torch.Generator()
        self.seen: list[float] = []
        self.nested: dict[str, Any] = {"inner": SimpleNamespace(counts=[1.0])}
        self.attribute, self.recent = torch.ones(()), (torch.ones(8), 1000)
        self.slots = _Slots()
        self.numbers: Any = iter((0, 1)) if what == "iterator" else None

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        if self.what == "buffer":
            self.scale = self.scale * 0.9
        elif self.what == "number":
            self.count += 1
        elif self.what == "list":
            self.seen.append(1.0)
        elif self.what == "random":
            random.random()
        elif self.what == "generator":
            torch.rand(1, generator=self.dice)
        elif self.what == "parameter":
            torch.nn.init.ones_(self.linear.bias)
        elif self.what == "tensor":
            self.attribute.mul_(0.9)
        elif self.what == "nested":
            self.nested["inner"].counts[0] *= 0.9
        elif self.what == "tuple":
            self.recent = (torch.ones(8), 1000)
        elif self.what == "input":
            x.add_(1)
        elif self.what == "argument":
            cache.layers.append(x)
        elif self.what == "slots":
            self.slots.scale *= 0.9
        elif self.what == "iterator":
            next(self.numbers)
        elif self.what == "nothing":
            self.recent = (self.recent[0], int("1000"))
        y: Tensor = self.linear(x)
        return y


CHANGES = "buffer number list random generator parameter tensor nested tuple input argument slots iterator"


@pytest.mark.parametrize("what", ["nothing", *CHANGES.split()])
def test_a_block_that_another_run_would_find_changed_is_not_run_twice(what: str) -> None:
    heard: Any = _Heard()
    watch = BlockWatch(heard)
    blocks = nn.Sequential(_Changes(what), _Changes(what))
    watch.watch(blocks)
    for block in blocks:
        block(torch.randn(2, 8), SimpleNamespace(layers=[]))
    end = "" if what == "nothing" else "!"
    assert heard.words == ["+0(1)", f"-0{end}", "+1(1)", f"-1{end}"]


@pytest.mark.parametrize("what", ["an attribute", "more than can be looked at"])
def test_a_block_of_which_not_all_can_be_compared_is_not_run_twice(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: Any = _Heard()
    watch = BlockWatch(heard)
    blocks, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8)
    watch.watch(blocks)
    if what == "an attribute":
        x.scale = 3  # type: ignore[attr-defined]  # the second run is given another tensor
    else:
        monkeypatch.setattr("actoffload.autotune.blocks.MOST_PARTS", 5)
    blocks[0](x)
    assert heard.words == ["+0(1)", "-0!"]


class _Tells(nn.Module):
    """Adds a loss to the list and the dictionary that it is given, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, losses: list[Tensor], named: dict[str, Tensor]) -> Tensor:
        y = torch.tanh(self.linear(x))
        losses.append(y.square().mean())
        named[str(len(named))] = y.sum()
        return y


def test_what_a_recomputed_block_adds_to_its_arguments_is_the_callers() -> None:
    found = []
    for names in ([], ["0", "1"]):
        torch.manual_seed(0)
        blocks = nn.ModuleList([_Tells(), _Tells()])
        Recompute().follow({str(place): block for place, block in enumerate(blocks)}, names)
        x, losses, named = torch.linspace(-1, 1, 32).view(4, 8), list[Tensor](), dict[str, Tensor]()
        for block in blocks:
            x = block(x, losses, named)
        assert len(losses) == len(named) == 2
        (x.sum() + sum(losses) + sum(named.values())).backward()
        found.append(gradients(blocks))
    assert_same_gradients(found[1], found[0])


@pytest.mark.parametrize("names", [["layers.a"], ["layers.b", "layers.c"], ["layers.a", "layers.b", "layers.c"]])
def test_recomputed_blocks_save_less_and_give_the_same_bits(make_offloader: MakeOffloader, names: list[str]) -> None:
    model = _Model()
    plain = _step(model)
    offloader = make_offloader()
    assert_same_gradients(_step(model, offloader), plain)
    all_saved = offloader.statistics().packed_bytes
    recompute = Recompute()
    recompute.follow(find_blocks(model), names)
    offloader = make_offloader()
    assert_same_gradients(_step(model, offloader), plain)
    statistics = offloader.statistics()
    assert statistics.packed_bytes < all_saved
    assert statistics.nvme_written_bytes > 0
    assert statistics.live_records == 0
    recompute.undo()
    assert all("forward" not in vars(layer) for layer in model.layers.values())
    offloader = make_offloader()
    assert_same_gradients(_step(model, offloader), plain)
    assert offloader.statistics().packed_bytes == all_saved


def test_a_checkpoints_inputs_by_keyword_and_in_containers_are_seen_and_moved(make_offloader: MakeOffloader) -> None:
    block = _Keyword(32)
    block.forward = Checkpointed(block)  # type: ignore[method-assign]
    x, scale, other = (torch.randn(64, 32, requires_grad=True) * 1.5 for _ in range(3))
    offloader = make_offloader()
    with offloader:
        loss = block(x, scale=scale, pair=(other, "text"))[0].sum()
        saved = offloader.statistics()
    assert saved.live_records == 3, "the three inputs, and nothing of what the block computes"
    loss.backward()


def test_an_argument_that_is_changed_after_its_block_has_run_is_an_error() -> None:
    """What a plain run does not save of it the checkpoint holds, out of sight of hooks."""
    block = Checkpointed(nn.Linear(8, 8))
    block.saved = ()
    x = torch.ones(4, 8)
    loss = block(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place after the block had run"):
        loss.backward()


@pytest.mark.parametrize("name", ["0.0.bias", "0.1.running_mean"])
def test_what_a_recomputed_block_reads_of_its_own_and_is_changed_before_backward_is_an_error(name: str) -> None:
    """Backward needs none of it in a plain run, so nobody else would say so."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8).eval(), nn.Tanh()))
    Recompute().follow({"0": model[0]}, ["0"])
    loss = model(torch.randn(4, 8)).sum()
    with torch.no_grad():
        model.state_dict(keep_vars=True)[name].add_(1)
    with pytest.raises(RuntimeError, match="a parameter or buffer of a recomputed block was changed in place"):
        loss.backward()


def _evaluate(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    model.eval()
    return y


def _scale(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    model[0][2].scale = torch.ones(())
    return y


def _call_with_others(model: nn.Module, x: Tensor) -> Tensor:
    others = {name: parameter * 2 for name, parameter in model.named_parameters()}
    y: Tensor = torch.func.functional_call(model, others, (x,))
    return y


@pytest.mark.parametrize("forward", [_evaluate, _scale, _call_with_others])
def test_what_is_set_at_a_recomputed_block_before_backward_is_an_error(forward: Any) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), _Scaled()))
    Recompute().follow({"0": model[0]}, ["0"])
    loss = forward(model, torch.randn(4, 8)).sum()
    with pytest.raises(RuntimeError, match="an attribute of a recomputed block was set after the block had run"):
        loss.backward()


class _Scaled(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class _Noisy(nn.Module):
    """The noise that it saves, which is the last that it saves, is drawn after that."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rrelu(x.sin(), training=True)


class _Asks(nn.Module):
    """Computes something else where both its arguments are one tensor, as attention does."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * y if x is y else x + y).tanh()


@pytest.mark.parametrize(("block", "arguments"), [(_Noisy(), 1), (_Asks(), 2)], ids=["noise", "one tensor twice"])
def test_the_second_run_of_a_block_is_as_the_first(make_offloader: MakeOffloader, block: Any, arguments: int) -> None:
    found = []
    for names in ([], ["0"]):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(8, 8), copy.deepcopy(block)), torch.randn(4, 8)
        Recompute().follow({"0": model[1]}, names)
        with make_offloader(min_bytes=0):
            hidden = model[0](x)
            loss = model[1](*[hidden] * arguments).square().sum()
        loss.backward()
        found.append(gradients(model))
    assert_same_gradients(found[1], found[0])


def test_a_tensor_that_a_recomputed_block_is_given_twice_is_held_by_hooks_alone() -> None:
    block = Checkpointed(_Asks())
    hidden = torch.randn(4, 8, requires_grad=True) * 2
    reference = weakref.ref(hidden)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().numpy().copy(), torch.from_numpy):
        loss = block(hidden, hidden).sum()
    del hidden
    assert reference() is None
    loss.backward()


def test_hooks_may_come_and_go_before_a_block_runs_again(make_offloader: MakeOffloader) -> None:
    model = _Model()
    plain = _step(model)
    offloader = make_offloader(policy=Plan((), recompute=("layers.a",)), min_bytes="1MiB").use(model)
    torch.manual_seed(3)
    x = torch.randn(64, 32)
    handle = model.layers["a"].register_forward_hook(lambda *_: None)
    with offloader:
        loss = model(x).square().sum()
    handle.remove()
    offloader.forget(model)  # what was saved so far stays usable
    loss.backward()
    assert_same_gradients(gradients(model), plain)


@pytest.mark.simulated
def test_the_second_run_has_the_random_numbers_of_every_device(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the block's only tensor on it is one that no plain run saves, so that its checkpoint holds it."""
    asked: list[Any] = []

    def states(*given: Any) -> tuple[list[int], list[Tensor]]:
        asked.extend(leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
        return [], []

    module = torch.get_device_module(NAME)
    monkeypatch.setattr(module, "_initialized", True, raising=False)
    monkeypatch.setattr("torch.utils.checkpoint.get_device_states", states)
    dropout, x = Checkpointed(nn.Dropout()), torch.ones(8, device=NAME, requires_grad=True)
    dropout.saved = ()
    dropout(x).sum().backward()
    assert any(one is x for one in asked)


def test_parameters_that_are_others_when_the_block_runs_again_are_not_changed_ones() -> None:
    """As FSDP 1 puts views of what it has gathered in the place of its own."""
    linear = nn.Linear(8, 8)
    linear.__dict__["_is_fsdp_managed_module"] = True
    weight, gathered = linear.weight, nn.Parameter(linear.weight.detach().clone())
    with torch.no_grad():
        for _ in range(1 + weight._version):
            gathered.mul_(1)
    Recompute().follow({"0": linear}, ["0"])
    loss = linear(torch.randn(4, 8)).tanh().sum()
    linear.weight = gathered
    loss.backward()
    assert weight.grad is not None


def test_following_another_plan_undoes_the_last_one_and_ignores_unknown_names() -> None:
    model = _Model()
    blocks = find_blocks(model)
    recompute = Recompute()
    recompute.follow(blocks, ["layers.a", "nowhere"])
    assert recompute.names == {"layers.a"}
    first = model.layers["a"].forward
    recompute.follow(blocks, ["layers.a", "layers.b"])
    assert model.layers["a"].forward is first, "not wrapped twice"
    recompute.follow(blocks, ["layers.b"])
    assert recompute.names == {"layers.b"}
    assert "forward" not in vars(model.layers["a"])


def test_a_forward_that_was_replaced_before_or_after_is_respected() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    original = model[0].forward
    calls: list[str] = []

    def patched(x: Tensor) -> Tensor:
        calls.append("patched")
        y: Tensor = original(x)
        return y

    model[0].forward = patched
    recompute = Recompute()
    recompute.follow(find_blocks(model), ["0", "1"])
    ours = model[1].forward

    def later(x: Tensor) -> Tensor:
        calls.append("later")
        y: Tensor = ours(x)
        return y

    model[1].forward = later
    recompute.undo()
    assert model[0].forward is patched
    assert model[1].forward is later
    model(torch.randn(2, 4)).sum().backward()
    assert calls == ["patched", "later"], "nothing was computed twice"


def test_without_gradients_nothing_is_checkpointed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    Recompute().follow(find_blocks(model), ["0"])
    with torch.no_grad():
        assert not model(torch.randn(2, 4)).requires_grad


@pytest.mark.parametrize("counted", [False, True])
def test_a_model_under_a_plan_can_be_copied_and_pickled(make_offloader: MakeOffloader, counted: bool) -> None:
    model = _Model()
    plain = _step(model)
    offloader = make_offloader()
    meter = RecomputeMeter(offloader.store.shared, (), offloader.exclusions.static) if counted else None
    recompute = Recompute(meter)
    recompute.follow({"layers.a": model.layers["a"]}, ["layers.a"])
    twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    recompute.undo()
    nn.init.zeros_(model.get_parameter("layers.a.linear.weight"))
    assert_same_gradients(_step(twin), plain)
    assert_same_gradients(_step(loaded), plain)
    torch.save(twin.state_dict(), io.BytesIO())


class _Counts(nn.Linear):
    """Computes something else each time that it runs."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def test_what_the_library_leaves_at_a_block_does_not_change_it(make_offloader: MakeOffloader) -> None:
    """Offloaders hang on a block that is recomputed and on one that is attached."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))
    attachment = attach(model.get_submodule("2.0"), target="nvme", announce="none", policy="greedy")
    offloader = make_offloader(policy=Plan((), recompute=("1", "2")), min_bytes=0).use(model)
    for _ in range(2):
        with offloader:
            model(torch.randn(64, 64)).sum().backward()
    attachment.detach()


class _CountsInTraining(_Counts):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else x


def test_an_evaluation_before_training_proves_nothing(make_offloader: MakeOffloader) -> None:
    model = nn.Sequential(*(nn.Sequential(_CountsInTraining(64, 64), nn.Tanh()) for _ in range(3)))
    offloader = make_offloader(policy=Plan((), recompute=("1",)), min_bytes="1MiB").use(model)
    with torch.no_grad(), offloader:
        model.eval()(torch.randn(64, 64))
    with pytest.raises(ConfigError, match="a plan that recomputes '1'"), offloader:
        model.train()(torch.randn(64, 64))


@pytest.mark.parametrize("block", [nn.Linear, _Counts])
def test_a_given_plan_recomputes_no_block_that_changes_what_it_sees(make_offloader: MakeOffloader, block: Any) -> None:
    model = nn.Sequential(*(nn.Sequential(block(64, 64), nn.Tanh()) for _ in range(3)))
    x = torch.randn(64, 64)
    offloader = make_offloader(policy=Plan((), recompute=("1",)), min_bytes="1MiB").use(model)
    if block is nn.Linear:
        with offloader:
            model(x).sum().backward()
        return
    with pytest.raises(ConfigError, match=r"a plan that recomputes '1'.*plan anew"), offloader:
        model(x)


class Caching(nn.Module):
    """Makes a cache as models of Transformers do, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor, past_key_values: Any = None, use_cache: bool | None = None) -> tuple[Tensor, Any]:
        makes = self.config.use_cache if use_cache is None else use_cache
        cache = [] if makes and past_key_values is None else past_key_values
        for layer in self.layers:
            x = layer(x).tanh()
            if cache is not None:
                cache.append(x)
        return x, cache


def test_a_model_whose_blocks_may_be_recomputed_makes_no_cache_to_train_with(make_offloader: MakeOffloader) -> None:
    model, x = Caching(), batch()
    outer = nn.Sequential(model)
    offloader = make_offloader(policy="auto", device_budget="64KiB", recompute=True).use(outer)
    with offloader:
        assert model(x)[1] is None
        assert outer(x)[1] is None
        assert len(model(x, use_cache=True)[1]) == 3
        assert len(model(x, [x])[1]) == 4
        with torch.no_grad():
            assert len(model(x)[1]) == 3
    copied = pickle.loads(pickle.dumps(model))
    assert len(copied(x)[1]) == 3
    offloader.forget(outer)
    assert len(model(x)[1]) == 3
    make_offloader(policy="auto", device_budget="64KiB").use(model)  # nothing is recomputed
    assert len(model(x)[1]) == 3


class Drawing(nn.Linear):
    """Draws from Python's generator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh() * random.random()


def test_each_model_that_follows_a_plan_is_looked_at(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy=Plan((), recompute=("0", "1")))
    good = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2)))
    with offloader.use(good):
        good(batch()).sum().backward()
    offloader.forget(good)
    bad = nn.Sequential(*(Drawing(64, 64) for _ in range(2)))
    with pytest.raises(ConfigError, match="recomputes '0'"), offloader.use(bad):
        bad(batch())


class Biased(nn.Linear):
    """Ends with a parameter of which no backward needs a value."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.last = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh() + self.last


def test_an_optimizer_may_step_in_backward(make_offloader: MakeOffloader) -> None:
    def losses(recompute: tuple[str, ...]) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Biased() for _ in range(3)))
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_step_in_backward)
        offloader, found = make_offloader(policy=Plan((), recompute=recompute)).use(model), []
        for _ in range(3):
            with offloader:
                loss = model(batch()).square().sum()
            loss.backward()
            found.append(loss.item())
        return found

    assert losses(("0", "1", "2")) == losses(())


def _step_in_backward(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-1e-3)  # type: ignore[arg-type]
    parameter.grad = None
