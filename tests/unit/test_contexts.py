"""Entering and leaving: shared offloaders, attachments, errors on the way, closing, aborting, dropping."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actoffload
from actoffload import OffloadConfig, Offloader, Plan, offload_activations
from actoffload.api import shared_offloader
from actoffload.config import make_config
from actoffload.errors import ConfigError, StateError
from actoffload.events import EventKind, TraceEvent
from actoffload.planning.plan import PlanEntry
from actoffload.policy import Decision, TensorFacts
from tests.harness import (
    ON_EACH_DEVICE,
    Chain,
    MakeOffloader,
    assert_empty,
    assert_same_gradients,
    batch,
    descriptors,
    gradients,
    hook_count,
    lock_of,
    no_garbage_collection,
    same_bits,
    train_step,
    wait_until,
)


@pytest.fixture
def options(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Options of a shared offloader of this test's own, which ends with it."""
    chosen = {"target": "nvme", "path": str(tmp_path), "min_bytes": 0, "policy": "greedy"}
    yield chosen
    shared_offloader(make_config(chosen)).abort()


def test_one_offloader_per_configuration(options: dict[str, Any], tmp_path: Path) -> None:
    with offload_activations(**options) as first:
        pass
    with offload_activations(**options) as second:
        pass
    assert first is second
    assert first.statistics().steps == 2
    assert offload_activations(**(options | {"min_bytes": "0B", "path": [tmp_path]})).offloader is first
    other = offload_activations(**(options | {"min_bytes": 1})).offloader
    assert other is not first
    other.close()
    first.close()
    third = offload_activations(**options).offloader
    assert third is not first
    assert not third.closed


def test_closed_inside_its_context(make_offloader: MakeOffloader) -> None:
    """Tensors saved after that stay, and the step goes on."""
    offloader, model, x = make_offloader(), Chain(), batch()
    expected = train_step(model, x)
    model.layers[0].register_forward_hook(lambda *_: offloader.close())
    assert_same_gradients(train_step(model, x, offloader), expected)
    assert offloader.closed


def test_attach_and_detach(options: dict[str, Any]) -> None:
    model, x = Chain(), batch()
    expected = train_step(model, x)
    attachment = actoffload.attach(model, **options)
    offloader = attachment.offloader
    for _ in range(2):
        assert_same_gradients(train_step(model, x, between=offloader.synchronize), expected)
    assert offloader.statistics().steps == 2
    read = offloader.statistics().nvme_read_bytes
    assert read > 0
    loss = model(x).square().sum()
    attachment.detach()
    attachment.detach()
    offloader.synchronize()
    loss.backward()  # saved tensors stay usable
    assert_same_gradients(gradients(model), expected)
    assert offloader.statistics().nvme_read_bytes > read
    assert_same_gradients(train_step(model, x), expected)
    assert offloader.statistics().steps == 3
    offloader.close()
    assert hook_count(model) == 0


class _Failing(nn.Module):
    error: type[BaseException] | None = None

    def fail(self, *_: object) -> None:
        if self.error is not None:
            raise self.error

    def forward(self, x: Tensor) -> Tensor:
        self.fail()
        return x


@contextlib.contextmanager
def _no_hooks_left() -> Iterator[None]:
    yield
    x = torch.ones(3, requires_grad=True)
    assert type(x.exp().grad_fn._raw_saved_result).__name__ == "SavedTensor"  # type: ignore[union-attr]
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("before", [False, True], ids=["forward", "pre-hook"])
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit])
def test_an_attached_forward_leaves_the_context_however_it_ends(
    options: dict[str, Any], error: type[BaseException], before: bool
) -> None:
    failing = _Failing()
    model = nn.Sequential(Chain(), failing)
    attachment = actoffload.attach(model, **options)
    if before:
        model.register_forward_pre_hook(failing.fail)
    failing.error = error
    with _no_hooks_left():
        for _ in range(3):
            with pytest.raises(error):
                model(batch())
    torch.func.grad(lambda x: x.square().sum())(batch())  # it refuses to run inside of hooks
    assert_empty(attachment.offloader)
    packed = attachment.offloader.statistics().packed_tensors
    expected = train_step(Chain(), batch())  # another model
    assert attachment.offloader.statistics().packed_tensors == packed
    failing.error = None
    found = train_step(model, batch(), between=attachment.offloader.synchronize)
    assert_same_gradients({name.removeprefix("0."): g for name, g in found.items()}, expected)
    assert attachment.offloader.statistics().steps == 4


