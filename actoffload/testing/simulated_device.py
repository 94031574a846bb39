"""A simulated accelerator that PyTorch drives as a real one: ``torch.device("sim")``, with streams, events and limits.

`install` compiles ``simulated_device.cpp`` once, registers it as PyTorch's `PrivateUse1` backend under the name `NAME`,
and returns a `SimulatedDevice`, with which a test sets delays, a model of a GPU and a limit of memory.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.backend_registration import rename_privateuse1_backend

from ..memory import native_build
from ..tiers.accelerator import ACCELERATORS, Accelerator

NAME = "sim"
DEVICES = 2
SOURCE = Path(__file__).with_name("simulated_device.cpp")


class SimulatedAccelerator(Accelerator):
    """Drives the simulated device like any other, and page-locks memory for it, as `CudaAccelerator` does for CUDA."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self._library = _library()

    def pin(self, address: int, nbytes: int) -> bool:
        # ctypes passes a plain int as 32 bits, which would cut an address.
        return bool(self._library.actoffload_sim_register(ctypes.c_size_t(address), ctypes.c_size_t(nbytes)))

    def unpin(self, address: int) -> bool:
        self._library.actoffload_sim_unregister(ctypes.c_size_t(address))
        return True


class SimulatedDevice:
    """A test's controls and counters of the simulated device; made by `install`."""

    def __init__(self) -> None:
        self._library = _library()
        self._lazy: list[torch.Stream] = []

    def model(
        self,
        *,
        flops: float = 1e13,
        memory_bytes_per_s: float = 1e12,
        to_device_bytes_per_s: float = 1e10,
        to_host_bytes_per_s: float = 1e10,
        latency_s: float = 1e-5,
        launch_s: float = 0.0,
    ) -> None:
        """Set the virtual time of kernels and copies, and the host's time for each of them (``launch_s``)."""
        rates = (flops, memory_bytes_per_s, to_device_bytes_per_s, to_host_bytes_per_s, latency_s, launch_s)
        self._library.actoffload_sim_configure((ctypes.c_double * len(rates))(*rates))

    def delay(self, longest_s: float, seed: int = 0) -> None:
        """Have some streams sleep, in real time, before some of their tasks.

        Args:
            longest_s: seconds of the longest sleep; 0 for no delays.
            seed: determines the slow streams and their moments, so each seed is another run.
        """
        self._library.actoffload_sim_delays(ctypes.c_double(longest_s), ctypes.c_uint64(seed))

    def lazy(self, *streams: torch.Stream) -> None:
        """Have these streams do no work before another stream or the host waits for it, until `reset`."""
        for stream in streams:
            self._lazy.append(stream)  # first, so that `reset` ends it even after an error here
            self._library.actoffload_sim_lazy(stream.device_index, ctypes.c_int64(stream.stream_id), 1)

    @contextlib.contextmanager
    def paused(self, stream: torch.Stream) -> Iterator[None]:
        """Let a stream begin no task inside the context. A thread that waits for the stream there hangs."""
        place = (stream.device_index, ctypes.c_int64(stream.stream_id))
        self._library.actoffload_sim_pause(*place, 1)
        try:
            yield
        finally:
            self._library.actoffload_sim_pause(*place, 0)

    def limit(self, nbytes: int | None, index: int = 0) -> None:
        """Set the memory of a device; None for all memory of the host."""
        self._library.actoffload_sim_limit(index, ctypes.c_size_t(1 << 40 if nbytes is None else nbytes))

    def keep_host_busy(self, seconds: float) -> None:
        """Let virtual time pass on the host, as if it did other work."""
        self._library.actoffload_sim_host(ctypes.c_double(seconds))

    def sleep(self, seconds: float) -> None:
        """Have the current stream sleep, in real time and in virtual time."""
        self._library.actoffload_sim_sleep(ctypes.c_double(seconds))

    def take_violations(self) -> int:
        """Return the number of accesses since the last call to memory that does not belong to the tensor (any more).

        Accesses by kernels and copies count, also to host memory that was unmapped while page-locked, or that is no
        longer page-locked.
        """
        return int(self._library.actoffload_sim_violations())

    def calls(self, index: int) -> int:
        """Return the number of calls to device ``index`` that would make a context on CUDA (hundreds of megabytes).

        These calls are for an event, page-lock memory, or make the device current. Many calls of PyTorch make another
        device current for a time, and then the former one again.
        """
        return int(self._library.actoffload_sim_calls(index))

    @property
    def clock_s(self) -> float:
        """The host's virtual time in seconds: the end of the last work that it waited for, plus its own work since."""
        return float(self._library.actoffload_sim_clock())

    @property
    def flushes(self) -> int:
        """The number of times that the allocator has released all its cached memory."""
        return int(self._library.actoffload_sim_flushes())

    @property
    def synchronous_kernels(self) -> int:
        """The number of kernels with outputs of unknown size, for which the host had to wait."""
        return int(self._library.actoffload_sim_synchronous())

    def synchronize(self) -> None:
        """Wait for all streams of all devices.

        Raises:
            RuntimeError: a kernel failed.
        """
        for index in range(DEVICES):
            torch.accelerator.synchronize(index)

    def reset(self) -> None:
        """Let all streams run, wait for them, and restore all initial settings.

        Raises:
            RuntimeError: a kernel failed.
        """
        # The settings come before the wait, so that no stream sleeps in it any more.
        while self._lazy:
            stream = self._lazy.pop()
            self._library.actoffload_sim_lazy(stream.device_index, ctypes.c_int64(stream.stream_id), 0)
        self.delay(0)
        self.model()
        for index in range(DEVICES):
            self.limit(None, index)
        self.synchronize()


