"""The graph owns what was saved: whatever way a graph ends, everything comes back, and nothing comes back too early."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import Offloader, native_hooks
from actoffload.handles import Handle, KeptActivation, Stayed
from actoffload.testing.faults import GateEngine
from tests.harness import (
    WAIT_S,
    Chain,
    MakeOffloader,
    assert_empty,
    assert_same_gradients,
    batch,
    bits,
    descriptors,
    no_garbage_collection,
    only_engine,
    pool_bytes,
    resident_set_bytes,
    same_bits,
    spool_statistics,
    train_step,
)

KIB = 1 << 10
MIB = 1 << 20
WAITED_FOR = 1
"""Every other step of those that drop their graph waits until all is written."""


class _ForwardFailedError(Exception):
    pass


def _fail_in_forward(offloader: Offloader, model: Chain, x: Tensor) -> None:
    def fail_late() -> None:
        with offloader:
            y = model(x)
            assert y.requires_grad
            raise _ForwardFailedError

    with pytest.raises(_ForwardFailedError):
        fail_late()


def _drop_after_forward(offloader: Offloader, model: Chain, x: Tensor, step: int) -> None:
    with offloader:
        loss = model(x).sum()
    if step % 2 == WAITED_FOR:
        offloader.synchronize()
    del loss


def _return_the_branch_that_runs(offloader: Offloader, model: Chain, x: Tensor) -> None:
    with offloader:
        unused, used = model(x), model(x)
    used.sum().backward()
    del unused


def test_three_hundred_steps_of_which_most_never_run_backward_leave_nothing(make_offloader: MakeOffloader) -> None:
    model, x = Chain(depth=2), batch(512)
    expected = train_step(model, x)
    alone = make_offloader()
    _drop_after_forward(alone, model, x, WAITED_FOR)
    written_in_a_step = alone.statistics().nvme_written_bytes
    assert written_in_a_step > MIB // 2
    offloader = make_offloader()
    waited_for = 0
    resident: list[int] = []
    open_files: list[int] = []
    with no_garbage_collection():
        for step in range(300):
            if step % 3 == 0:
                assert_same_gradients(train_step(model, x, offloader), expected)
            elif step % 6 == 1:
                _fail_in_forward(offloader, model, x)
            elif step % 12 == 2:
                _return_the_branch_that_runs(offloader, model, x)
                model.zero_grad(set_to_none=True)
            else:
                _drop_after_forward(offloader, model, x, step)
                waited_for += step % 2 == WAITED_FOR
            if step % 10 == 9:
                assert_empty(offloader)
                open_files.append(descriptors())
                resident.append(resident_set_bytes())
    statistics = offloader.statistics()
    assert statistics.steps == 300
    # What nobody waited for may be let go of before its write begins: how much of it was written is the disk's luck.
    # (Nine tenths: a page more or less of each tensor is written as it lies in memory.)
    assert statistics.nvme_written_bytes >= 0.9 * waited_for * written_in_a_step
    assert waited_for == 50
    assert statistics.degraded == {}
    assert len(set(open_files)) == 1
    # A step saves about 1 MiB: a leak of one step in ten would show.
    assert max(resident[-10:]) - max(resident[:10]) < 12 * MIB


def test_what_was_read_back_returns_too(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    model, x = Chain(), batch()
    expected = train_step(model, x)
    with no_garbage_collection():
        for _ in range(20):
            assert_same_gradients(train_step(model, x, offloader, between=offloader.synchronize), expected)
            assert_empty(offloader)
    statistics = offloader.statistics()
    assert statistics.nvme_read_bytes >= 20 * 4 * 128 * 64 * 4
    assert statistics.nvme_peak_bytes < 2 * statistics.nvme_written_bytes / 20


@pytest.fixture
def handle_counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many handles were made and how many have died; all of them in Python."""
    monkeypatch.setattr(native_hooks._Process, "module", None)
    monkeypatch.setattr(native_hooks._Process, "reason", "not in this test")
    counts = {"made": 0, "died": 0}
    for kind in (Handle, Stayed, KeptActivation):
        made, died = kind.__init__, kind.__del__

        def count_made(self: Any, *args: Any, _made: Any = made) -> None:
            counts["made"] += 1
            _made(self, *args)

        def count_died(self: Any, _died: Any = died) -> None:
            counts["died"] += 1
            _died(self)

        monkeypatch.setattr(kind, "__init__", count_made)
        monkeypatch.setattr(kind, "__del__", count_died)
    return counts


@pytest.mark.parametrize("min_bytes", [0, 10 * MIB])
def test_as_many_handles_die_as_were_made_without_the_collector(
    make_offloader: MakeOffloader, handle_counts: dict[str, int], min_bytes: int
) -> None:
    offloader = make_offloader(min_bytes=min_bytes)
    model, x = Chain(), batch()
    with no_garbage_collection():
        with offloader:
            loss = model(x).exp().sum()  # exp saves its own output: the classic cycle
        assert handle_counts["made"] >= 12
        assert handle_counts["died"] == 0
        del loss
        assert handle_counts["died"] == handle_counts["made"]
    assert_empty(offloader)


def test_backward_frees_handles_while_the_loss_lives(
    make_offloader: MakeOffloader, handle_counts: dict[str, int]
) -> None:
    offloader = make_offloader()
    model, x = Chain(), batch()
    with no_garbage_collection():
        with offloader:
            loss = model(x).sum()
        loss.backward()
        assert handle_counts["died"] == handle_counts["made"] > 0
        assert_empty(offloader)
        assert loss.grad_fn is not None


