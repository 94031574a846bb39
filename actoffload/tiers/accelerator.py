"""Devices with streams, behind one small interface; what is CUDA-only is isolated here.

`copy_streams` orders every copy with nothing but the operations of `Accelerator`. On the simulated device of
``actoffload.testing.simulated_device`` each missing edge shows.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..memory import numa

Stream = Any
Event = Any
P = ParamSpec("P")
T = TypeVar("T")


_SIDES: dict[str, dict[tuple[int, str], torch.Stream]] = {}
"""The side streams of this process, by the device's type, index and role: PyTorch has few streams to give out."""


class Accelerator:
    """Any device that PyTorch drives through ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``.

    Streams and events are opaque to the caller; two handles of one stream are equal.
    """

    def __init__(self, device_type: str) -> None:
        self.type = device_type
        self._sides = _SIDES.setdefault(device_type, {})

    def current_index(self) -> int:
        """The index of the device on which the calling thread computes, now."""
        return torch.accelerator.current_device_index()

    def current_stream(self, index: int) -> Stream:
        """The stream on which the calling thread computes on device ``index``, now."""
        return torch.accelerator.current_stream(torch.device(self.type, index))

    def side_stream(self, index: int, role: str) -> Stream:
        """The one side stream of device ``index`` for ``role`` (``"out"`` or ``"in"``)."""
        stream = self._sides.get((index, role))
        if stream is None:
            stream = torch.Stream(torch.device(self.type, index))
            self._sides[index, role] = stream
        return stream

    def record(self, stream: Stream, again: Event | None = None) -> Event:
        """An event after all that ``stream`` has been given so far: ``again``, where that is an event of its device."""
        event = torch.Event(self.type, enable_timing=False) if again is None else again
        event.record(stream)
        return event

    def timestamp(self, stream: Stream) -> Event:
        """As `record`, for `seconds_between`."""
        event = torch.Event(self.type, enable_timing=True)
        event.record(stream)
        return event

    def seconds_between(self, begin: Event, end: Event) -> float:
        """Time from one timestamp to a later one, once both have happened."""
        return float(begin.elapsed_time(end)) / 1e3

    def wait(self, stream: Stream, event: Event) -> None:
        """What ``stream`` is given from now on runs after ``event``. Does not block the host."""
        stream.wait_event(event)

    def done(self, event: Event) -> bool:
        """Whether ``event`` has happened. Does not block the host."""
        with self._device_of(event):
            return bool(event.query())

    def synchronize(self, event: Event) -> None:
        """Block the calling thread until ``event`` has happened."""
        with self._device_of(event):
            event.synchronize()

    def copy(self, copies: Iterable[tuple[Tensor, Tensor]], stream: Stream) -> None:
        """Copy flat bytes on ``stream``, to the first tensor of each pair; waits for nothing and blocks no host."""
        with self._on(stream):
            for destination, source in copies:
                destination.copy_(source, non_blocking=True)

    def empty(self, nbytes: int, index: int, stream: Stream) -> Tensor:
        """Uninitialised bytes on device ``index``, owned by ``stream``, its current one: freed in its order."""
        return torch.empty(nbytes, dtype=torch.uint8, device=torch.device(self.type, index))

    def used_on(self, tensor: Tensor, stream: Stream) -> None:
        """Tell the allocator that ``stream`` too uses this memory (``record_stream``)."""
        tensor.record_stream(stream)

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return False

    def pin(self, address: int, nbytes: int) -> bool:
        """Page-lock host memory for this device; False when that cannot be had."""
        return False

    def unpin(self, address: int) -> bool:
        """Undo `pin`; False when the device may still use the pages that it was told of."""
        raise NotImplementedError(f"{self.type} pins nothing")

    def stay_near(self) -> None:
        """Let the calling thread run on the CPUs near its current device alone, where they are known."""

    def bind(self, work: Callable[P, T]) -> Callable[P, T]:
        """Return ``work``, to be called in another thread with this thread's device."""
        index = torch.accelerator.current_device_index()

        def run(*args: P.args, **options: P.kwargs) -> T:
            with torch.accelerator.device_index(index):
                return work(*args, **options)

        return run

    def _device_of(self, event: Event) -> contextlib.AbstractContextManager[None]:
        """Make the event's device current: on CUDA a call for an event makes a context on whatever device is."""
        index = event.device.index
        here = torch.accelerator.current_device_index() == index
        return contextlib.nullcontext() if here else torch.accelerator.device_index(index)

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        """Make ``stream`` current, and give back the device and the stream that were."""
        previous_index = torch.accelerator.current_device_index()
        index = stream.device_index
        torch.accelerator.set_device_index(index)
        previous = torch.accelerator.current_stream(torch.device(self.type, index))
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(previous)
            torch.accelerator.set_device_index(previous_index)


