"""The driver of CUDA devices, on a machine without one."""

from __future__ import annotations

import ast
import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actoffload.memory import numa
from actoffload.tiers import accelerator

GLOBAL, RELAXED = 0, 2
"""Modes of capture as the CUDA runtime numbers them."""


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """This thread's capture modes so far, the last of which the runtime would keep."""
    modes = [GLOBAL]

    def exchange(pointer: Any) -> int:
        modes.append(pointer._obj.value)
        pointer._obj.value = modes[-2]
        return 0

    monkeypatch.setattr(accelerator, "capture_mode_exchange", lambda: exchange)
    return modes


def test_no_call_ends_a_capture(mode: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA lets no thread query an event while another captures, unless the querying thread's mode is relaxed.

    PyTorch queries both events before it reads the time between them. To page-lock memory is no different.
    """
    seen = []

    def answers(value: Any) -> Any:
        def called(*_: object) -> Any:
            seen.append(mode[-1])
            return value

        return called

    runtime = SimpleNamespace(cudaHostRegister=answers(0), cudaHostUnregister=answers(0))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(accelerator.Accelerator, "done", answers(True))
    monkeypatch.setattr(accelerator.Accelerator, "seconds_between", answers(0.5))
    device = accelerator.CudaAccelerator()
    assert device.done(None)
    device.synchronize(None)
    assert device.seconds_between(None, None) == 0.5
    assert device.pin(0, 1)
    assert device.unpin(0)
    assert seen == [RELAXED] * 5
    assert mode[-1] == GLOBAL


def test_one_call_of_the_library_changes_the_mode_once(mode: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(accelerator.Accelerator, "done", lambda *_: seen.append(mode[-1]))
    device = accelerator.CudaAccelerator()
    with device.hook:
        device.done(None)
        with device.hook:
            device.done(None)
        device.done(None)
    assert seen == [RELAXED] * 3
    assert mode == [GLOBAL, RELAXED, GLOBAL]


def test_one_query_for_a_capture_in_each_call_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_wait_of_the_host_neither_polls_nor_spins(mode: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The host blocks on a CUDA event of its own, recorded after the awaited one, with the capture mode relaxed."""
    calls: list[tuple[object, ...]] = []
    side, index = SimpleNamespace(stream_id=7, device_index=1, device_type=1), 1

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking

        def record(self, stream: object) -> None:
            calls.append(("record", stream, mode[-1]))

        def synchronize(self) -> None:
            calls.append(("synchronize", mode[-1]))

    device = accelerator.CudaAccelerator()
    asked: list[object] = []

    def done(self: object, event: object) -> bool:
        asked.append(event)
        return False

    def side_stream(*place: object) -> object:
        calls.append(place)
        return side

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda **place: tuple(place.values()))
    monkeypatch.setattr(accelerator.Accelerator, "done", done)
    monkeypatch.setattr(device, "side_stream", side_stream)
    monkeypatch.setattr(device, "on_device", lambda index: contextlib.nullcontext())
    awaited = SimpleNamespace(index=index)
    monkeypatch.setattr(device, "wait", lambda stream, event: calls.append(("wait", stream, event)))
    device.synchronize(awaited)
    stream = (7, 1, 1)
    assert asked == [awaited], "one query before the wait"
    assert calls == [(index, "wait"), ("wait", stream, awaited), ("record", stream, RELAXED), ("synchronize", RELAXED)]
    assert mode[-1] == GLOBAL


def test_the_thread_that_takes_host_memory_stays_near_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(text: Any, nbytes: int, index: int) -> int:
        text.value = b"0000:3B:00.0"
        assert nbytes > len(text.value)
        return 0 if index == 1 else 101  # cudaErrorInvalidDevice

    near: list[str] = []
    monkeypatch.setattr(numa, "stay_near", near.append)
    monkeypatch.setattr(accelerator, "_runtime_function", {"cudaDeviceGetPCIBusId": ask}.get)
    device = accelerator.CudaAccelerator()
    for index in (1, 0):
        monkeypatch.setattr(device, "current_index", lambda index=index: index)
        device.stay_near()
    monkeypatch.setattr(accelerator, "_runtime_function", lambda name: None)  # as with ROCm
    device.stay_near()
    assert near == ["0000:3b:00.0"], "without a known place the thread stays where it is"


def test_no_query_for_a_capture_on_the_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA captures nothing there, and a query makes a context."""
    device, asked, stream = accelerator.CudaAccelerator(), [], SimpleNamespace(stream_id=0)
    monkeypatch.setattr(device, "current_stream", lambda index: stream)
    monkeypatch.setattr(accelerator, "_current_index", lambda: 0)

    def yes() -> bool:
        asked.append(0)
        return True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", yes)
    assert not device.capturing(0)
    assert asked == []
    stream.stream_id = 32
    assert device.capturing(0)
    assert asked == [0]


def test_a_tensor_of_a_compiled_graph_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current node of PyTorch's graph trees knows it."""
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

    def of_another_thread(index: int, create_if_none_exists: bool) -> None:
        raise AssertionError  # older releases raise this if another thread has imported the trees

    trees.get_manager = of_another_thread
    assert not device.is_of_a_graph(tensor)


def test_the_installed_trees_have_the_functions_that_we_call() -> None:
    """They are read: to import PyTorch's compiler takes seconds."""
    text = (Path(torch.__file__).parent / "_inductor" / "cudagraph_trees.py").read_text(encoding="utf-8")
    found: dict[str, list[str]] = {}
    for node in ast.parse(text).body:
        for each in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(each, ast.FunctionDef):
                owner = node.name if isinstance(node, ast.ClassDef) else ""
                found[f"{owner}.{each.name}"] = [argument.arg for argument in each.args.args]
    assert "create_if_none_exists" in found[".get_manager"]
    for name in ("CUDAGraphNode", "CUDAWarmupNode"):
        assert found[f"{name}._is_cuda_graph_recorded_tensor"] == ["self", "t"]


def test_a_mode_that_the_runtime_refuses_to_change_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def exchange(pointer: Any) -> int:
        asked.append(pointer)
        return 1

    monkeypatch.setattr(accelerator, "capture_mode_exchange", lambda: exchange)
    monkeypatch.setattr(accelerator.Accelerator, "done", lambda self, event: True)
    assert accelerator.CudaAccelerator().done(None)
    assert len(asked) == 1


def test_one_call_reads_the_counts_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.accelerator` flattens and sorts hundreds of counts in Python at each call."""
    looks: list[int | None] = []

    def nested(index: int | None) -> dict[str, Any]:
        looks.append(index)
        return {
            "allocated_bytes": {"all": {"current": 5, "peak": 7}},
            "reserved_bytes": {"all": {"current": 9}},
            "num_ooms": 2,
        }

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", nested)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100, 1000))
    device = accelerator.CudaAccelerator()
    assert device.usable_bytes(3) == 100 + 9 - 5
    assert device.allocator_counts(3, "num_ooms") == [2]
    assert device.allocated_bytes(3) == (5, 7)
    assert looks == [3, 3, 3]
    assert device.allocator_counts(3, "num_alloc_retries") == [0]
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda index: {})  # before the first tensor
    assert device.allocated_bytes(3) == (0, 0)
