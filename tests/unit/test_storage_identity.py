"""Which saved tensors share one storage's record, and which changes in place are an error."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import actoffload
from actoffload import Offloader
from actoffload.errors import SavedTensorModifiedError
from actoffload.testing.faults import GateEngine
from tests.harness import (
    WAIT_S,
    MakeOffloader,
    assert_empty,
    flush_autograd,
    forget_failed_backward,
    only_engine,
    same_bits,
    wait_until,
)
from tests.inplace_programs import PROGRAMS
from tests.unit.saved_tensors import in_python
from tests.unit.saving import take_gradient, weight

BIG = (256, 128)  # 128 KiB
KIB = 1 << 10


def _leaf(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_versions_are_part_of_the_identity(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    x = _leaf(*BIG)
    with offloader:
        y = x * 2
        first = y.cos()
        same = y.sin()
        assert offloader.statistics().live_records == 1
        y.add_(1)
        second = y.cos()
        assert offloader.statistics().live_records == 2
    assert offloader.statistics().deduplicated_bytes == 128 * KIB
    offloader.synchronize()
    second.sum().backward(retain_graph=True)  # the later version alone is right ...
    assert x.grad is not None
    plain = _leaf(*BIG)
    (plain * 2).add(1).cos().sum().backward()
    assert same_bits(x.grad, plain.grad)
    for stale in (first, same):  # ... and the earlier one raises
        with pytest.raises(SavedTensorModifiedError):
            stale.sum().backward()


class _At(torch.autograd.Function):
    """A product in memory of the caller's, as at an address that an allocator uses again: always a new storage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int, memory: bytearray) -> Tensor:
        ctx.factor = factor
        y = torch.frombuffer(memory, dtype=x.dtype).view_as(x)
        return y.copy_(x * factor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None, None


def test_a_reused_address_is_another_storage(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    x, count = _leaf(*BIG), 32
    memory = bytearray(x.nbytes)
    graphs: list[Tensor] = []
    addresses: set[int] = set()
    with offloader:
        for factor in range(1, count + 1):
            y = _At.apply(x, factor, memory)
            addresses.add(y.data_ptr())
            graphs.append(y.exp().sum() if factor % 2 else (y * y).sum())
            del y
            offloader.synchronize()
    assert len(addresses) == 1
    assert offloader.statistics().live_records == count
    assert offloader.statistics().deduplicated_bytes <= count * 128 * KIB  # y * y saves one storage twice
    for factor, graph in enumerate(graphs, start=1):
        plain = _leaf(*BIG)
        z = plain * factor
        (z.exp().sum() if factor % 2 else (z * z).sum()).backward()
        x.grad = None
        graph.backward()
        assert same_bits(x.grad, plain.grad)


RECORD_BYTES = 64 * 64 * 4


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_the_result_of_a_collective_is_waited_for_before_it_is_saved(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective writes raw memory when it ends; a copy made before that has the bytes from before."""
    import torch.distributed._functional_collectives as collectives

    def run(offloader: Offloader | None) -> Tensor:
        w, received, wire = weight(), [torch.zeros(512, 64)], weight(512).detach()

        def wait(tensor: Tensor) -> Tensor:  # like NCCL's output: no version changes
            if offloader is not None:
                offloader.synchronize()  # the disk is faster than the wire
            if received:
                ctypes.memmove(received[0].data_ptr(), wire.data_ptr(), wire.nbytes)
            return tensor

        monkeypatch.setattr(collectives, "wait_tensor", wait)
        with offloader or contextlib.nullcontext():
            loss = torch.mm(collectives.AsyncCollectiveTensor(received[0]), w).sum()
        received.clear()
        if offloader is not None:
            offloader.synchronize()
        loss.backward()
        return take_gradient(w)

    offloader = make_offloader()
    assert same_bits(run(offloader), run(None))
    assert offloader.statistics().nvme_read_bytes > 0


def test_two_threads_save_one_storage_under_a_budget(make_offloader: MakeOffloader) -> None:
    """A thread that waits for room owns its record already: another finds it, drops it, and it lives on."""
    offloader = make_offloader(engine=GateEngine, device_budget=2 * RECORD_BYTES)
    gate = only_engine(offloader)
    w = weight()
    h = w * 1.0
    h.sin().sum().backward(retain_graph=True)
    expected = take_gradient(w)
    blocked: list[Tensor] = []

    def save_and_run() -> None:
        with offloader:
            blocked.append((w.detach().requires_grad_() * 2.0).sin())
            loss = h.sin().sum()  # waits for room while the gate is shut
        loss.backward(retain_graph=True)

    def save_and_drop() -> None:
        with offloader:
            assert h.cos().sum().requires_grad

    threads = [threading.Thread(target=work, daemon=True) for work in (save_and_run, save_and_drop)]
    threads[0].start()
    wait_until(lambda: offloader.statistics().packed_tensors == 2)
    threads[1].start()
    time.sleep(0.05)
    gate.open()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert same_bits(take_gradient(w), expected)
    blocked.clear()


def test_an_interrupt_in_the_comparison_of_counters_leaves_the_version(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed version would raise autograd's error in a graph that the library does not know."""
    x = _leaf(*BIG)
    y = x * 2
    plain = y.square()
    set_version = torch._C._autograd._unsafe_set_version_counter

    def interrupted(*arguments: Any) -> None:
        monkeypatch.undo()
        set_version(*arguments)
        raise KeyboardInterrupt  # CPython checks for signals as a call of C returns

    offloader = make_offloader()
    with offloader, in_python():  # the compiled comparison cannot be interrupted
        saved = y.cos()
        monkeypatch.setattr(torch._C._autograd, "_unsafe_set_version_counter", interrupted)
        with pytest.raises(KeyboardInterrupt):
            y.sin()
    del saved
    plain.sum().backward()
    assert x.grad is not None
    assert same_bits(x.grad, 8 * x.detach())


# -- changes in place --------------------------------------------------------------------------------------------------


WORDS = "one of the variables needed for gradient computation has been modified by an inplace operation"
BODY = 120 * KIB
"""The least bytes of a tensor of `BIG` that go to disk: the edges around its aligned body stay in its record."""


def _assert_raises_like_autograd(loss: Tensor, shape: tuple[int, ...], now: int, then: int) -> None:
    with pytest.raises(RuntimeError, match=WORDS) as caught:
        loss.backward()
    assert type(caught.value) is SavedTensorModifiedError
    text = str(caught.value)
    assert f"tensor {list(shape)}]" in text
    assert f"is at version {now}; expected version {then} instead" in text
    assert "set_detect_anomaly(True)" in text
    del caught, loss
    forget_failed_backward()


@pytest.mark.parametrize("where", ["on disk", "queued", "being written", "forwarded", "handed out"])
def test_a_change_is_an_error_wherever_the_tensor_is(make_offloader: MakeOffloader, where: str) -> None:
    offloader = make_offloader(engine=partial(GateEngine, threads=1))
    gate = only_engine(offloader)
    x = _leaf(*BIG)
    with offloader:
        y = x * 2
        loss = (y * y).sum()
    if where == "being written":
        gate.release()
    elif where in ("on disk", "handed out"):
        gate.open()
        offloader.synchronize()
        assert offloader.statistics().nvme_written_bytes >= BODY
    if where in ("forwarded", "handed out"):
        loss.backward(retain_graph=True)
        assert same_bits(x.grad, 8 * x)
        statistics = offloader.statistics()
        assert (statistics.forwarded_bytes > 0) == (where == "forwarded")
        assert statistics.nvme_read_bytes == 0, "y is alive"
    y.add_(1)
    _assert_raises_like_autograd(loss, BIG, 1, 0)
    gate.open()
    del loss, y
    assert_empty(offloader)


@pytest.mark.parametrize("way", ["keep()", "min_bytes", "policy"])
def test_a_change_of_a_kept_tensor_is_an_error(make_offloader: MakeOffloader, way: str) -> None:
    ways: dict[str, dict[str, Any]] = {"min_bytes": {"min_bytes": "1MiB"}, "policy": {"policy": "keep"}}
    offloader = make_offloader(**ways.get(way, {}))
    x = _leaf(*BIG)
    with offloader:
        y = x * 2
        if way == "keep()":
            actoffload.keep(y)
        loss = (y * y).sum()
    reason = "below min_bytes" if way == "min_bytes" else way
    assert offloader.statistics().kept_bytes[reason] >= 128 * KIB
    y.add_(1)
    _assert_raises_like_autograd(loss, BIG, 1, 0)


@pytest.mark.parametrize("with_model", [False, True])
def test_a_parameter_that_an_optimizer_changed_is_an_error(make_offloader: MakeOffloader, with_model: bool) -> None:
    offloader = make_offloader()
    model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128))
    if with_model:
        offloader.use(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(256, 128)
    with offloader:
        first, second = model(x).sum(), model(x).sum()
    first.backward()
    before = model[2].weight._version
    optimizer.step()
    _assert_raises_like_autograd(second, (128, 128), before + 1, before)


def _outcome(program: Callable[[Tensor], Tensor], rows: int, offloader: Offloader | None, settle: bool) -> Any:
    x = _leaf(rows, 128)
    try:
        with offloader or contextlib.nullcontext():
            loss = program(x).sum()
        if offloader is not None and settle:
            offloader.synchronize()
        loss.backward()
    except RuntimeError as error:
        return error.with_traceback(None)  # which would hold the graph
    return x.grad


@pytest.mark.parametrize("settle", [True, False])
@pytest.mark.parametrize("options", [{}, {"min_bytes": "1MiB"}, {"device_budget": "64KiB"}], ids=str)
@pytest.mark.parametrize("rows", [64, 256])
def test_we_raise_exactly_when_plain_pytorch_raises(
    make_offloader: MakeOffloader, options: dict[str, Any], rows: int, settle: bool
) -> None:
    offloader = make_offloader(**options)
    raised = 0
    for name, program in PROGRAMS.items():
        plain = _outcome(program, rows, None, settle)
        ours = _outcome(program, rows, offloader, settle)
        if isinstance(plain, RuntimeError):
            raised += 1
            assert WORDS in str(plain)
            assert type(ours) is SavedTensorModifiedError, f"{name} did not raise"
            assert WORDS in str(ours)
            flush_autograd()
        else:
            assert isinstance(ours, Tensor), f"{name} raised {ours!r}"
            assert same_bits(ours, plain), f"{name}: another gradient"
        del plain, ours
        assert_empty(offloader)
    assert (raised, len(PROGRAMS) - raised) == (17, 6)
    statistics = offloader.statistics()
    if "min_bytes" not in options and settle:  # else backward may take all before any batch is full
        assert statistics.nvme_written_bytes > 0
        assert statistics.nvme_read_bytes > 0


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell])
def test_verify_reads_no_byte_that_another_view_may_change(make_offloader: MakeOffloader, cell: Any) -> None:
    """The gates of these cells are views of one storage, changed in place one by one after some of them are saved."""
    width, rows = 256, 128

    def train(context: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = cell(width, width)
        for _ in range(4):
            state: Any = None
            with context:
                for _ in range(3):
                    state = model(torch.randn(rows, width), state)
                loss = (state[0] if isinstance(state, tuple) else state).square().sum()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
        return [p.detach() for p in model.parameters()]

    offloader = make_offloader(verify=True)
    for found, expected in zip(train(offloader), train(contextlib.nullcontext()), strict=True):
        assert same_bits(found, expected)
    assert offloader.statistics().nvme_read_bytes > 0
