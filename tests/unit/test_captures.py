"""Rule 7: while a graph is captured, the capturing thread enqueues no copy and no wait, and queries no event."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import Decision, Offloader, TensorFacts
from actoffload.errors import StateError
from actoffload.memory import host_pool
from actoffload.planning.plan import Plan, PlanEntry
from actoffload.testing.faults import GateEngine
from actoffload.testing.simulated_device import DEVICES, NAME, SimulatedAccelerator, SimulatedDevice
from actoffload.tiers.record import State
from tests.harness import (
    Chain,
    assert_same_gradients,
    batch,
    forget_failed_backward,
    gradients,
    only_engine,
    recorder_of,
    run_in_threads,
    states_of,
    tier_of,
    train_step,
    wait_until,
)
from tests.unit.simulated_programs import RECORD_BYTES, LateEngine, _model, _offloader, leaf

pytestmark = pytest.mark.simulated

CALLS = frozenset(
    {
        "record",
        "timestamp",
        "wait",
        "done",
        "synchronize",
        "seconds_between",
        "copy",
        "empty",
        "memory_info",
    }
)
"""The calls that would be captured, or that would query the device. `used_on` only notifies the allocator."""


class _Capturing(SimulatedAccelerator):
    """Reports a graph capture. A call that the capturing thread makes meanwhile fails the test there."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self._captured: tuple[int, ...] = ()
        self._paused = contextlib.ExitStack()

    def is_capturing(self, index: int) -> bool:
        return index in self._captured

    @contextlib.contextmanager
    def capture(self, *indices: int) -> Iterator[None]:
        """Capture the current streams of these devices, by default of all."""
        self._captured = indices or tuple(range(DEVICES))
        try:
            yield
        finally:
            self._captured = ()
        assert self.asked == []  # also if the library has caught the failure

    @contextlib.contextmanager
    def late_copies(self, device: SimulatedDevice) -> Iterator[None]:
        """No copy to the host begins before this context ends or a call fails the test, as cleaning up may wait."""
        with self._paused:
            self._paused.enter_context(device.paused(self.side_stream(0, "out")))
            yield

    def __getattribute__(self, name: str) -> Any:
        # The library's own threads use other streams, which are not captured.
        if name in CALLS and self._captured and not threading.current_thread().name.startswith("actoffload"):
            self.asked.append(name)
            self._captured = ()
            self._paused.close()
            pytest.fail(f"{name}() was called while a graph was captured")
        return super().__getattribute__(name)


ON_EACH_WAY = pytest.mark.parametrize(
    ("target", "engine"),
    [("host", "memory"), ("nvme", GateEngine), ("nvme", LateEngine)],
    ids=["host", "disk", "direct"],
)
RELEASES_FIRST = Plan((PlanEntry(index=0, nbytes=RECORD_BYTES, action="offload", release_after=1),))
"""All storages move. The memory of a forward's first one is released at the next save, or first use in backward."""


def _assert_pending(offloader: Offloader, engine: Any) -> None:
    """Each part of the library that acts later has something to do."""
    tier = tier_of(offloader)
    if engine is LateEngine:  # it makes no copies
        return
    if engine is GateEngine:
        wait_until(lambda: tier._arrived)
    else:
        assert tier._reloading
    assert tier.window.gathering is not None
    assert tier.window.due == offloader.store.shared.events + 1
    assert any(tier.copies.waits._open.values())


@ON_EACH_WAY
def test_a_capture_leaves_everything_that_is_pending(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, engine: Any
) -> None:
    """A batch that gathers, a release that is due, waits that are timed, and records that came back or are unused."""
    monkeypatch.setattr(host_pool, "TRIM_STEPS", 1)
    accelerator, (model, x) = _Capturing(), _model()
    expected, held = train_step(model, x), [leaf() * 2.0 for _ in range(2)]
    options: dict[str, Any] = {"pending_bytes": "1MiB", "policy": RELEASES_FIRST, "trace": tmp_path / "run.json"}
    with (
        _offloader(tmp_path, accelerator=accelerator, target=target, engine=engine, **options) as offloader,
        contextlib.ExitStack() as context,
    ):

        def forward() -> Tensor:
            with offloader:
                loss: Tensor = model(x).square().sum()
            return loss

        gate = only_engine(offloader) if engine is GateEngine else SimpleNamespace(open=int, shut=int)
        gate.open()
        with offloader:
            held[0].square()  # the plan is for a forward that saves one tensor
        used = forward()
        used.backward(retain_graph=True)
        offloader.stage("ahead", "forward")
        ahead, moved = forward(), forward()
        offloader.synchronize()
        device.synchronize()
        gate.shut()
        offloader.stage("ahead", "backward")  # which fetches the records that it needs first
        with accelerator.late_copies(device):
            died = forward()
            with offloader:
                one = held[0].square().sum()
            context.enter_context(offloader)
            other = held[1].square().sum()
            gate.open()
            _assert_pending(offloader, engine)
            with accelerator.capture():
                context.close()  # the forward ends, which would begin the copy that gathers
                torch.autograd.grad(one, held[0], retain_graph=True)
                del ahead, died, used
                torch.autograd.grad(one, held[0], retain_graph=True)
                forward().backward()
                with pytest.raises(StateError, match="moved before the capture"):
                    run_in_threads(moved.backward)
                assert offloader.statistics().kept_bytes["graph capture"] > 0
        with accelerator.capture():
            offloader.synchronize()
        del moved, one, other
        model.zero_grad()
        assert_same_gradients(train_step(model, x, offloader), expected)
        forget_failed_backward()
        assert offloader.statistics().live_records <= 1