def test_nested_modules_attached_twice(options: dict[str, Any]) -> None:
    model, x = Chain(), batch()
    expected = train_step(model, x)
    attachments = [actoffload.attach(module, **options) for module in (model, model.layers[1], model, model.layers[1])]
    outer, inner = (attachment.offloader for attachment in attachments[:2])
    assert [attachment.offloader for attachment in attachments] == [outer, inner] * 2
    assert outer is not inner
    with _no_hooks_left():
        assert_same_gradients(train_step(model, x, between=outer.synchronize), expected)
    assert_empty(outer)
    assert_empty(inner)
    for attachment in attachments:
        attachment.detach()
    assert_same_gradients(train_step(model, x), expected)


def test_attached_twice_it_counts_once_and_other_options_are_an_error_that_names_one(options: dict[str, Any]) -> None:
    model = Chain()
    attachment = actoffload.attach(model, **options)
    assert actoffload.attach(model, **options) is attachment
    with pytest.raises(ConfigError, match=r"min_bytes=1: this module is attached with 0: first detach\(\)"):
        actoffload.attach(model, **(options | {"min_bytes": 1}))
    train_step(model, batch())
    assert attachment.offloader.statistics().steps == 1
    attachment.detach()
    assert "forward" not in vars(model)
    other = actoffload.attach(model, **(options | {"min_bytes": 1}))
    other.detach()
    other.offloader.abort()
    again = actoffload.attach(model, **options)
    assert again is not attachment
    again.offloader.close()
    assert actoffload.attach(model, **options) is not again, "a closed offloader admits no tensor"


@pytest.mark.parametrize("field", ["include", "exclude", "fp8"])
def test_a_pattern_that_matches_no_module_is_an_error_that_names_it_and_one(
    options: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}=.*'layer\.\*' matches no module of the model; it has 'layers"):
        actoffload.attach(Chain(), **(options | {field: ["layers.*", "layer.*"]}))
    with pytest.raises(ConfigError, match="it has no modules inside"):
        actoffload.attach(nn.Linear(2, 2), **(options | {field: "layer.*"}))
    for pattern in ("layers", "layers.1", "*"):
        attachment = actoffload.attach(Chain(), **(options | {field: pattern}))
        attachment.detach()
        attachment.offloader.abort()


def test_a_module_that_calls_itself(options: dict[str, Any]) -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor, depth: int = 3) -> Tensor:
            y = torch.tanh(self.linear(x)) * torch.sigmoid(x)
            return torch.as_tensor(self(y, depth - 1)) if depth else y

    plain, model = Recursive(), Recursive()
    attachment = actoffload.attach(model, **options)
    found = train_step(model, batch(), between=attachment.offloader.synchronize)
    assert_same_gradients(found, train_step(plain, batch()))
    assert attachment.offloader.statistics().steps == 1


# -- how an offloader ends ---------------------------------------------------------------------------------------------


def _saved_once(where: str = "cpu") -> Tensor:
    return (torch.linspace(-1, 1, 4096, device=where).requires_grad_() * 2.0).sin().sum()


@ON_EACH_DEVICE
@pytest.mark.parametrize("method", ["close", "synchronize"])
def test_nothing_is_begun_after_abort(make_offloader: MakeOffloader, where: str, method: str) -> None:
    offloader = make_offloader(pending_bytes="1MiB")
    with offloader:
        _alive = _saved_once(where)
    offloader.abort()
    before = offloader.statistics()
    getattr(offloader, method)()
    assert offloader.statistics() == before


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "actoffload" in thread.name}


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """The test leaves no thread of ours and no open file behind."""
    threads, files = _threads(), descriptors()
    yield

    def ended() -> bool:
        gc.collect()
        return not _threads() - threads and descriptors() <= files

    wait_until(ended, "threads or files are left")


