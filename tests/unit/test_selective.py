"""Selective checkpointing through our contexts: the bits and errors of PyTorch's own, and what it caches is moved."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS
from torch.utils.checkpoint import create_selective_checkpoint_contexts as plain_contexts

from actoffload import OffloadConfig, Offloader, create_selective_checkpoint_contexts
from actoffload.errors import SavedTensorModifiedError
from actoffload.testing.fakedevice import Adversary, FakeDevice
from actoffload.testing.faults import GateEngine
from tests.harness import (
    MakeOffloader,
    assert_empty,
    assert_same_gradients,
    batch,
    forget_failed_backward,
    no_garbage_collection,
    only_engine,
    same_bits,
    save_in_python,
    train_step,
)
from tests.selective import (
    ATEN,
    MATMULS,
    MUTATED,
    Blocks,
    assert_same,
    gradients_of,
    matrix,
    region,
    save_all,
    save_some,
)


@pytest.fixture
def offloader(make_offloader: MakeOffloader) -> Offloader:
    """Moves everything."""
    return make_offloader(policy="all")


# -- what moves, and that the bits are the same ------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("shape", [(128, 64), (4, 32, 64)], ids=["2d", "3d"])
@pytest.mark.parametrize(
    "policy",
    [MATMULS, save_all, save_some(ATEN.tanh.default, ATEN.t.default, ATEN.view.default), save_some()],
    ids=["matmuls", "all", "views", "none"],
)
def test_gradients_are_those_of_pytorchs_own(policy: Any, shape: Any, inside: bool, offloader: Offloader) -> None:
    model, x = Blocks(policy), batch().reshape(shape)
    model.make = plain_contexts
    expected = train_step(model, x)
    model.make = create_selective_checkpoint_contexts
    with no_garbage_collection():
        for between in (None, offloader.synchronize, None):
            assert_same_gradients(train_step(model, x, offloader, inside=inside, between=between), expected)
            assert_empty(offloader)
    assert offloader.statistics().nvme_read_bytes > 0


def test_what_is_cached_moves_and_pytorchs_own_stays(offloader: Offloader) -> None:
    model, x = Blocks(), batch()
    model.make = plain_contexts
    expected = train_step(model, x)
    assert_same_gradients(train_step(model, x, offloader, between=offloader.synchronize), expected)
    accounts = offloader.core.accounts
    before = accounts.moved_bytes
    model.make = create_selective_checkpoint_contexts
    assert_same_gradients(train_step(model, x, offloader, between=offloader.synchronize), expected)
    assert accounts.moved_bytes - 2 * before == len(model.layers) * x.nbytes
    assert accounts.packed_bytes == accounts.moved_bytes
    assert offloader.statistics().nvme_written_bytes >= accounts.moved_bytes


@pytest.mark.parametrize("shape", [(64, 64), (4, 16, 64)], ids=["2d", "3d"])
def test_the_memory_is_given_up(shape: Any, make_offloader: MakeOffloader) -> None:
    """While the forward goes on, nothing of ours holds what was cached and moved, nor a view of it."""
    offloader = make_offloader(policy="all", engine="memory")
    alive: list[bool] = []

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        ref = torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage())
        y = y.sin()
        offloader.synchronize()
        alive.append(not ref.expired())
        return y.cos()

    x = matrix().detach().reshape(shape).requires_grad_()
    gradients_of(partial(region, function, policy=save_all), x, matrix(seed=1), context=offloader)
    assert alive[0] is False


def test_a_cached_tensor_and_a_saved_one_share_a_record(offloader: Offloader) -> None:
    def function(x: Tensor, w: Tensor, run: Any = region) -> Tensor:
        y: Tensor = run(torch.mm, x, w)
        return y.sin() * y  # saves the product again, outside

    x, w = matrix(), matrix(seed=1)
    expected = gradients_of(partial(function, run=lambda mm, x, w: mm(x, w)), x, w)
    assert_same(gradients_of(function, x, w, context=offloader), expected)
    assert offloader.statistics().deduplicated_bytes >= 2 * x.nbytes


@pytest.mark.parametrize("target", ["host", "nvme", "tiered"])
@pytest.mark.parametrize("adversary", ["lazy", "eager", "random"])
def test_on_the_simulated_device(tmp_path: Path, adversary: Adversary, target: Any) -> None:
    model, x = Blocks(save_all, dropout=0.0), batch()
    model.make = plain_contexts
    expected = train_step(model, x)
    model.make = create_selective_checkpoint_contexts
    device = FakeDevice(adversary)
    config = OffloadConfig(
        target=target,
        path=str(tmp_path),
        policy="all",
        min_bytes=0,
        pending_bytes=x.nbytes,
        prefetch_bytes=2 * x.nbytes,
        keep_last_bytes=0,
        host_budget="1MiB",
        debug=True,
    )
    offloader = Offloader(config, accelerator=device)
    try:
        for _ in range(3):
            with device:
                found = train_step(model, x, offloader)
            assert_same_gradients(found, expected)
        device.finish()
        statistics = offloader.statistics()
        assert statistics.host_read_bytes > 3 * len(model.layers) * x.nbytes  # more than the checkpoints' inputs
        assert statistics.live_records == 0
        assert not device.violations
    finally:
        offloader.close()


class Seen(TorchDispatchMode):
    """The operations that a mode around a region sees; their calls are counted by the region around it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in SAC_IGNORED_OPS:
            self.operations.append(func)
        return func(*args, **(kwargs or {}))


