"""An interrupt anywhere in our code: the step fails with it, all is released, and the next context starts afresh.

Ctrl-C is one, and so is any exception of a signal handler, such as the `TimeoutError` of an alarm. It is raised at the
n-th place, for many n, at which Python may raise one: at the entry of one of our functions on the training thread, and
at the return of a function in C that it called. One place is left out: the context's exit, before its first line.
Python has no way to guard that, for any context manager.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import actoffload
from actoffload import OffloadConfig, Offloader
from actoffload.autograd import native
from actoffload.autograd.hook_stack import Hooks
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator
from tests.harness import (
    ON_EACH_DEVICE,
    assert_same_bits,
    assert_same_gradients,
    files_in,
    forget_failed_backward,
    gradients,
    run_in_threads,
    wait_until,
)

OURS = str(Path(actoffload.__file__).parent)
SIMULATION = str(Path(OURS) / "testing")
EXIT = inspect.unwrap(Offloader.__exit__)
POINTS = 16
"""Interrupts on each of the devices."""


class OutOfTime(Exception):
    """Raised by a user's program in the handler of an alarm."""


KINDS = (KeyboardInterrupt, OutOfTime, TimeoutError, RuntimeError, MemoryError, KeyError)
"""Our own code expects some of them from the system."""


class Interrupt:
    """Raises an exception once, at the n-th place in our code where Python may; counts the places."""

    def __init__(self, at: int, kind: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.seen, self.kind = at, 0, kind

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event in ("call", "c_return") and name.startswith(OURS) and not name.startswith(SIMULATION):
            if frame.f_locals.get("function") is EXIT or (event == "call" and frame.f_code is EXIT.__code__):
                return
            self.seen += 1
            if self.seen == self.at:
                sys.setprofile(None)
                raise self.kind

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers)


X = torch.linspace(-1, 1, 64 * 256).view(256, 64)


def _step(model: torch.nn.Module, offloader: Offloader | None, x: Tensor = X) -> None:
    with offloader or contextlib.nullcontext():
        loss = model(x).square().sum()
    if offloader is not None:
        offloader.synchronize()
    loss.backward()


def _gone(ref: weakref.ref[Any]) -> bool:
    gc.collect()
    return ref() is None


@ON_EACH_DEVICE
def test_an_interrupt_aborts_the_step_and_the_next_context_starts_afresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    # Python only prints an exception of a finalizer; pytest would hold it, and all objects of its traceback.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    model, x = _model().to(where), X.to(where)
    _step(model, None, x)
    expected = gradients(model)
    offloader = _offloader(tmp_path).use(model)
    _step(model, offloader, x)  # the library measures the first step more closely than later ones
    counting = Interrupt(at=-1)
    with counting.armed():
        _step(model, offloader, x)
    assert counting.seen > 10 * POINTS
    gradients(model)
    interrupted, kinds = 0, itertools.cycle(KINDS)
    for at in sorted(random.Random(where == "cpu").sample(range(1, counting.seen), POINTS)):
        interrupt, raised = Interrupt(at, next(kinds)), False
        try:
            with interrupt.armed():
                _step(model, offloader, x)
        except interrupt.kind as error:
            raised = True
            error.__traceback__ = None
        model.zero_grad(set_to_none=True)
        forget_failed_backward()
        gc.collect()
        run_in_threads(offloader.statistics)
        if where != "cpu":
            torch.accelerator.synchronize()
        store = weakref.ref(offloader.store)
        aborted = offloader.store.shared.interrupted
        assert aborted or not offloader.statistics().live_records, f"a record is left after {interrupt.kind} at {at}"
        assert files_in(tmp_path) == (not aborted), f"disk is taken after an interrupt at {at}"
        if aborted and not raised:  # raised in a finalizer, as the last call: the next context raises it
            try:
                offloader.__enter__()
            except interrupt.kind as error:
                raised = True
                error.__traceback__ = None
            assert raised, f"the interrupt at {at} is lost"
        interrupted += raised
        found: list[dict[str, Tensor]] = []

        def step_again() -> None:
            _step(model, offloader, x)
            found.append(gradients(model))  # noqa: B023 - it is over before the next

        run_in_threads(step_again)
        assert_same_gradients(found[0], expected)
        wait_until(lambda: _gone(store) == aborted, f"memory is held after an interrupt at {at}")  # noqa: B023
    assert interrupted > POINTS // 2, "an interrupt in a finalizer is printed, not raised; most are elsewhere"
    run_in_threads(offloader.close)


