"""Unpack returns a storage that is alive with its present contents, as without offloading.

Plain PyTorch holds a reference. Its owner may fill the storage again without a new version: through `.data`, through an
array that shares the memory, or in a kernel that writes by address.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from actoffload.tell import causes
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice
from tests.harness import (
    ADVERSARIES,
    Adversary,
    MakeOffloader,
    accounts_of,
    assert_empty,
    flush_autograd,
    hinder,
    same_bits,
    simulated,
    until_recorded,
    wait_until,
)
from tests.unit.saved_tensors import SavedTensor
from tests.unit.saving import Saved, activations

WIDTH = 64
NBYTES = 4 * WIDTH * WIDTH
LAYERS = 4
ALL: dict[str, Any] = {"policy": "all", "min_bytes": 1}


def _weights(number: int) -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(number)) / 8


# -- ways to fill a storage again --------------------------------------------------------------------------------------


def _by_data(buffer: Tensor, weights: Tensor) -> None:
    buffer.data.copy_(weights)


def _by_storage(buffer: Tensor, weights: Tensor) -> None:
    buffer.untyped_storage().copy_(weights.untyped_storage())


def _by_numpy(buffer: Tensor, weights: Tensor) -> None:
    buffer.data.numpy()[:] = weights.numpy()


def _by_address(buffer: Tensor, weights: Tensor) -> None:
    ctypes.memmove(buffer.data_ptr(), weights.data_ptr(), weights.nbytes)


def _freed_first(buffer: Tensor, weights: Tensor) -> None:
    buffer.untyped_storage().resize_(0)
    buffer.untyped_storage().resize_(NBYTES)
    buffer.data.copy_(weights)


def _counted(buffer: Tensor, weights: Tensor) -> None:
    with torch.no_grad():
        buffer.copy_(weights)


def _set(buffer: Tensor, weights: Tensor) -> None:
    with torch.no_grad():
        buffer.set_(weights.clone().untyped_storage(), 0, buffer.shape, buffer.stride())


Fill = Callable[[Tensor, Tensor], None]
UNSEEN: tuple[Fill, ...] = (_by_data, _by_storage, _by_numpy, _by_address, _freed_first)
SEEN: tuple[Fill, ...] = (_counted, _set)
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda buffer: buffer,
    "alias": lambda buffer: buffer.detach(),
    "transposed": lambda buffer: buffer.t(),
    "rows": lambda buffer: buffer[: WIDTH // 4].repeat(4, 1),
    "part": lambda buffer: F.pad(buffer[3:9, :8], (0, WIDTH - 8, 0, WIDTH - 6)),
}


class Program:
    """Layers whose frozen weights lie in a few buffers, filled for each layer and again before its backward.

    Args:
        buffers: the buffer of each layer.
        fill: how a buffer is filled.
        again: contents of each buffer before the layer's backward: its weights (0), or others; None: unchanged.
        view: the view that a layer takes of its buffer.
        backwards: how many of one graph.
    """

    def __init__(
        self, buffers: list[int], fill: Fill, again: list[int | None], view: str = "all", backwards: int = 1
    ) -> None:
        self.buffers, self.fill, self.again = buffers, fill, again
        self.view, self.backwards = VIEWS[view], backwards

    def run(self, context: Any, device: str = "cpu", settle: Callable[[], object] = int) -> list[Tensor] | RuntimeError:
        """The gradients, or the error that backward raises."""
        shared = [torch.zeros(WIDTH, WIDTH).to(device) for _ in range(max(self.buffers) + 1)]
        x = _weights(99).to(device).requires_grad_()
        lora = [_weights(50 + number).to(device).requires_grad_() for number in range(len(self.buffers))]
        with context:
            h = x
            for number, place in enumerate(self.buffers):
                buffer, again = shared[place], self.again[number]
                self.fill(buffer, _weights(number).to(device))
                y = F.linear(h, self.view(buffer))
                if again is not None:
                    y.register_hook(partial(self._refill, buffer, _weights(number + again).to(device)))
                h = torch.tanh(y + h @ lora[number] * 0.01)
            loss = h.square().mean()
        settle()
        try:
            for left in reversed(range(self.backwards)):
                loss.backward(retain_graph=left > 0)
        except RuntimeError as error:
            return error.with_traceback(None)
        return [leaf.grad.cpu() for leaf in (x, *lora) if leaf.grad is not None]

    def _refill(self, buffer: Tensor, weights: Tensor, gradient: Tensor) -> Tensor:
        self.fill(buffer, weights)
        return gradient


def _assert_same(found: list[Tensor] | RuntimeError, expected: list[Tensor] | RuntimeError) -> None:
    if isinstance(expected, RuntimeError):
        assert isinstance(found, RuntimeError)
        assert "modified by an inplace operation" in str(found)
        assert "modified by an inplace operation" in str(expected)
    else:
        assert isinstance(found, list), found
        assert all(map(same_bits, found, expected))


OPTIONS: list[dict[str, Any]] = [ALL, {**ALL, "engine": "memory"}, {**ALL, "verify": True}, {"policy": "keep"}, {}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.usefixtures("both_hooks")
def test_backward_reads_a_refilled_buffer_however_it_was_filled(
    make_offloader: MakeOffloader, options: dict[str, Any]
) -> None:
    offloader = make_offloader(**options)

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(
        buffers=st.lists(st.integers(0, 2), min_size=1, max_size=5),
        fill=st.sampled_from(UNSEEN + SEEN),
        again=st.lists(st.sampled_from([None, 0, 0, 0, 20]), min_size=5, max_size=5),
        view=st.sampled_from(sorted(VIEWS)),
        backwards=st.integers(1, 3),
        settled=st.booleans(),
    )
    def check(
        buffers: list[int], fill: Fill, again: list[int | None], view: str, backwards: int, settled: bool
    ) -> None:
        program = Program(buffers, fill, again, view, backwards)
        expected = program.run(contextlib.nullcontext())
        found = program.run(offloader, settle=offloader.synchronize if settled else int)
        _assert_same(found, expected)
        if isinstance(found, RuntimeError):
            flush_autograd()

    check()


@pytest.mark.simulated
@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("target", ["host", "nvme"])
def test_a_buffer_of_a_device_that_is_filled_again(device: SimulatedDevice, target: str, adversary: Adversary) -> None:
    """Copies under way, or made, are of an earlier filling, and backward must not read them."""
    accelerator = SimulatedAccelerator()
    hinder(device, accelerator, adversary)
    with simulated(accelerator, target=target, **ALL) as offloader:
        for fill in (_by_data, _by_storage):
            for backwards, settled in ((1, True), (1, False), (2, True)):
                program = Program([0, 0, 1, 0], fill, [0, 0, 20, 0], backwards=backwards)
                expected = program.run(contextlib.nullcontext(), NAME)
                found = program.run(offloader, NAME, offloader.synchronize if settled else int)
                _assert_same(found, expected)
        assert offloader.statistics().host_written_bytes > 0


@pytest.mark.parametrize(
    ("target", "where"),
    [("nvme", "cpu"), *(pytest.param(target, NAME, marks=pytest.mark.simulated) for target in ("host", "nvme"))],
)
def test_memory_that_is_freed_is_read_from_its_copy_until_it_is_filled_again(
    make_offloader: MakeOffloader, target: str, where: str
) -> None:
    """The owner knows of no copy and frees after it. Bytes that were read ahead do not replace the new contents."""
    offloader = make_offloader(target=target, **ALL)
    for ahead, taken in ((False, True), (True, True), (True, False)):
        tensor, other = _weights(1).to(where), _weights(2).to(where)
        with offloader:
            saved = [SavedTensor(tensor), SavedTensor(other)]
        offloader.synchronize()
        if where == NAME:
            torch.accelerator.synchronize()
        tensor.untyped_storage().resize_(0)
        if ahead:
            assert same_bits(saved[1].unpack().cpu(), _weights(2)), "its unpack fills the window"
        if taken:
            assert same_bits(saved[0].unpack().cpu(), _weights(1))
        tensor.untyped_storage().resize_(NBYTES)
        tensor.data.copy_(_weights(3).to(where))
        assert same_bits(saved[0].unpack().cpu(), _weights(3))
        del saved
        assert offloader.statistics().live_records == 0


# -- a storage that the program holds does not leave -------------------------------------------------------------------


def _chain(x: Tensor, held: list[Tensor]) -> Tensor:
    for _ in range(LAYERS):
        x = (x * 1.0).sin()
        held.append(x)
        x = x.exp()
    return x.sum()


def _input() -> Tensor:
    return torch.zeros(WIDTH, WIDTH, requires_grad=True)


def test_a_storage_that_the_program_holds_is_not_read_back_and_stays_resident(make_offloader: MakeOffloader) -> None:
    """The program holds the outputs of `sin`, but neither its inputs nor the outputs of `exp`."""
    offloader, held = make_offloader(**ALL), list[Tensor]()
    x = _input()
    with offloader:
        loss = _chain(x, held)
    offloader.synchronize()
    assert accounts_of(offloader).resident_bytes == 0, "exp saves its result, which the program does not hold"
    loss.backward()
    assert offloader.statistics().nvme_read_bytes > 0

    offloader, held = make_offloader(**ALL), []
    with offloader:
        y = x * 1.0
        held = [y]
        for _ in range(LAYERS):
            held.append(held[-1].sin())
        loss = held[-1].sum()
    offloader.synchronize()
    assert accounts_of(offloader).resident_bytes == LAYERS * NBYTES
    loss.backward()
    statistics = offloader.statistics()
    assert statistics.nvme_read_bytes == 0
    assert statistics.kept_bytes["held elsewhere"] == LAYERS * NBYTES
    assert statistics.moved_bytes < NBYTES * LAYERS / 2, "no more than the padding of writes"
    assert statistics.resident_peak_bytes == statistics.baseline_peak_bytes == LAYERS * NBYTES
    assert "held elsewhere" in str(offloader.report())
    del y, loss
    held.clear()
    assert_empty(offloader)


@pytest.mark.simulated
def test_copies_of_other_parts_of_a_storage_do_not_hold_it_elsewhere(device: SimulatedDevice) -> None:
    """All parts are being copied to the host as backward takes the originals."""
    x = torch.randn(768, 64).to(NAME).requires_grad_()
    with simulated(policy="auto") as offloader:

        def step() -> None:
            with offloader:
                one, two, three = (x * 2.0).chunk(3, 0)
                loss = (one * two * three).sum()
                del one, two, three
            loss.backward()

        until_recorded(offloader, step)
        assert offloader.profile is not None
        assert "held elsewhere" not in {storage.kept for storage in offloader.profile.storages}


def test_a_forwards_own_variables_do_not_count(make_offloader: MakeOffloader) -> None:
    """The variables hold tensors during their writes, and are gone when the forward has ended."""
    offloader = make_offloader(**ALL, engine="memory")
    x = _input()

    def forward() -> Tensor:
        h = x * 1.0
        for _ in range(LAYERS):
            kept = h.sin()
            wait_until(lambda: accounts_of(offloader).resident_bytes == 0)
            h = kept
        return h.sum()

    with offloader:
        loss = forward()
    assert offloader.statistics().resident_peak_bytes == NBYTES
    loss.backward()
    assert "held elsewhere" not in offloader.statistics().kept_bytes


def test_the_rest_of_its_batch_comes_back_without_it(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(**ALL)
    tensors = activations(8, 128 << 10)
    saved = Saved(offloader, tensors)
    offloader.synchronize()
    held = tensors[0]
    tensors.clear()
    saved.check_rest()
    read = offloader.statistics().nvme_read_bytes
    assert 7 * held.nbytes - (64 << 10) < read < 7.5 * held.nbytes
    assert offloader.statistics().kept_bytes == {"held elsewhere": held.nbytes}
    assert_empty(offloader)


def test_a_second_backward_of_a_storage_that_died_meanwhile_reads_the_copy(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(**ALL)
    tensor = (_weights(1).requires_grad_() * 1.0).detach()
    expected = tensor.clone()
    with offloader:
        saved = SavedTensor(tensor)
    offloader.synchronize()
    first = saved.unpack()
    assert first.data_ptr() == tensor.data_ptr()
    assert offloader.statistics().nvme_read_bytes == 0
    del tensor, first
    assert same_bits(saved.unpack(), expected)
    assert offloader.statistics().nvme_read_bytes > 0
    del saved
    assert_empty(offloader)


@pytest.mark.parametrize("fill", UNSEEN)
def test_an_unseen_change_of_a_storage_that_dies_has_no_part_in_backward(
    make_offloader: MakeOffloader, fill: Fill
) -> None:
    """A known gap, and its bound: plain PyTorch would read the last contents; we restore the first saved ones."""
    offloader = make_offloader(**ALL)
    buffer = _weights(1)
    with offloader:
        first = SavedTensor(buffer)
        offloader.synchronize()
        fill(buffer, _weights(2))
        second = SavedTensor(buffer)
    offloader.synchronize()
    moved = offloader.statistics().live_records == 2  # freed, it has come to another address, which the library sees
    assert not moved or fill is _freed_first
    del buffer
    assert same_bits(first.unpack(), _weights(1))
    assert same_bits(second.unpack(), _weights(2 if moved else 1))


def test_a_plan_does_not_move_a_storage_that_the_program_holds(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward hooks hold features: moving them frees nothing, so the plan keeps them and the report has the reason."""
    monkeypatch.setattr(causes, "LEAST_GAIN_BYTES", 0)
    offloader = make_offloader(policy="auto", min_bytes=1, engine="memory")
    features: list[Tensor] = []
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
    for block in model:
        block.get_submodule("1").register_forward_hook(lambda module, inputs, output: features.append(output.detach()))
    offloader.use(model)
    for _ in range(4):
        with offloader:
            loss = model(torch.randn(WIDTH, WIDTH)).sum()
        loss.backward()
        features.clear()
        del loss
    profile = offloader.profile
    assert profile is not None
    assert [one.kept for one in profile.storages] == ["held elsewhere"] * LAYERS
    assert all(entry.action == "keep" for entry in offloader.plan.entries)
    assert "held by the program" in str(offloader.report())
