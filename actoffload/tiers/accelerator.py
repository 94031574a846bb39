"""Devices with streams, behind one small interface; CUDA-only calls are isolated here.

`copy_streams` orders every copy with nothing but the operations of `Accelerator`. On the simulated device of
``actoffload.testing.simulated_device`` each missing edge shows.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..memory import numa

Stream = Any
Event = Any
P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# A step calls these thousands of times. `torch.accelerator` wraps the same functions of C in Python.
_current_index: Callable[[], int] = getattr(
    torch._C, "_accelerator_getDeviceIndex", torch.accelerator.current_device_index
)
_current_stream: Callable[[int], Any] = getattr(torch._C, "_accelerator_getStream", torch.accelerator.current_stream)
_set_stream: Callable[[Any], None] = getattr(torch._C, "_accelerator_setStream", torch.accelerator.set_stream)

_SIDES: dict[str, dict[tuple[int, str], torch.Stream]] = {}
"""The side streams of this process, by the device's type, index and role: PyTorch has few streams to give out."""
_UNHELD: defaultdict[tuple[str, int, bool], deque[torch.Event]] = defaultdict(deque)
"""The unused events of this process, by the device's type and index, and whether they have a time."""
_HERE = contextlib.nullcontext()
_Key, _Keys = torch._C.DispatchKey, torch._C.DispatchKeySet
_TRANSFORMS = _Keys(_Key.FuncTorchDynamicLayerFrontMode) | _Keys(_Key.FuncTorchDynamicLayerBackMode)


class PooledEvent:
    """A position in the work of a stream. When it dies, PyTorch's event is recorded again for another position.

    An enqueued wait refers to the position of that time, so it need not hold the event. PyTorch's events are never
    destroyed: on CUDA that would make a context on the device of the thread that does so.
    """

    __slots__ = ("_unheld", "index", "recorded")

    def __init__(self, recorded: torch.Event, index: int, unheld: deque[torch.Event]) -> None:
        self.recorded = recorded
        self.index = index
        self._unheld = unheld

    def __del__(self) -> None:
        # It may run anywhere, also in another thread: only an atomic operation.
        self._unheld.append(self.recorded)


class Hook(threading.local):
    """One call of the library, on one thread: no capture of a graph begins or ends in it. It may be entered again."""

    def __init__(self) -> None:
        self.depth = 0
        self.capturing: dict[int, bool] = {}
        """By device, whether the thread's current stream is being captured, if this call has queried it."""
        self.recorded: tuple[Stream, Any] | None = None
        """The last moment of a compute stream, and that stream, while this call has enqueued nothing on it since."""
        self.at_end: Callable[[], object] | None = None

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if not self.depth:
            self.capturing.clear()
            self.recorded = None
            at_end, self.at_end = self.at_end, None
            if at_end is not None:
                at_end()