def _ctrl_c_once(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    """The next call of a method is interrupted."""
    original = getattr(owner, name)

    def interrupted(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(owner, name, original)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)


def _offloader(tmp_path: Path, accelerator: SimulatedAccelerator | None = None) -> Offloader:
    config = OffloadConfig(
        target="nvme", path=tmp_path, engine="posix", min_bytes=0, keep_last_bytes=0, policy="all", host_budget="4MiB"
    )
    return Offloader(config, accelerator=accelerator)


def test_a_context_that_stays_open_after_an_interrupt_keeps_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloader, model = _offloader(tmp_path), _model()
    _step(model, None)
    expected = gradients(model)
    with offloader:
        _ctrl_c_once(monkeypatch, offloader.store, "_place")
        with pytest.raises(KeyboardInterrupt):
            model(X)
        for _ in range(3):  # the loop caught the interrupt, and goes on
            model(X).square().sum().backward()
            assert_same_gradients(gradients(model), expected)
        assert offloader.statistics().live_records <= 1  # the record at which the interrupt came
    _step(model, offloader)
    assert_same_gradients(gradients(model), expected)
    assert offloader.statistics().moved_bytes > 0


@pytest.mark.usefixtures("both_hooks")
@pytest.mark.parametrize("kind", [torch.nn.Parameter, torch.nn.Buffer])
def test_a_context_that_stays_open_after_an_interrupt_sees_swapped_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """As plain PyTorch does: FSDP gives a parameter other memory between forward and backward."""

    def run(offloader: Offloader | None) -> Tensor | None:
        model, x = torch.nn.Module(), X.clone().requires_grad_()
        weight: Tensor = kind(X[:64, :64].clone())
        model.weight = weight
        with offloader.use(model) if offloader else contextlib.nullcontext():
            if offloader is not None:
                _ctrl_c_once(monkeypatch, offloader.store, "_place")
                with pytest.raises(KeyboardInterrupt):
                    x.sin().sin()
                assert offloader.store.shared.interrupted
            loss = (x.sin() @ weight).sum()
        weight.data = X[64:128, :64].exp()
        loss.backward()
        return x.grad

    assert_same_bits([run(_offloader(tmp_path))], [run(None)])


@pytest.mark.simulated
def test_an_interrupt_releases_disk_and_threads_though_the_device_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    accelerator = SimulatedAccelerator()
    offloader, model, x = _offloader(tmp_path, accelerator), _model().to(NAME), X.to(NAME)
    with offloader:
        loss = model(x).sum()
    offloader.synchronize()

    def refuse(*_: Any) -> None:
        raise RuntimeError("CUDA error")

    _ctrl_c_once(monkeypatch, offloader.store, "_place")
    monkeypatch.setattr(accelerator, "wait", refuse)
    with pytest.raises(KeyboardInterrupt), offloader:
        model(x)
    monkeypatch.undo()
    with pytest.raises(actoffload.errors.OffloaderClosedError):
        loss.backward()
    forget_failed_backward()
    assert files_in(tmp_path) == 0
    wait_until(lambda: set(threading.enumerate()) <= before, "threads are left")


@pytest.mark.parametrize("edge", ["enter", "exit"])
def test_an_interrupt_at_the_edge_of_a_context_leaves_no_hooks(tmp_path: Path, edge: str) -> None:
    offloader = _offloader(tmp_path)

    def profile(frame: Any, event: str, what: Any) -> None:
        pushed = event == "c_return" and what.__name__ == "_push_saved_tensors_default_hooks"
        leaving = event == "call" and frame.f_code is Hooks.__exit__.__code__
        if (pushed, leaving)[edge == "exit"]:
            sys.setprofile(None)
            raise KeyboardInterrupt

    def enter_and_leave() -> None:
        try:
            if edge == "enter":
                sys.setprofile(profile)
            with offloader:
                sys.setprofile(profile)
        finally:
            sys.setprofile(None)

    with pytest.raises(KeyboardInterrupt):
        enter_and_leave()
    assert offloader._forwards.innermost_hook is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    x = torch.ones(8, requires_grad=True)
    with offloader:
        x.exp().sum().backward()
    assert x.grad is not None


@pytest.mark.skipif(bool(native.refusal()), reason="without the compiled hooks a finalizer may lose it")
def test_ctrl_c_in_a_long_backward_is_raised(tmp_path: Path) -> None:
    """The signal comes during a kernel; often a finalizer of ours is the first Python code after it."""
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(12)])
    x = torch.randn(512, 512)
    offloader = Offloader(OffloadConfig(target="nvme", path=tmp_path, engine="posix", min_bytes=1 << 16))
    with offloader:
        model(x).sum().backward()
    for index in range(0, 12, 2):
        with offloader:
            loss = model(x).sum()
        hook = next(model[index].parameters()).register_hook(lambda _: _send_from_a_thread())
        with pytest.raises(KeyboardInterrupt):
            _backward_and_wait(loss)
        hook.remove()
        del loss
        forget_failed_backward()
        gc.collect()
        assert offloader.statistics().live_records == 0


