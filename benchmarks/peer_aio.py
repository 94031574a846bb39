"""Hooks built on DeepSpeed's ``aio_handle``: asynchronous direct writes in pack, reads one tensor ahead in unpack.

Put together from what DeepSpeed recommends for its handle: page-locked buffers that are used again, 1 MiB blocks.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections import defaultdict
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.peers import Peer, Unavailable, spool_folder, storages_of_parameters

LEAST_BYTES = 128 << 10
"""Smaller tensors stay, as with the library's default on CPU."""
WINDOW_BYTES = 64 << 20
"""Bytes that one of the two write handles takes before it is the other one's turn."""
ALIGNMENT = 4096
BLOCK_BYTES, QUEUE_DEPTH = 1 << 20, 32


@dataclass(eq=False)
class Packed:
    """A tensor in the file; its place is free again when the last reference goes."""

    number: int
    offset: int
    nbytes: int
    size: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    free: list[int]
    used: bool = False

    def __del__(self) -> None:
        self.free.append(self.offset)


class AioHandle(Peer):
    """Saved tensors on disk through three handles: two that write in turns, and one that reads."""

    def __init__(self, model: nn.Module, device: torch.device, path: str | None) -> None:
        if device.type != "cpu":
            raise Unavailable("written for CPU tensors")
        library = load_library()
        self.weights = storages_of_parameters(model)
        self.folder = tempfile.TemporaryDirectory(dir=spool_folder(path))
        self.file = str(Path(self.folder.name) / "swap")
        self.writers = [library.aio_handle(BLOCK_BYTES, QUEUE_DEPTH, False, True, 1) for _ in range(2)]
        self.reader = library.aio_handle(BLOCK_BYTES, QUEUE_DEPTH, False, True, 1)
        self.writing: list[list[Tensor]] = [[], []]
        self.turn = 0
        self.buffers: dict[int, list[Tensor]] = defaultdict(list)
        self.free: dict[int, list[int]] = defaultdict(list)
        self.end = 0
        self.packed: WeakValueDictionary[int, Packed] = WeakValueDictionary()
        self.ahead: dict[int, Tensor] = {}
        self.reading = False
        self.count = self.written_bytes = self.read_bytes = 0

    def context(self) -> AbstractContextManager[Any]:
        return saved_tensors_hooks(self._pack, self._unpack)

    def facts(self) -> dict[str, Any]:
        return {"written_bytes": self.written_bytes, "read_bytes": self.read_bytes}

    def close(self) -> None:
        self._drop_ahead()
        for turn in (0, 1):
            self._finish_writing(turn)
        self.folder.cleanup()

    def _take(self, nbytes: int) -> Tensor:
        """A buffer of at least so many bytes."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        pool = self.buffers[size]
        return pool.pop() if pool else self.reader.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))

    def _give_back(self, buffer: Tensor) -> None:
        self.buffers[len(buffer)].append(buffer)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Any:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < LEAST_BYTES or tensor.untyped_storage().data_ptr() in self.weights:
            return tensor.detach()
        if self.count and not self.packed:
            self._drop_ahead()  # a new step
        dense = tensor.is_contiguous() or tensor.transpose(-1, -2).is_contiguous()
        flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()) if dense else tensor.reshape(-1)
        buffer = self._take(nbytes)
        buffer[:nbytes].view(tensor.dtype).copy_(flat)
        free = self.free[len(buffer)]
        if free:
            offset = free.pop()
        else:
            offset, self.end = self.end, self.end + len(buffer)
        stride = tensor.stride() if dense else None
        packed = Packed(self.count, offset, nbytes, tuple(tensor.shape), stride, tensor.dtype, free)
        self.packed[self.count] = packed
        self.count += 1
        self._write(buffer, offset)
        return packed

    def _write(self, buffer: Tensor, offset: int) -> None:
        if sum(map(len, self.writing[self.turn])) + len(buffer) > WINDOW_BYTES:
            self.turn = 1 - self.turn
            self._finish_writing(self.turn)
        if self.writers[self.turn].async_pwrite(buffer, self.file, offset) != 0:
            raise OSError(f"aio_handle refused to write {len(buffer)} bytes")
        self.writing[self.turn].append(buffer)
        self.written_bytes += len(buffer)

    def _finish_writing(self, turn: int) -> None:
        """Wait for what a handle writes; its buffers are free then."""
        if self.writing[turn]:
            self.writers[turn].wait()
        for buffer in self.writing[turn]:
            self._give_back(buffer)
        self.writing[turn].clear()

    # -- backward -----------------------------------------------------------------------------------------------------

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        for turn in (0, 1):
            self._finish_writing(turn)
        if packed.number not in self.ahead:
            self._read(packed)
        self._finish_reading()
        buffer = self.ahead.pop(packed.number)
        packed.used = True
        following = self._following(packed.number)
        if following is not None and following.number not in self.ahead:
            self._read(following)
        if packed.stride is None:
            tensor = torch.empty(packed.size, dtype=packed.dtype)
        else:
            tensor = torch.empty_strided(packed.size, packed.stride, dtype=packed.dtype)
        tensor.as_strided((tensor.numel(),), (1,)).copy_(buffer[: packed.nbytes].view(packed.dtype))
        self._give_back(buffer)
        return tensor

    def _following(self, number: int) -> Packed | None:
        """What backward will want after the tensor of this number."""
        for earlier in range(number - 1, -1, -1):
            packed = self.packed.get(earlier)
            if packed is None or not packed.used:
                return packed
        return None

    def _read(self, packed: Packed) -> None:
        buffer = self._take(packed.nbytes)
        if self.reader.async_pread(buffer, self.file, packed.offset) != 0:
            raise OSError(f"aio_handle refused to read {len(buffer)} bytes")
        self.ahead[packed.number] = buffer
        self.reading = True
        self.read_bytes += len(buffer)

    def _finish_reading(self) -> None:
        if self.reading:  # the handle ends the process when it is told to wait for nothing
            self.reader.wait()
            self.reading = False

    def _drop_ahead(self) -> None:
        """What was read for a tensor that nobody asked for."""
        self._finish_reading()
        for buffer in self.ahead.values():
            self._give_back(buffer)
        self.ahead.clear()


def load_library() -> Any:
    """DeepSpeed's module, built at the first use (minutes; needs libaio's headers and ninja).

    Raises:
        Unavailable: it cannot be had here.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            from deepspeed.ops.op_builder import AsyncIOBuilder

            builder = AsyncIOBuilder()
            if builder.is_compatible():
                return builder.load(verbose=False)
    except Exception as error:  # the import and the build fail in many ways
        lines = str(error).splitlines() or [repr(error)]
        raise Unavailable(f"aio_handle cannot be built: {lines[0]}") from error
    raise Unavailable("aio_handle cannot be built: libaio's headers are missing (libaio-dev)")