class Accelerator:
    """Any device that PyTorch drives through ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``.

    Streams and events are opaque to the caller; two handles of one stream are equal.
    """

    def __init__(self, device_type: str) -> None:
        self.type = device_type
        self.hook = Hook()
        """Entered by every entry point of autograd or the user, so that each queries the capture once."""
        self._sides = _SIDES.setdefault(device_type, {})

    def current_index(self) -> int:
        """The index of the device on which the calling thread computes, now."""
        return _current_index()

    def current_stream(self, index: int) -> Stream:
        """The stream on which the calling thread computes on device ``index``, now."""
        return _current_stream(index)

    def side_stream(self, index: int, role: str) -> Stream:
        """The only side stream of device ``index`` for ``role`` (``"out"`` or ``"in"``)."""
        stream = self._sides.get((index, role))
        if stream is None:
            with self.on_device(index):
                stream = torch.Stream(torch.device(self.type, index))
            self._sides[index, role] = stream
        return stream

    def record(self, stream: Stream, *, timed: bool = False) -> Event:
        """An event after all work of ``stream`` so far; ``timed``: for `seconds_between`."""
        index = stream.device_index
        unheld = _UNHELD[self.type, index, timed]
        try:
            recorded = unheld.popleft()
        except IndexError:
            recorded = torch.Event(self.type, enable_timing=timed)
        self._on(index, recorded.record, stream)
        return PooledEvent(recorded, index, unheld)

    def timestamp(self, stream: Stream) -> Event:
        """As `record`, for `seconds_between`."""
        return self.record(stream, timed=True)

    def seconds_between(self, begin: Event, end: Event) -> float:
        """Time from one timestamp to a later one, once both have happened. PyTorch queries both."""
        milliseconds: float = self._on(begin.index, begin.recorded.elapsed_time, end.recorded)
        return milliseconds / 1e3

    def wait(self, stream: Stream, event: Event) -> None:
        """Make later work of ``stream`` run after ``event``. Does not block the host."""
        self._on(stream.device_index, stream.wait_event, event.recorded)

    def done(self, event: Event) -> bool:
        """Whether ``event`` has happened. Does not block the host."""
        return bool(self._on(event.index, event.recorded.query))

    def synchronize(self, event: Event) -> None:
        """Block the calling thread until ``event`` has happened."""
        self._on(event.index, event.recorded.synchronize)

    def copy(self, copies: Iterable[tuple[Tensor, Tensor]], stream: Stream) -> None:
        """Copy flat bytes on ``stream``, to the first tensor of each pair; waits for nothing and blocks no host."""
        # `torch.func.jvp` and its like refuse to let the function that they transform write to memory from outside.
        inside = torch._C._functorch.peek_interpreter_stack() is not None
        untransformed = torch._C._ExcludeDispatchKeyGuard(_TRANSFORMS) if inside else _HERE
        with self.on_device(stream.device_index), untransformed:
            previous = self.current_stream(stream.device_index)
            _set_stream(stream)
            try:
                for destination, source in copies:
                    destination.copy_(source, non_blocking=True)
            finally:
                _set_stream(previous)

    def empty(self, nbytes: int, index: int) -> Tensor:
        """Uninitialised bytes on device ``index``, owned by its current stream: freed in its order."""
        return torch.empty(nbytes, dtype=torch.uint8, device=torch.device(self.type, index))

    def used_on(self, tensor: Tensor, stream: Stream) -> None:
        """Report to the allocator that ``stream`` too uses this memory (``record_stream``)."""
        if not torch._C._len_torch_dispatch_stack():
            tensor.record_stream(stream)
            return
        # A selective checkpoint's mode would count the call among the region's own, which its second run lacks.
        with _disable_current_modes():
            tensor.record_stream(stream)

    def usable_bytes(self, index: int) -> int | None:
        """The bytes that PyTorch may still allocate on a device: free memory and the cache; None: unknown."""
        counts = self.allocator_counts(index, "reserved_bytes.all.current", "allocated_bytes.all.current")
        memory = self.memory_info(index)
        return None if counts is None or memory is None else memory[0] + counts[0] - counts[1]

    def memory_info(self, index: int) -> tuple[int, int] | None:
        """The bytes that are free on device ``index``, and all that it has; None: unknown."""
        try:
            free, total = self._memory_info(index)
        except (AttributeError, RuntimeError):  # an older PyTorch
            return None
        return int(free), int(total)

    def allocated_bytes(self, index: int | None) -> tuple[int, int] | None:
        """The bytes that PyTorch has allocated on a device, now and at most; arguments as for `allocator_counts`."""
        counts = self.allocator_counts(index, "allocated_bytes.all.current", "allocated_bytes.all.peak")
        return None if counts is None else (counts[0], counts[1])

    def allocator_counts(self, index: int | None, *names: str) -> list[int] | None:
        """Counts of PyTorch's allocator for a device (None: the current one), from one look; None: nobody counts there.

        A name that it does not count has 0.
        """
        try:
            return self._allocator_counts(index, names)
        except (AttributeError, RuntimeError):  # the allocator of a PrivateUse1 backend need not be a `DeviceAllocator`
            return None

    def reset_peak(self, index: int) -> None:
        """Have PyTorch's allocator begin its highest peak anew on device ``index``, where it can."""
        with contextlib.suppress(AttributeError, RuntimeError):
            torch.accelerator.reset_peak_memory_stats(index)

    def _memory_info(self, index: int) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(index)

    def _allocator_counts(self, index: int | None, names: tuple[str, ...]) -> list[int]:
        flat = torch.accelerator.memory_stats(index)
        return [int(flat.get(name, 0)) for name in names]

    def capturing(self, index: int) -> bool:
        """Whether the current stream of device ``index`` is being captured; queried once in each `Hook`."""
        known = self.hook.capturing
        if index in known:
            return known[index]
        capturing = self.is_capturing(index)
        if self.hook.depth:
            known[index] = capturing
        return capturing

    def is_capturing(self, index: int) -> bool:
        """As `capturing`, queried now."""
        return False

    def is_of_a_graph(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that a captured graph fills again each time it is replayed."""
        return False

    def pin(self, address: int, nbytes: int) -> bool:
        """Page-lock host memory for this device; False when that cannot be had."""
        return False

    def unpin(self, address: int) -> bool:
        """Undo `pin`; False when the device may still use the registered pages."""
        raise NotImplementedError(f"{self.type} pins nothing")

    def stay_near(self) -> None:
        """Let the calling thread run on the CPUs near its current device alone, where they are known."""

    def bind(self, work: Callable[P, T], index: int) -> Callable[P, T]:
        """Return ``work``, to be called in another thread with device ``index``."""

        def run(*args: P.args, **options: P.kwargs) -> T:
            with torch.accelerator.device_index(index):
                return work(*args, **options)

        return run

    def on_device(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Make a device current, and afterwards the previous one.

        On CUDA most calls make a context on the current device, or on the device that PyTorch makes current again after
        the call; not so this guard's end (`maybeExchangeDevice`), while no other call comes before it.
        """
        return _HERE if _current_index() == index else torch.accelerator.device_index(index)

    def _on(self, index: int, call: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Make one call with a device current: mostly it is, and then a context would cost more than the call."""
        if _current_index() == index:
            return call(*arguments)
        with torch.accelerator.device_index(index):
            return call(*arguments)


class CudaAccelerator(Accelerator):
    """CUDA and ROCm: as any other device, but for page-locking and capture, which PyTorch has no general name for."""

    def __init__(self) -> None:
        super().__init__("cuda")

    def done(self, event: Event) -> bool:
        return self._relaxed(super().done, event)

    def seconds_between(self, begin: Event, end: Event) -> float:
        return self._relaxed(super().seconds_between, begin, end)

    def synchronize(self, event: Event) -> None:
        """Block the calling thread, without the interpreter's lock and without a busy core.

        PyTorch ignores ``blocking`` of `torch.Event`, so a wait for such an event keeps a core busy. An event of CUDA's
        own that does block is recorded after it, on a stream that does nothing else.
        """
        if not self.done(event):
            self._relaxed(self._block_until, event)

    def _block_until(self, event: Event) -> None:
        with self.on_device(event.index):
            side = self.side_stream(event.index, "wait")
            place = {"stream_id": side.stream_id, "device_index": event.index, "device_type": side.device_type}
            stream = torch.cuda.Stream(**place)  # type: ignore[no-untyped-call]
            self.wait(stream, event)
            blocking = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            blocking.record(stream)
            blocking.synchronize()
            del blocking  # here: elsewhere its end would make a context on the device that is current there

    def _memory_info(self, index: int) -> tuple[int, int]:
        return torch.cuda.mem_get_info(index)  # `torch.accelerator` has no such call in PyTorch 2.9

    def _allocator_counts(self, index: int | None, names: tuple[str, ...]) -> list[int]:
        # A recorded step queries this twice for each storage. `torch.accelerator` flattens and sorts all counts, 0.1 ms
        # each time. With two such calls a host fell behind its H200, and the idle time looked like compute.
        nested = torch.cuda.memory_stats_as_nested_dict(index)
        found = []
        for name in names:
            count: Any = nested
            for part in name.split("."):
                count = count.get(part, {})
            found.append(int(count or 0))
        return found

    def is_capturing(self, index: int) -> bool:
        if self.current_stream(index).stream_id == 0:
            return False  # the legacy default stream, of which CUDA refuses a capture
        with self.on_device(index):
            return torch.cuda.is_current_stream_capturing()

    def stay_near(self) -> None:
        ask = _runtime_function("cudaDeviceGetPCIBusId")  # None where the runtime does not know it
        address = ctypes.create_string_buffer(16)
        if ask is not None and ask(address, len(address), self.current_index()) == 0:
            numa.stay_near(address.value.decode().lower())

    def is_of_a_graph(self, tensor: Tensor) -> bool:
        """As `Accelerator.is_of_a_graph`, for the graphs of ``torch.compile(mode="reduce-overhead")``.

        They note which of their outputs are alive at each replay, and raise where that differs from the first time.
        """
        trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
        if trees is None:
            return False
        try:
            manager = trees.get_manager(tensor.device.index, create_if_none_exists=False)
        except AssertionError:  # releases before 2.13, in a thread that has no graphs: another has imported the trees
            return False
        node = None if manager is None else manager.current_node
        return node is not None and bool(node._is_cuda_graph_recorded_tensor(tensor))

    def pin(self, address: int, nbytes: int) -> bool:
        portable = 1  # cudaHostRegisterPortable: pinned for every device of the process
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(self._relaxed(runtime.cudaHostRegister, address, nbytes, portable)) == 0:
            return True
        _clear_cuda_error()
        return False

    def unpin(self, address: int) -> bool:
        not_registered = 713  # cudaErrorHostMemoryNotRegistered: an interrupt came before it was
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        result = int(self._relaxed(runtime.cudaHostUnregister, address))
        if result != 0:
            _clear_cuda_error()
        return result in {0, not_registered}

    def _relaxed(self, call: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Make one call with a relaxed capture mode: in the default one it would end another thread's capture.

        Within a `Hook` the thread's mode is relaxed once, until that ends.
        """
        hook = self.hook
        if not hook.depth:
            with hook:
                return self._relaxed(call, *arguments)
        if hook.at_end is None:
            exchange = capture_mode_exchange()
            mode = ctypes.c_int(2)  # cudaStreamCaptureModeRelaxed; the call stores the old mode here
            if exchange is not None and exchange(ctypes.byref(mode)) == 0:
                hook.at_end = partial(exchange, ctypes.byref(mode))
        return call(*arguments)


@functools.cache
def capture_mode_exchange() -> Callable[[Any], int] | None:
    """The function of the CUDA runtime that PyTorch has loaded; None where there is none, as with ROCm."""
    exchange: Callable[[Any], int] | None = _runtime_function("cudaThreadExchangeStreamCaptureMode")
    return exchange


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
"""Classes for devices that page-lock our memory, by their type; `Accelerator` drives all other types."""


def accelerator_for(device_type: str) -> Accelerator | None:
    """The accelerator that drives tensors of this device type, or None for ``"cpu"`` and types without streams."""
    if default_device_types() != (device_type,) or device_type == "cpu":
        return None
    return ACCELERATORS[device_type]() if device_type in ACCELERATORS else Accelerator(device_type)


def default_device_types() -> tuple[str, ...]:
    """The accelerator's type if one is usable, else ``("cpu",)``."""
    current = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu",) if current is None else (current.type,)
