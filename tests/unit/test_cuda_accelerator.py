"""What the driver of CUDA devices does without one."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actoffload.tiers import accelerator

GLOBAL, RELAXED = 0, 2
"""Modes of capture as the CUDA runtime numbers them."""


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """This thread's capture mode, as the runtime would keep it."""
    kept = [GLOBAL]

    def exchange(pointer: Any) -> int:
        kept[0], pointer._obj.value = pointer._obj.value, kept[0]
        return 0

    monkeypatch.setattr(accelerator, "capture_mode_exchange", lambda: exchange)
    return kept


def test_asking_for_a_copy_does_not_end_a_capture(mode: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA lets no thread ask for an event while another captures, unless its own mode is relaxed."""
    seen = []

    def asked(self: object, event: object) -> bool:
        seen.append(mode[0])
        return len(seen) == 3

    monkeypatch.setattr(accelerator.Accelerator, "done", asked)
    accelerator.CudaAccelerator().synchronize(None)
    assert seen == [RELAXED] * 3
    assert mode == [GLOBAL]


def test_timing_a_copy_does_not_end_a_capture(mode: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch queries both events before it asks for the time between them."""
    seen = []
    monkeypatch.setattr(accelerator.Accelerator, "seconds_between", lambda *_: seen.append(mode[0]))
    accelerator.CudaAccelerator().seconds_between(None, None)
    assert seen == [RELAXED]
    assert mode == [GLOBAL]


def test_one_call_of_the_library_changes_the_mode_once(mode: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, exchanged, seen = accelerator.capture_mode_exchange(), [], []

    def counted(pointer: Any) -> int:
        exchanged.append(pointer)
        return int(exchange(pointer)) if exchange is not None else 1

    monkeypatch.setattr(accelerator, "capture_mode_exchange", lambda: counted)
    monkeypatch.setattr(accelerator.Accelerator, "done", lambda *_: seen.append(mode[0]))
    device = accelerator.CudaAccelerator()
    with device.hook:
        device.done(None)
        with device.hook:
            device.done(None)
        device.done(None)
    assert seen == [RELAXED] * 3
    assert len(exchanged) == 2
    assert mode == [GLOBAL]


def test_a_capture_is_looked_for_once_in_each_call_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked = accelerator.Accelerator("cuda"), []

    def no(index: int) -> bool:
        asked.append(index)
        return False

    monkeypatch.setattr(device, "is_capturing", no)
    for _ in range(2):
        with device.hook:
            assert not any(device.capturing(index) for index in (0, 1, 0, 1))
    assert asked == [0, 1, 0, 1]
    assert not device.capturing(0)
    assert asked == [0, 1, 0, 1, 0]


def test_no_capture_is_looked_for_on_the_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA captures none there, and asking makes a context."""
    device, asked, stream = accelerator.CudaAccelerator(), [], SimpleNamespace(stream_id=0)
    monkeypatch.setattr(device, "current_stream", lambda index: stream)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)

    def yes() -> bool:
        asked.append(0)
        return True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", yes)
    assert not device.capturing(0)
    assert asked == []
    stream.stream_id = 32
    assert device.capturing(0)
    assert asked == [0]


def test_what_a_graph_of_compile_fills_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's graph trees answer: their node is asked, where there is one."""
    device, tensor, other = accelerator.CudaAccelerator(), torch.ones(1), torch.ones(1)
    manager = SimpleNamespace(current_node=None)
    trees = SimpleNamespace(get_manager=lambda index, create_if_none_exists: manager)
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    assert not device.is_of_a_graph(tensor)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    assert not device.is_of_a_graph(tensor)
    manager.current_node = SimpleNamespace(_is_cuda_graph_recorded_tensor=lambda one: one is tensor)
    assert device.is_of_a_graph(tensor)
    assert not device.is_of_a_graph(other)


def test_the_installed_trees_are_as_they_are_asked() -> None:
    trees: Any = pytest.importorskip("torch._inductor.cudagraph_trees")
    assert "create_if_none_exists" in inspect.signature(trees.get_manager).parameters
    for node in (trees.CUDAGraphNode, trees.CUDAWarmupNode):
        assert list(inspect.signature(node._is_cuda_graph_recorded_tensor).parameters) == ["self", "t"]


def test_a_mode_that_the_runtime_refuses_to_change_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def exchange(pointer: Any) -> int:
        asked.append(pointer)
        return 1

    monkeypatch.setattr(accelerator, "capture_mode_exchange", lambda: exchange)
    monkeypatch.setattr(accelerator.Accelerator, "done", lambda self, event: True)
    assert accelerator.CudaAccelerator().done(None)
    assert len(asked) == 1


def test_page_locking_does_not_end_a_capture(mode: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def called(*arguments: object) -> int:
        seen.append(mode[0])
        return 0

    runtime = SimpleNamespace(cudaHostRegister=called, cudaHostUnregister=called)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    device = accelerator.CudaAccelerator()
    assert device.pin(0, 1)
    assert device.unpin(0)
    assert seen == [RELAXED] * 2
    assert mode == [GLOBAL]