@pytest.mark.usefixtures("nothing_is_left")
def test_an_offloader_that_is_dropped_without_close_ends(tmp_path: Path) -> None:
    for _ in range(2):
        offloader = Offloader(OffloadConfig(target="nvme", path=tmp_path, min_bytes=0, keep_last_bytes=0))
        w = torch.linspace(-1, 1, 4096).requires_grad_()
        with offloader:
            loss = (w * 2.0).sin().sum()
        offloader.synchronize()
        assert _threads()
        del offloader
        gc.collect()
        loss.backward()  # the graph holds all that its backward needs
        assert same_bits(w.grad, (w.detach() * 2.0).cos() * 2.0)
        del loss


@pytest.mark.usefixtures("nothing_is_left")
def test_one_that_follows_a_plan_ends_too(tmp_path: Path) -> None:
    """The storage that was saved first dies first, and no call counts the later deaths."""
    plan = Plan(tuple(PlanEntry(index=index, nbytes=4 * 4096, action="keep") for index in range(2)))
    offloader = Offloader(OffloadConfig(target="nvme", path=tmp_path, min_bytes=0, policy=plan))
    for _ in range(2):  # from the second forward on the plan is proven
        with offloader:
            graphs = [_saved_once(), _saved_once()]
        del graphs[0], graphs[0]
    del offloader


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("contended", [False, True])
def test_a_closed_offloader_ends_after_its_last_handle(tmp_path: Path, contended: bool) -> None:
    """The last handle may die while another thread holds the lock."""
    offloader = Offloader(OffloadConfig(target="nvme", path=tmp_path, min_bytes=0, keep_last_bytes=0))
    with offloader:
        loss = _saved_once()
    offloader.close()
    with lock_of(offloader) if contended else contextlib.nullcontext():
        del loss
    assert not contended or offloader.statistics().live_records == 0


def test_a_dropped_offloader_leaves_the_model_as_it_was_at_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    with no_garbage_collection():
        offloader = Offloader(OffloadConfig(target="nvme", path=tmp_path, policy="auto", recompute="0")).use(model)
        assert "forward" in vars(model[0])
        dead = weakref.ref(offloader)
        del offloader
        assert dead() is None
        assert "forward" not in vars(model[0])


def test_detached_inside_of_its_own_forward(options: dict[str, Any]) -> None:
    """That forward continues inside the context; the next one does not."""

    class Detaches(Chain):
        attachment: Any = None

        def forward(self, x: Tensor) -> Tensor:
            if self.attachment is not None:
                self.attachment.detach()
            return super().forward(x)

    model = Detaches()
    model.attachment = actoffload.attach(model, **options)
    with _no_hooks_left():
        assert_same_gradients(train_step(model, batch()), train_step(Chain(), batch()))
    steps = model.attachment.offloader.statistics().steps
    assert_same_gradients(train_step(model, batch()), train_step(Chain(), batch()))
    assert model.attachment.offloader.statistics().steps == steps == 1
    assert "forward" not in vars(model)


def test_an_attached_forward_is_the_models_own(options: dict[str, Any]) -> None:
    """Transformers' Trainer reads a model's columns from its signature."""
    model = Chain()
    plain = inspect.signature(model.forward)
    actoffload.attach(model, **options)
    assert model.forward == Chain.forward.__get__(model)
    assert inspect.signature(model.forward) == plain
    assert inspect.get_annotations(model.forward)