class CudaAccelerator(Accelerator):
    """CUDA and ROCm: as any other device, but for what PyTorch has no general name for: page-locking and capture."""

    def __init__(self) -> None:
        super().__init__("cuda")

    def done(self, event: Event) -> bool:
        with _relaxed_capture_mode():
            return super().done(event)

    def synchronize(self, event: Event) -> None:
        """Block the calling thread, without the interpreter's lock and without a busy core.

        PyTorch ignores ``blocking`` of `torch.Event`, so a wait for such an event keeps a core busy. An event of CUDA's
        own that does block is recorded after it, on a stream that does nothing else.
        """
        if self.done(event):
            return
        index = event.device.index
        with _relaxed_capture_mode(), self._device_of(event):
            side = self.side_stream(index, "wait")
            place = {"stream_id": side.stream_id, "device_index": index, "device_type": side.device_type}
            stream = torch.cuda.Stream(**place)  # type: ignore[no-untyped-call]
            self.wait(stream, event)
            blocking = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            blocking.record(stream)
            blocking.synchronize()
            del blocking  # here: elsewhere its end would make a context on whatever device is current

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def stay_near(self) -> None:
        address = pci_address(self.current_index())
        if address is not None:
            numa.stay_near(address)

    def pin(self, address: int, nbytes: int) -> bool:
        portable = 1  # cudaHostRegisterPortable: pinned for every device of the process
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with _relaxed_capture_mode():
            done = int(runtime.cudaHostRegister(address, nbytes, portable)) == 0
        if done:
            return True
        _clear_cuda_error()
        return False

    def unpin(self, address: int) -> bool:
        not_registered = 713  # cudaErrorHostMemoryNotRegistered: an interrupt came before it was
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with _relaxed_capture_mode():
            result = int(runtime.cudaHostUnregister(address))
        if result != 0:
            _clear_cuda_error()
        return result in {0, not_registered}


@contextlib.contextmanager
def _relaxed_capture_mode() -> Iterator[None]:
    """Relax this thread's capture mode: in the default one its calls would end another thread's capture of a graph."""
    exchange = capture_mode_exchange()
    mode = ctypes.c_int(2)  # cudaStreamCaptureModeRelaxed; afterwards what it was
    relaxed = exchange is not None and exchange(ctypes.byref(mode)) == 0
    try:
        yield
    finally:
        if exchange is not None and relaxed:
            exchange(ctypes.byref(mode))


@functools.cache
def capture_mode_exchange() -> Callable[[Any], int] | None:
    """The function of the CUDA runtime that PyTorch has loaded; None where there is none, as with ROCm."""
    exchange: Callable[[Any], int] | None = _runtime_function("cudaThreadExchangeStreamCaptureMode")
    return exchange


def pci_address(index: int) -> str | None:
    """Where a device of CUDA's is, as ``/sys/bus/pci/devices`` names it; None where the runtime does not say."""
    ask = _runtime_function("cudaDeviceGetPCIBusId")
    text = ctypes.create_string_buffer(16)
    return text.value.decode().lower() if ask is not None and ask(text, len(text), index) == 0 else None


def _runtime_function(name: str) -> Any:
    version = torch.version.cuda
    try:
        return getattr(ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}"), name)  # type: ignore[union-attr]
    except (AttributeError, OSError):
        return None


def _clear_cuda_error() -> None:
    """Read the last error, or the user's next kernel would report it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


ACCELERATORS: dict[str, Callable[[], Accelerator]] = {"cuda": CudaAccelerator}
"""What drives devices that page-lock memory of ours, by their type; `Accelerator` drives the others."""


def accelerator_for(device_type: str) -> Accelerator | None:
    """The accelerator that drives tensors of this device type, or None for ``"cpu"`` and types without streams."""
    if default_device_types() != (device_type,) or device_type == "cpu":
        return None
    return ACCELERATORS[device_type]() if device_type in ACCELERATORS else Accelerator(device_type)


def default_device_types() -> tuple[str, ...]:
    """The accelerator's type if one is usable, else ``("cpu",)``."""
    current = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu",) if current is None else (current.type,)


def allocated_bytes(device_types: Iterable[str]) -> tuple[int, int] | None:
    """What PyTorch has on the current accelerator now, and the most it had; None where it is of no such type."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type not in device_types:
        return None
    return int(torch.accelerator.memory_allocated()), int(torch.accelerator.max_memory_allocated())