def _at_random_places(failures: int, seed: int, folder: Path) -> int:
    """Train while an alarm rings at a random moment of each step, until enough steps have failed; return how many did.

    After each: the lock is free, no record is left, and the next step has the gradients of one without a library.
    """
    moments = random.Random(seed)
    model = torch.nn.Sequential(*(m for _ in range(6) for m in (torch.nn.Linear(128, 128), torch.nn.GELU())))
    x, failed, rings = torch.randn(256, 128), 0, False
    _step(model, None, x)
    expected = gradients(model)
    offloader = _offloader(folder).use(model)

    def ring(*_: object) -> None:
        if rings:  # else the step has ended before it
            raise moments.choice(KINDS)("time is up")

    before = signal.signal(signal.SIGALRM, ring)
    _step(model, offloader, x)
    shortest_s = 1.0
    try:
        for number in range(10 * failures):  # an alarm after its step's end
            model.zero_grad(set_to_none=True)
            began_s = time.perf_counter()
            _step(model, offloader, x)
            shortest_s = min(shortest_s, time.perf_counter() - began_s)
            assert_same_gradients(gradients(model), expected)
            assert offloader.statistics().live_records == 0
            if failed == failures:
                break
            model.zero_grad(set_to_none=True)
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-5, shortest_s))
            try:
                rings = True
                _step(model, offloader, x)
                rings = False
            except KINDS as error:
                rings = False
                failed += 1
                error.__traceback__ = None
                if offloader._forwards.stack:  # it rang just as the exit was called, in the known gap
                    offloader.__exit__(None, None, None)
            signal.setitimer(signal.ITIMER_REAL, 0)
            model.zero_grad(set_to_none=True)
            forget_failed_backward()
            with contextlib.suppress(*KINDS):  # an alarm in a finalizer, as the last call of the step
                offloader.store.speak()
            assert not offloader.store.shared.lock.owned(), f"alarm {number}"
            run_in_threads(offloader.synchronize)
            live = offloader.statistics().live_records
            assert offloader.store.shared.interrupted or live == 0, f"alarm {number} left {live} records"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    offloader.close()
    return failed


def test_an_alarm_at_a_random_moment_fails_its_step_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    thorough = bool(request.config.getoption("thorough"))
    for seed in range(3 if thorough else 1):
        failures = 200 if thorough else 24
        assert _at_random_places(failures, seed, tmp_path) == failures


def _backward_and_wait(loss: Tensor) -> None:
    loss.backward()
    threading.Event().wait(10)  # where backward ended before the signal came


def _send_from_a_thread() -> None:
    """A signal that comes while a kernel runs."""
    threading.Timer(0.0005, os.kill, (os.getpid(), signal.SIGINT)).start()