class Scaled(nn.Module):
    """Its forward reads attributes that each copy has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.factor
        return out


def _replica(model: nn.Module) -> nn.Module:
    """A copy as `torch.nn.DataParallel` makes it."""
    replica: nn.Module = model._replicate_for_data_parallel()
    return replica


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, _replica])
def test_a_copy_of_an_attached_module_runs_its_own_forward(options: dict[str, Any], copies: Any) -> None:
    model = Scaled()
    attachment = actoffload.attach(model, **options)
    copied = copies(model)
    copied.linear, copied.factor = nn.Linear(64, 64), 3.0
    assert same_bits(copied(batch()), copied.linear(batch()) * 3.0)
    assert attachment.offloader.statistics().steps == 1
    attachment.detach()
    assert type(model) is Scaled


def _times_seven(self: Scaled, x: Tensor) -> Tensor:
    out: Tensor = self.linear(x) * 7
    return out


@pytest.mark.parametrize("own", [False, True])
def test_an_attached_module_that_was_pickled_is_as_it_was_before(options: dict[str, Any], own: bool) -> None:
    model = Scaled()
    if own:
        model.forward = functools.partial(_times_seven, model)  # type: ignore[method-assign]
    names = set(vars(model))
    actoffload.attach(model, **options)
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded) is Scaled
    assert set(vars(loaded)) == names
    assert same_bits(loaded(batch()), model(batch()))


def test_a_copy_is_attached_and_detached_by_itself(options: dict[str, Any]) -> None:
    model = Scaled()
    names = set(vars(model))
    one = actoffload.attach(model, **options)
    copied = copy.deepcopy(model)
    other = actoffload.attach(copied, **{**options, "min_bytes": 64})
    for each in (model, copied):
        each(batch())
    assert [attachment.offloader.statistics().steps for attachment in (one, other)] == [1, 1]
    one.detach()
    for each in (model, copied):
        each(batch())
    assert [attachment.offloader.statistics().steps for attachment in (one, other)] == [1, 2]
    other.detach()
    for each in (model, copied):
        assert type(each) is Scaled
        assert set(vars(each)) == names


def test_a_class_that_registers_its_subclasses_sees_none_of_ours(options: dict[str, Any]) -> None:
    known: list[type] = []

    class Registered(Chain):
        def __init_subclass__(cls, *, tag: str, **rest: Any) -> None:
            known.append(cls)

    model = Registered()
    attachment = actoffload.attach(model, **options)
    assert isinstance(model, Registered)
    assert_same_gradients(train_step(model, batch()), train_step(Chain(), batch()))
    assert attachment.offloader.statistics().steps == 1
    attachment.detach()
    assert type(model) is Registered
    assert known == []


def test_a_lazy_module_is_attached_after_its_first_forward(options: dict[str, Any]) -> None:
    lazy = nn.LazyLinear(4)
    with pytest.raises(ConfigError, match="run one forward, then attach"):
        actoffload.attach(lazy, **options)
    model = nn.Sequential(lazy, nn.Tanh())
    attachment = actoffload.attach(model, **options)
    for _ in range(2):
        model(batch()).sum().backward()
    assert attachment.offloader.statistics().steps == 2


def test_a_module_of_torch_fx_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="attach\\(\\) to a module around it"):
        actoffload.attach(torch.fx.symbolic_trace(Scaled()), **options)


# -- the user's callables call the offloader ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["synchronize", "close", "abort"])
def test_a_policy_that_makes_the_offloader_wait_for_itself_raises(make_offloader: MakeOffloader, method: str) -> None:
    class Calls:
        def decide(self, facts: TensorFacts) -> Decision:
            offloader.statistics()
            offloader.report()
            getattr(offloader, method)()
            return Decision.OFFLOAD

    offloader: Offloader = make_offloader(policy=Calls())
    with _no_hooks_left(), pytest.raises(StateError, match=rf"{method}\(\) was called by a policy"):
        train_step(Chain(), batch(), offloader)
    assert_empty(offloader)


def test_a_trace_callable_that_closes_the_offloader_warns(make_offloader: MakeOffloader) -> None:
    """On an engine's thread, too, for which `close` would wait."""

    def close(event: TraceEvent) -> None:
        if event.kind is EventKind.WRITE:
            offloader.close()

    offloader = make_offloader(trace=close)

    def step_and_count() -> dict[str, Tensor]:
        found = train_step(Chain(), batch(), offloader, between=offloader.synchronize)
        offloader.statistics()
        return found

    with pytest.warns(RuntimeWarning, match=r"close\(\) was called by a policy, an engine or a trace callable"):
        found = step_and_count()
    assert_same_gradients(found, train_step(Chain(), batch()))
    assert not offloader.closed