@ON_EACH_WAY
def test_a_capture_gets_no_tensor_that_is_on_its_way(
    device: SimulatedDevice, tmp_path: Path, target: str, engine: Any
) -> None:
    """Its copy to the device may have begun; what a stream would have to wait for is refused, and is right later."""
    accelerator, (model, x) = _Capturing(), _model()
    expected = train_step(model, x)
    with _offloader(tmp_path, accelerator=accelerator, target=target, engine=engine, pending_bytes="1MiB") as offloader:
        if engine is GateEngine:
            only_engine(offloader).open()
        offloader.stage("ahead", "forward")
        with offloader:
            loss = model(x).square().sum()
        offloader.synchronize()
        device.synchronize()
        offloader.stage("ahead", "backward")
        wait_until(lambda: State.FETCHING.value not in states_of(offloader))
        with accelerator.capture(), pytest.raises(StateError, match="moved before the capture"):
            run_in_threads(partial(loss.backward, retain_graph=True))
        model.zero_grad()
        loss.backward()
        assert_same_gradients(gradients(model), expected)


def test_a_capture_makes_no_room(device: SimulatedDevice, tmp_path: Path) -> None:
    """What it keeps passes the budget, while a copy is under way that would make room."""
    accelerator, (model, x) = _Capturing(), _model()
    held, budget = leaf() * 2.0, 4 * RECORD_BYTES
    with _offloader(tmp_path, accelerator=accelerator, target="host", device_budget=budget) as offloader:
        with accelerator.late_copies(device):
            with offloader:
                square = held.square()
            assert tier_of(offloader).leaving_bytes == RECORD_BYTES
            with accelerator.capture(), offloader:
                loss = model(x).square().sum()
            assert offloader.statistics().resident_peak_bytes > budget
        del loss, square


def test_a_capture_is_not_timed(device: SimulatedDevice, tmp_path: Path) -> None:
    """Nor does a step begin or end in it: the planner would query the events of the step before."""
    accelerator, (model, x) = _Capturing(), _model()
    expected, held = train_step(model, x), leaf() * 2.0
    with _offloader(tmp_path, accelerator=accelerator, policy="auto", target="host", pending_bytes=None) as offloader:
        for _ in range(6):
            with offloader:
                square = held.square()
            with accelerator.capture():
                torch.autograd.grad(square.sum(), held)
            del square
            with accelerator.capture():
                train_step(model, x, offloader)
            assert_same_gradients(train_step(model, x, offloader), expected)


def test_a_step_of_another_shape_that_begins_in_a_capture_is_not_timed(device: SimulatedDevice, tmp_path: Path) -> None:
    """Its model tells the shape in the capture, and a shape that was not seen before would be recorded."""
    accelerator, model, x = _Capturing(), Chain().to(NAME), batch().to(NAME)
    expected = train_step(model, x)
    with _offloader(tmp_path, accelerator=accelerator, policy="auto", target="host", pending_bytes=None) as offloader:
        offloader.use(model)
        for _ in range(6):
            train_step(model, x, offloader)
        assert not recorder_of(offloader).active
        with offloader, accelerator.capture():
            loss = model(torch.cat([x, x])).square().sum()
        del loss
        assert_same_gradients(train_step(model, x, offloader), expected)


def test_a_capture_on_one_device_sees_no_call_for_a_tensor_of_another(device: SimulatedDevice, tmp_path: Path) -> None:
    """To move it would have streams of the captured device wait for copies that began before the capture."""
    accelerator, programs = _Capturing(), [_model(index) for index in range(2)]
    expected = [train_step(*program) for program in programs]

    def forward(index: int) -> Tensor:
        model, x = programs[index]
        with offloader:
            loss: Tensor = model(x).square().sum()
        return loss

    with _offloader(tmp_path, target="host", accelerator=accelerator, pending_bytes=4 * RECORD_BYTES) as offloader:
        order = (1, 0, 1)
        before = [forward(index) for index in order[:2]]
        with accelerator.capture(0):
            during = forward(1)
        for loss, index in zip((*before, during), order, strict=True):
            programs[index][0].zero_grad()
            loss.backward()
            assert_same_gradients(gradients(programs[index][0]), expected[index])


class _OnlyOnDevice1:
    def decide(self, facts: TensorFacts) -> Decision:
        return Decision.OFFLOAD if facts.device.endswith("1") else Decision.KEEP


def test_a_capture_on_a_device_without_copies_queries_no_event_of_a_trace(
    device: SimulatedDevice, tmp_path: Path
) -> None:
    accelerator, (model, x), held = _Capturing(), _model(1), leaf() * 2.0
    options: dict[str, Any] = {"target": "host", "accelerator": accelerator, "policy": _OnlyOnDevice1()}
    with torch.accelerator.device_index(1), _offloader(tmp_path, **options, trace=tmp_path / "run.json") as offloader:
        with offloader:
            square, loss = held.square(), model(x).square().sum()
        with accelerator.capture(0):
            train_step(model, x, offloader)
        assert offloader.statistics().moved_bytes > 0
        del square, loss
