"""What a second reading of the core found: each was wrong once."""

from __future__ import annotations

import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import actoffload
from actoffload import OffloadConfig, Offloader, Plan
from actoffload.errors import NothingOffloadedError
from actoffload.locks import Changed, new_lock
from actoffload.planners.base import Limits
from actoffload.profile import Profile
from actoffload.recorder import MOST_STORAGES
from actoffload.testing.faults import GateEngine
from tests.harness import Chain, MakeOffloader, assert_same_gradients, batch, only_engine, same_bits, train_step


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)])


def test_memory_that_was_free_while_it_was_written_stays_although_it_is_filled_again(
    make_offloader: MakeOffloader,
) -> None:
    offloader = make_offloader(engine=GateEngine)
    x = torch.randn(64, 1024, requires_grad=True)
    y = x * 2.0
    y.retain_grad()
    with offloader:
        z = y.sin()
        storage = y.untyped_storage()
        nbytes, contents = storage.nbytes(), y.detach().clone()
        storage.resize_(0)  # its owner frees it: what is still to be written is gone
        other = (x * 3.0).cos()  # any save is an occasion to see that
        storage.resize_(nbytes)
        y.data.copy_(contents)
    only_engine(offloader).open()
    offloader.synchronize()
    assert offloader.statistics().kept_bytes["resized"] == nbytes
    (z.sum() + other.sum()).backward()
    assert same_bits(y.grad, contents.cos())


@pytest.mark.parametrize("verify", [False, True])
def test_memory_that_is_gone_when_its_write_begins_is_not_read(make_offloader: MakeOffloader, verify: bool) -> None:
    offloader = make_offloader(engine=GateEngine, verify=verify)
    x = torch.randn(1024, 1024, requires_grad=True)  # large enough that freed memory leaves the process
    y = x * 2.0
    y.retain_grad()
    with offloader:
        z = y.sin()
    storage, contents = y.untyped_storage(), y.detach().clone()
    nbytes = storage.nbytes()
    storage.resize_(0)
    only_engine(offloader).open()
    offloader.synchronize()
    assert offloader.statistics().kept_bytes["resized"] == nbytes
    assert not offloader.statistics().degraded
    storage.resize_(nbytes)
    y.data.copy_(contents)
    z.sum().backward()
    assert same_bits(y.grad, contents.cos())


def test_it_is_seen_at_the_next_save_not_only_at_the_end(either: str, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=GateEngine)
    x = torch.randn(64, 1024, requires_grad=True)
    y = x * 2.0
    with offloader:
        z = y.sin()
        (mover,) = offloader.tiers.movers.values()
        (record,) = list(mover._in_place)
        nbytes = y.untyped_storage().nbytes()
        y.untyped_storage().resize_(0)
        assert not record.was_resized
        other = (x * 3.0).cos()
        assert record.was_resized
        y.untyped_storage().resize_(nbytes)
    only_engine(offloader).open()
    offloader.synchronize()
    mover.notice_resized()
    assert list(mover._in_place) == [], "nor is it looked at any more when it has ended"
    del z, other


def test_two_models_under_one_plan_do_not_take_each_others_blocks(tmp_path: Path) -> None:
    options = {"target": "nvme", "path": str(tmp_path), "policy": "auto", "min_bytes": 1}
    first, second = _net(), _net()
    attachments = [actoffload.attach(model, **options) for model in (first, second)]
    x = torch.randn(128, 32)
    for _ in range(4):
        second(first(x)).sum().backward()
    offloader = attachments[0].offloader
    assert set(offloader._blocks.blocks) == {"0", "1", "2", "0#2", "1#2", "2#2"}
    assert "no plan" not in "".join(offloader.explain().splitlines()[:1])
    for attachment in attachments:
        attachment.detach()
    offloader.close()


def test_a_model_under_a_plan_can_be_pickled_with_its_hooks(make_offloader: MakeOffloader) -> None:
    model = Chain()
    make_offloader(policy="auto").use(model)
    copy = pickle.loads(pickle.dumps(model))
    assert_same_gradients(train_step(copy, batch()), train_step(model, batch()))


class _Broken:
    name = "broken"

    def plan(self, profile: Profile, limits: Limits) -> Plan:
        raise ZeroDivisionError("no such luck")


def test_a_planner_that_fails_ends_the_planning_and_not_the_training(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy="auto")
    assert offloader._autopilot is not None
    offloader._autopilot._planner = _Broken()
    model = Chain()
    plain = train_step(model, batch())
    with pytest.warns(RuntimeWarning, match="could not plan"):
        found = [train_step(model, batch(), offloader) for _ in range(5)]
    for gradients in found:
        assert_same_gradients(gradients, plain)
    assert not offloader.core.lock.locked()


def test_a_recording_that_never_ends_is_given_up(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy="auto")
    recorder = offloader.recorder
    alive = torch.randn(64, 64, requires_grad=True) * 2
    with offloader:
        loss = alive.sin().sum()
    recorder._saved *= MOST_STORAGES
    with offloader:
        (alive * 2).cos().sum()
    assert recorder._saved == []
    assert not recorder.active
    loss.backward()


def test_a_dropped_offloader_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = _net()
    offloader = Offloader(OffloadConfig(target="nvme", path=str(tmp_path), policy="auto")).use(model)
    assert offloader._autopilot is not None
    offloader._autopilot.recompute.follow(offloader._blocks.blocks, ["0"])
    assert "forward" in vars(model[0])
    del offloader
    gc.collect()
    assert "forward" not in vars(model[0])


def test_an_offloader_is_in_no_cycle(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        offloader = Offloader(OffloadConfig(target="nvme", path=str(tmp_path)))
        dead = weakref.ref(offloader)
        del offloader
        assert dead() is None
    finally:
        gc.enable()


def test_an_error_on_the_way_into_a_wait_leaves_the_lock_as_it_should_be(either: str) -> None:
    class _Owner:
        def after(self) -> None:
            raise ValueError("the owner's work failed")

    owner = _Owner()
    lock = new_lock()
    condition = Changed(lock)
    lock.noted.append("some work")
    lock.after_release = weakref.WeakMethod(owner.after)
    condition.acquire()
    assert not condition.wait(timeout=0.01), "not called on the way into a wait"
    assert lock.locked()
    with pytest.raises(ValueError, match="the owner's work"):
        condition.release()
    assert not lock.locked()


def test_a_step_inside_an_except_block_did_not_fail(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    attachment = actoffload.attach(model, target="nvme", path=str(tmp_path), strict=True, min_bytes="1GiB")
    try:
        raise KeyError("outer")
    except KeyError:
        with pytest.raises(NothingOffloadedError):
            model(torch.randn(2, 4))
    attachment.detach()
    attachment.offloader.close()


def test_local_tensors_around_a_change_of_their_dtensor_share_nothing(
    make_offloader: MakeOffloader, tmp_path: Path
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    def gradient(offloader: Offloader | None) -> Tensor | None:
        import contextlib

        torch.manual_seed(0)
        x = torch.randn(128, 128, requires_grad=True)
        with offloader or contextlib.nullcontext():
            d: Any = DTensor.from_local(x * 1.0, mesh, [Replicate()], run_check=False) * 1.5
            held = d.to_local().sin()  # alive, and with it what it saved
            d.mul_(3.0)
            y: Tensor = d.to_local().sin()
        if offloader is not None:
            offloader.synchronize()
        y.sum().backward()
        assert held.grad_fn is not None
        return x.grad

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        assert same_bits(gradient(make_offloader()), gradient(None))
    finally:
        dist.destroy_process_group()
