"""In-place changes of saved tensors: autograd's own check is off under hooks, so ours raises exactly when its would."""

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
from tests.inplace_programs import PROGRAMS, RAISING

BIG = (256, 128)  # 128 KiB
WORDS = "one of the variables needed for gradient computation has been modified by an inplace operation"
KIB = 1 << 10
BODY = 120 * KIB
"""What of a tensor of `BIG` goes to disk at least: the edges around its aligned body stay in its record."""


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


def test_a_tensor_on_disk(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    x = _leaf(*BIG)
    with offloader:
        y = x * 2
        loss = y.exp().sum() + (y * y).sum()
    offloader.synchronize()
    assert offloader.statistics().nvme_written_bytes >= BODY
    y.add_(1)
    _assert_raises_like_autograd(loss, BIG, 1, 0)
    del loss, y
    assert_empty(offloader)


@pytest.mark.parametrize("started", [False, True])
def test_a_tensor_whose_write_is_under_way(make_offloader: MakeOffloader, started: bool) -> None:
    offloader = make_offloader(engine=partial(GateEngine, threads=1))
    x = _leaf(*BIG)
    with offloader:
        y = x * 2
        loss = (y * y).sum()
    if started:
        only_engine(offloader).release()
    y.mul_(3)
    _assert_raises_like_autograd(loss, BIG, 1, 0)
    only_engine(offloader).open()
    del loss, y
    assert_empty(offloader)


def test_a_tensor_that_is_forwarded_once_and_changed_then(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=partial(GateEngine, threads=1))
    x = _leaf(*BIG)
    with offloader:
        y = x * 2
        loss = (y * y).sum()
    loss.backward(retain_graph=True)
    assert offloader.statistics().forwarded_bytes >= 128 * KIB
    assert same_bits(x.grad, 8 * x)
    y.zero_()
    _assert_raises_like_autograd(loss, BIG, 1, 0)


def test_a_tensor_that_was_read_back_once_and_changed_then(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    x = _leaf(*BIG)
    with offloader:
        y = x * 2
        loss = (y * y).sum()
    offloader.synchronize()
    loss.backward(retain_graph=True)
    assert offloader.statistics().nvme_read_bytes >= BODY
    y.zero_()
    _assert_raises_like_autograd(loss, BIG, 1, 0)


@pytest.mark.parametrize("way", ["keep()", "no_offload()", "min_bytes", "policy"])
def test_a_tensor_that_is_kept(make_offloader: MakeOffloader, way: str) -> None:
    class KeepAll:
        def decide(self, facts: Any) -> actoffload.policy.Decision:
            return actoffload.policy.Decision.KEEP

    ways: dict[str, dict[str, Any]] = {"min_bytes": {"min_bytes": "1MiB"}, "policy": {"policy": KeepAll()}}
    options = ways.get(way, {})
    offloader = make_offloader(**options)
    region = actoffload.no_offload() if way == "no_offload()" else contextlib.nullcontext()
    x = _leaf(*BIG)
    with offloader:
        y = x * 2
        if way == "keep()":
            actoffload.keep(y)
        with region:
            loss = (y * y).sum()
    reason = "below min_bytes" if way == "min_bytes" else way
    assert offloader.statistics().kept_bytes[reason] >= 128 * KIB
    y.add_(1)
    _assert_raises_like_autograd(loss, BIG, 1, 0)


@pytest.mark.parametrize("with_model", [False, True])
def test_a_parameter_that_an_optimizer_changed(make_offloader: MakeOffloader, with_model: bool) -> None:
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


def test_a_tensor_restored_from_disk_may_be_changed_by_its_reader(make_offloader: MakeOffloader) -> None:
    """Reading gives a view with a version of its own: what a reader does to it is not autograd's business."""
    offloader = make_offloader()
    x = _leaf(*BIG)
    with offloader:
        y = x.exp()
    offloader.synchronize()
    node: Any = y.grad_fn
    first = node._saved_result
    assert same_bits(first, y)
    y.sum().backward()
    assert same_bits(x.grad, y)


# -- whenever plain PyTorch raises we raise, and nowhere else ---------------------------------------------------------


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


def test_the_programs_are_all_there() -> None:
    assert len(PROGRAMS) == 30
    assert set(PROGRAMS) >= RAISING


@pytest.mark.parametrize("settle", [True, False])
@pytest.mark.parametrize("options", [{}, {"min_bytes": "1MiB"}, {"device_budget": "64KiB"}], ids=str)
@pytest.mark.parametrize("rows", [64, 256])
def test_we_raise_exactly_when_plain_pytorch_raises(
    make_offloader: MakeOffloader, options: dict[str, Any], rows: int, settle: bool
) -> None:
    offloader = make_offloader(**options)
    for name, program in PROGRAMS.items():
        plain = _outcome(program, rows, None, settle)
        ours = _outcome(program, rows, offloader, settle)
        if isinstance(plain, RuntimeError):
            assert name in RAISING
            assert WORDS in str(plain)
            assert type(ours) is SavedTensorModifiedError, f"{name} did not raise"
            assert WORDS in str(ours)
        else:
            assert name not in RAISING, f"plain PyTorch let {name} pass"
            assert isinstance(ours, Tensor), f"{name} raised {ours!r}"
            assert same_bits(ours, plain), f"{name}: another gradient"
        if isinstance(ours, RuntimeError):
            flush_autograd()
        del plain, ours
        assert_empty(offloader)
    statistics = offloader.statistics()
    if "min_bytes" not in options:
        assert statistics.nvme_written_bytes > 0
        if settle:
            assert statistics.nvme_read_bytes > 0


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
    for stale in (first, same):  # ... and the earlier one is known to be gone
        with pytest.raises(SavedTensorModifiedError):
            stale.sum().backward()


def test_a_reused_address_is_another_storage(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    x = _leaf(*BIG)
    graphs: list[Tensor] = []
    addresses: list[int] = []
    with offloader:
        for factor in range(1, 513):
            y = x * factor
            addresses.append(y.data_ptr())
            graphs.append(y.exp().sum() if factor % 2 else (y * y).sum())
            del y
            offloader.synchronize()
            if factor >= 32 and len(set(addresses)) < factor:
                break
    count = len(graphs)
    assert len(set(addresses)) < count  # the allocator did use an address again
    assert offloader.statistics().live_records == count
    assert offloader.statistics().deduplicated_bytes <= count * 128 * KIB  # y * y saves one storage twice
    for factor, graph in enumerate(graphs, start=1):
        plain = _leaf(*BIG)
        z = plain * factor
        (z.exp().sum() if factor % 2 else (z * z).sum()).backward()
        x.grad = None
        graph.backward()
        assert same_bits(x.grad, plain.grad)