def test_a_saved_tensor_dies_with_its_graph_and_leaves_memory_before(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    x = torch.randn(256, 256, requires_grad=True)
    with no_garbage_collection(), offloader:
        y = x * 2
        seen = weakref.ref(y.untyped_storage())
        z = (y * y).sum()
        del y
        offloader.synchronize()
        assert offloader.core.accounts.resident_bytes < 256 * 256 * 4
        del seen
        z.backward()
    assert same_bits(x.grad, 8 * x)
    assert_empty(offloader)


def test_handles_dropped_in_other_threads(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    model, x = Chain(), batch()

    def drop_all(graphs: list[Tensor]) -> None:
        while graphs:
            graphs.pop()

    with no_garbage_collection():
        for _ in range(10):
            graphs: list[Tensor] = []
            with offloader:
                for _ in range(4):
                    graphs.append(model(x).sum())
            half = [graphs[:2], graphs[2:]]
            graphs.clear()
            threads = [threading.Thread(target=drop_all, args=(part,)) for part in half]
            for thread in threads:
                thread.start()
            train_step(model, x, offloader)  # packs and unpacks meanwhile
            for thread in threads:
                thread.join(WAIT_S)
                assert not thread.is_alive()
    assert_empty(offloader)


class _HandOn(torch.autograd.Function):
    """Hands its saved tensor on as the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x * 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        assert isinstance(saved, Tensor)
        return saved


def _churn(offloader: Offloader, steps: int = 6) -> None:
    model, x = Chain(width=96, depth=4), batch(256, 96)
    for _ in range(steps):
        train_step(model, x, offloader, between=offloader.synchronize)


@pytest.mark.parametrize("read_back", [True, False])
@pytest.mark.parametrize("rows", [16, 512])  # through aligned memory of its own, and straight from the tensor's
def test_a_saved_tensor_handed_on_as_the_gradient_is_never_overwritten(
    make_offloader: MakeOffloader, read_back: bool, rows: int
) -> None:
    offloader = make_offloader(debug=True, engine=GateEngine)
    x = torch.randn(rows, 64, requires_grad=True)
    with offloader:
        y = _HandOn.apply(x)
    if read_back:
        only_engine(offloader).open()
        offloader.synchronize()
    y.backward(torch.ones_like(y))
    del y
    assert x.grad is not None
    expected = bits(x.detach() * 3)
    assert offloader.statistics().live_records == 0
    assert (offloader.statistics().nvme_read_bytes > 0) == read_back
    only_engine(offloader).open()
    _churn(offloader)
    assert torch.equal(bits(x.grad), expected)
    assert (pool_bytes(offloader) > 0) == (read_back or rows == 16)  # its memory is still lent
    x.grad = None
    assert pool_bytes(offloader) == 0


def test_a_saved_tensor_that_the_user_keeps_outlives_graph_and_offloader(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(debug=True)
    x = torch.randn(300, 300, requires_grad=True)
    with offloader:
        y = x.exp()
    expected = bits(y)
    offloader.synchronize()
    node: Any = y.grad_fn
    kept = node._saved_result
    part = node._saved_result[100:200, ::3]
    expected_part = bits(part)
    y.sum().backward()
    del node, y
    assert offloader.statistics().nvme_read_bytes > 0
    _churn(offloader)
    assert torch.equal(bits(kept), expected)
    del kept
    _churn(offloader)
    assert torch.equal(bits(part), expected_part)
    offloader.close()
    assert torch.equal(bits(part), expected_part)
    assert pool_bytes(offloader) > 0
    del part
    assert pool_bytes(offloader) == 0


def test_the_last_tensor_may_die_in_another_thread(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    x = torch.randn(300, 300, requires_grad=True)
    with offloader:
        y = x.exp()
    offloader.synchronize()
    box = [y.grad_fn._saved_result.detach()]  # type: ignore[union-attr]
    del y
    assert offloader.statistics().live_records == 0
    assert pool_bytes(offloader) > 0
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join(WAIT_S)
    assert pool_bytes(offloader) == 0


def test_an_error_in_a_policy_leaves_no_record(make_offloader: MakeOffloader) -> None:
    class Failing:
        def decide(self, facts: Any) -> Any:
            raise _ForwardFailedError

    offloader = make_offloader(policy=Failing())
    x = torch.randn(64, 64, requires_grad=True)
    with no_garbage_collection():
        y = x * 2
        with pytest.raises(_ForwardFailedError), offloader:
            y.exp()
        assert_empty(offloader)
        with pytest.raises(_ForwardFailedError), offloader:
            y.exp()
        assert_empty(offloader)


def test_every_graph_order_of_death(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    model, x = Chain(depth=2), batch()
    expected = train_step(model, x)
    with no_garbage_collection():
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
            with offloader:
                losses = {number: model(x).square().sum() for number in range(3)}
            offloader.synchronize()
            for number in order:
                if number == 1:
                    losses.pop(number).backward()
                else:
                    del losses[number]
            found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            model.zero_grad(set_to_none=True)
            assert_same_gradients(found, expected)
            assert_empty(offloader)
    assert spool_statistics(offloader).peak_allocated_bytes > 0


def test_retained_graphs_are_read_again_and_freed_at_the_end(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    x = torch.randn(200, 200, requires_grad=True)
    plain = x.detach().clone().requires_grad_()
    (plain.exp().tanh() * plain.sin()).sum().backward()
    with offloader:
        loss = (x.exp().tanh() * x.sin()).sum()
    offloader.synchronize()
    reads = []
    for _ in range(3):
        loss.backward(retain_graph=True)
        assert same_bits(x.grad, plain.grad)
        x.grad = None
        reads.append(offloader.statistics().nvme_read_bytes)
        assert offloader.core.accounts.resident_bytes < 200 * 200 * 4  # not held between the passes
    assert 0 < reads[0] < reads[1] < reads[2]
    del loss
    assert_empty(offloader)
