"""In-place changes of saved tensors: hooks switch autograd's own check off, so ours raises exactly when it would."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actoffload
from actoffload import Offloader
from actoffload.errors import SavedTensorModifiedError
from actoffload.testing.faults import GateEngine
from tests.harness import MakeOffloader, assert_empty, flush_autograd, forget_failed_backward, only_engine, same_bits
from tests.inplace_programs import PROGRAMS

BIG = (256, 128)  # 128 KiB
WORDS = "one of the variables needed for gradient computation has been modified by an inplace operation"
KIB = 1 << 10
BODY = 120 * KIB
"""The least bytes of a tensor of `BIG` that go to disk: the edges around its aligned body stay in its record."""


def _leaf(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


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
    if "min_bytes" not in options:
        assert statistics.nvme_written_bytes > 0
        assert statistics.nvme_read_bytes > 0 or not settle


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