@functools.cache  # PyTorch registers a device's module only once in a process
def install() -> SimulatedDevice:
    """Register the device with PyTorch for the life of the process. Call it before the first backward.

    At the first backward PyTorch starts autograd's threads, one for each device that it knows then.

    Raises:
        native_build.Refused: there is no C++ compiler, or it failed.
    """
    library = _library()
    rename_privateuse1_backend(NAME)
    library.actoffload_sim_install()
    module = types.ModuleType(f"torch.{NAME}")
    # Names that PyTorch looks up on a device's module.
    names = {
        "_initialized": True,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,  # without it PyTorch 2.9 synchronizes nothing
        "device_count": lambda: DEVICES,
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "synchronize": torch.accelerator.synchronize,
        "device": torch.accelerator.device_index,
        "manual_seed": lambda seed: set_rng_state(torch.tensor([seed, 0])),
        "manual_seed_all": _seed_all,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "_is_in_bad_fork": lambda: False,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }
    vars(module).update(names)
    torch._register_device_module(NAME, module)  # type: ignore[no-untyped-call]
    sys.modules[module.__name__] = module
    ACCELERATORS[NAME] = SimulatedAccelerator
    device = SimulatedDevice()
    # Streams are threads: none may still touch memory while Python ends.
    atexit.register(device.synchronize)
    return device


def get_rng_state(device: int | torch.device | None = None) -> Tensor:
    """Return the state of a device's random numbers: a seed, and the number of kernels that have used it."""
    return _random_state(device, None)


def set_rng_state(state: Tensor, device: int | torch.device | None = None) -> None:
    """Restore a state that `get_rng_state` has returned."""
    _random_state(device, state)


def _seed_all(seed: int) -> None:
    for index in range(DEVICES):
        set_rng_state(torch.tensor([seed, 0]), index)


def _random_state(device: int | torch.device | None, state: Tensor | None) -> Tensor:
    index = device.index if isinstance(device, torch.device) else device
    # The CPU is explicit, because the simulated device may be the program's default device.
    found = (
        torch.zeros(2, dtype=torch.int64, device="cpu") if state is None else state.cpu()
    )  # `cpu()` waits, as the library reads the bytes at once
    place = torch.accelerator.current_device_index() if index is None else index
    _library().actoffload_sim_random(place, ctypes.c_void_p(found.data_ptr()), int(state is not None))
    return found


@functools.cache
def _library() -> ctypes.CDLL:
    options, key = native_build.with_torch("torch_cpu")
    library = native_build.load(lambda: native_build.build(SOURCE, options, key), lambda path: ctypes.CDLL(str(path)))
    # ctypes takes every result for a 32-bit int unless it is declared.
    library.actoffload_sim_clock.restype = ctypes.c_double
    for function in ("flushes", "synchronous", "violations", "calls"):
        getattr(library, f"actoffload_sim_{function}").restype = ctypes.c_int64
    return library