def test_no_mode_sees_what_we_do(tmp_path: Path) -> None:
    config = OffloadConfig(target="host", policy="all", min_bytes=0, keep_last_bytes=0)
    offloader = Offloader(config, accelerator=FakeDevice())
    x = matrix().detach().reshape(4, 16, 64).requires_grad_()
    w = matrix(seed=1)
    seen = {}
    for make in (plain_contexts, plain_contexts, create_selective_checkpoint_contexts):  # the first ever pays once
        with offloader:
            y = x * 1
            with Seen() as mode:
                z = region(lambda y, w: (y @ w).sin().cos(), y, w, policy=save_all, make=make)
        del y, z
        seen[make] = mode.operations
    assert len(seen[plain_contexts]) > 4
    assert seen[plain_contexts] == seen[create_selective_checkpoint_contexts]
    offloader.close()


def test_the_second_step_prefetches_in_the_order_of_the_recomputation(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy="all")
    model, x = Blocks(save_some(ATEN.addmm.default, ATEN.tanh.default, ATEN.sigmoid.default), depth=3), batch()
    save_in_python(offloader)
    asked: list[list[int]] = []
    advance = type(offloader._prefetch).walk

    def walk(self: Any, record: Any, round_: int) -> None:
        if record.tape is not None:
            record.tape.prepare(self.orders)
            guesses.append(record.tape.order)
            asked[-1].append(record.index)
        advance(self, record, round_)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(offloader._prefetch), "walk", walk)
        for _ in range(2):
            guesses: list[tuple[int, ...]] = []
            asked.append([])
            train_step(model, x, offloader)
    assert asked[0] == asked[1]
    assert guesses[-1] == tuple(asked[1]), "the second step's order is the one that the first one saw"
    assert list(guesses[-1]) != sorted(guesses[-1], reverse=True)


# -- in-place changes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("min_bytes", [0, "1GiB"], ids=["moved", "kept"])
def test_a_changed_cached_tensor_raises(min_bytes: Any, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy="all", min_bytes=min_bytes)
    x = matrix()
    with offloader:
        y, z = region(lambda x: ((y := x @ x), y.sin().cos()), x)
        with torch.no_grad():
            y.add_(1)
    with pytest.raises(RuntimeError, match=MUTATED) as caught:
        z.sum().backward()
    assert isinstance(caught.value, SavedTensorModifiedError)
    del y, z, caught
    forget_failed_backward()
    assert offloader.statistics().live_records == 0


def test_a_change_inside_of_the_region_raises(offloader: Offloader) -> None:
    x = matrix()
    with offloader:
        z = region(lambda x: (x @ x).mul_(2).sin().cos(), x)
    with pytest.raises(RuntimeError, match=MUTATED):
        z.sum().backward()


def test_the_output_of_an_operation_that_works_in_place_raises_when_cached(offloader: Offloader) -> None:
    x = matrix()
    for context in (contextlib.nullcontext(), offloader):
        with context:
            z = region(lambda x: x.exp().mul_(2).sin().cos(), x, policy=[ATEN.mul_.Tensor])
        with pytest.raises(RuntimeError, match=MUTATED):
            z.sum().backward()


def test_changes_may_be_allowed(offloader: Offloader) -> None:
    """Then PyTorch's own contexts are used: they hand out the changed bytes."""
    x = matrix()
    function = partial(region, lambda x: (x @ x).relu_().sin().cos(), policy=MATMULS, allow_cache_entry_mutation=True)
    assert_same(gradients_of(function, x, context=offloader), gradients_of(function, x))


def test_a_change_that_the_cached_tensors_counter_does_not_see(tmp_path: Path) -> None:
    """A product of three dimensions ends in an alias with a counter of its own: PyTorch's own goes wrong here."""
    x, w = matrix(1024).detach().reshape(16, 64, 64).requires_grad_(), matrix(seed=1)

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        y += 1
        return (y.exp() * y).sin()

    expected = gradients_of(function, x, w)
    plain = gradients_of(partial(region, function, make=plain_contexts), x, w)
    assert not same_bits(plain[0], expected[0]), "PyTorch has mended it: the special case may go"
    for device in (None, FakeDevice("lazy")):  # both would read the product after it was changed
        config = OffloadConfig(target="nvme", path=str(tmp_path), policy="all", min_bytes=0, engine=GateEngine)
        offloader = Offloader(config, accelerator=device)
        for _ in range(2):
            with device if device is not None else contextlib.nullcontext():
                with offloader:
                    loss = region(function, x, w).sum()
                only_engine(offloader).open()
                offloader.synchronize()
                assert_same(list(torch.autograd.grad(loss, [x, w])), expected)
                only_engine(offloader).shut()
            del loss
        assert offloader.statistics().live_records == 0
        offloader.close()


def test_changes_with_and_without_the_cached_tensors_counter(offloader: Offloader) -> None:
    """The second finds the first one's: an error in backward, as it was one before, and not in the forward."""
    x = matrix()

    def function(x: Tensor) -> Tensor:
        y = x @ x
        with torch.no_grad():
            y.add_(1)
            ATEN._unsafe_view(y, [64 * 64]).add_(1)
        return y.sin().cos()

    with offloader:
        loss = region(function, x).sum()
    with pytest.raises(RuntimeError, match=MUTATED):
        loss.backward()


def test_a_view_is_taken_again(offloader: Offloader) -> None:
    """A cached view would not see that what it is a view of has changed."""
    x = matrix()

    def function(x: Tensor) -> Tensor:
        buffer = torch.zeros(64, 64)
        row = buffer[:32]
        row.copy_(x[:32])
        return (buffer * x).sin()

    expected = gradients_of(function, x)
    found = gradients_of(partial(region, function, policy=[ATEN.slice.Tensor]), x, context=offloader)
    assert_same(found, expected)
