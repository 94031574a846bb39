"""Any order of pack, unpack, drop, change, failure and waiting, against a model that holds clones."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from torch import Tensor

from actoffload import OffloadConfig, Offloader
from actoffload.errors import BudgetError, SavedTensorModifiedError, StorageReadError
from actoffload.storage.engines.base import IoKind, SpoolFile
from actoffload.storage.engines.posix import PosixEngine
from tests.harness import assert_empty, bits, no_garbage_collection, only_engine, pending_bytes

OPTIONS: list[dict[str, Any]] = [
    {},
    {"debug": True},
    {"debug": True, "verify": True},
    {"device_budget": "300KiB", "debug": True},
    {"pending_bytes": "200KiB", "prefetch_bytes": "64KiB"},
    {"nvme_budget": "600KiB", "debug": True},
    {"host_budget": "64KiB"},
    {"policy": "all", "io_threads": 1},
    {"min_bytes": "16KiB"},
]

VIEWS = ["transpose", "rows", "columns", "corner", "expand", "conj", "imag"]


class _FlakyEngine(PosixEngine):
    """Fails the next calls of a kind, in the number that the test sets."""

    gathered_bytes: ClassVar[int] = 0  # a gathered call that fails is done again, one by one

    def __init__(self, file: SpoolFile, *, threads: int | None = None) -> None:
        self.to_fail = {IoKind.READ: 0, IoKind.WRITE: 0}
        super().__init__(file, threads=threads)

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        if self.to_fail[kind] > 0:
            self.to_fail[kind] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super()._transfer_once(kind, views, offset)


@dataclass(eq=False)
class _Base:
    """One storage: how often it was changed in place."""

    changes: int = 0


@dataclass(eq=False)
class _Known:
    tensor: Tensor
    base: _Base


@dataclass(eq=False)
class _Saved:
    handle: Any
    expected: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    base: _Base
    changes: int


@dataclass(eq=False)
class _Held:
    tensor: Tensor
    expected: Tensor


def _view(tensor: Tensor, kind: str) -> Tensor:
    if kind == "transpose" and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    if kind == "rows" and len(tensor) > 2:
        return tensor[1:-1]
    if kind == "columns" and tensor.dim() > 1:
        return tensor[..., ::2]
    if kind == "corner":
        return tensor.flatten()[:7] if tensor.is_contiguous() else tensor[:1]
    if kind == "expand":
        return tensor[:1].expand(3, *tensor.shape[1:])
    if kind == "conj" and tensor.is_complex():
        return tensor.conj()
    if kind == "imag" and tensor.is_complex() and not tensor.is_conj():
        return tensor.conj().imag  # has the negative bit
    return tensor.view_as(tensor)


_MODEL = torch.nn.Identity()
"""Known to the offloader; else each example searches all live modules."""


class OffloaderMachine(RuleBasedStateMachine):
    """The rules; `expected` holds the bytes that a saved tensor must come back with."""

    tensors = Bundle("tensors")
    handles = Bundle("handles")
    results = Bundle("results")

    @initialize(options=st.sampled_from(OPTIONS))
    def begin(self, options: dict[str, Any]) -> None:
        self.directory = tempfile.mkdtemp(prefix="actoffload-machine-")
        defaults: dict[str, Any] = {"target": "nvme", "path": self.directory, "min_bytes": 0, "engine": _FlakyEngine}
        self.offloader = Offloader(OffloadConfig(**(defaults | options))).use(_MODEL)
        self.engine: _FlakyEngine = only_engine(self.offloader)
        self.saved: list[_Saved] = []
        self.held: list[_Held] = []
        self.offloader.__enter__()
        self.seed = 0

    @rule(
        target=tensors,
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
        shape=st.sampled_from([(3,), (40, 40), (200, 120), (130, 3, 67), (513, 65), (1, 1), (0, 4)]),
    )
    def make(self, dtype: torch.dtype, shape: tuple[int, ...]) -> _Known:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
        # NaN of all kinds as well
        tensor = raw[..., 0] > 127 if dtype is torch.bool else raw.view(dtype).reshape(shape)
        return _Known(tensor.clone(), _Base())

    @rule(target=tensors, known=tensors, kind=st.sampled_from(VIEWS))
    def view(self, known: _Known, kind: str) -> _Known:
        return _Known(_view(known.tensor, kind) if len(known.tensor) else known.tensor, known.base)

    @rule(target=handles, known=tensors)
    def pack(self, known: _Known) -> _Saved:
        tensor, base = known.tensor, known.base
        handle = self.offloader.packer.pack(tensor)
        saved = _Saved(handle, bits(tensor), tensor.shape, tensor.stride(), base, base.changes)
        self.saved.append(saved)
        return saved

    @rule(target=handles, known=consumes(tensors))
    def pack_and_let_go(self, known: _Known) -> _Saved:
        saved = self.pack(known)
        known.tensor = torch.empty(0)
        assert isinstance(saved, _Saved)
        return saved

    @rule(target=results, saved=handles)
    def unpack(self, saved: _Saved) -> Any:
        if saved.handle is None:
            return multiple()
        if saved.base.changes != saved.changes:
            with pytest.raises(SavedTensorModifiedError):
                saved.handle.unpack()
            return multiple()
        for _ in range(10):
            flaky = self.engine.to_fail[IoKind.READ] > 0
            try:
                tensor = saved.handle.unpack()
                break
            except StorageReadError:
                assert flaky, "a read failed without an injected fault"
        assert torch.equal(bits(tensor), saved.expected)
        assert tensor.shape == saved.shape
        assert tensor.stride() == saved.stride
        held = _Held(tensor, saved.expected)
        self.held.append(held)
        return held

    @rule(saved=consumes(handles))
    def drop(self, saved: _Saved) -> None:
        saved.handle = None
        self.saved.remove(saved)

    @rule(held=consumes(results))
    def drop_result(self, held: _Held) -> None:
        self.held.remove(held)
        held.tensor = torch.empty(0)

    @rule(known=tensors)
    def change_in_place(self, known: _Known) -> None:
        if not len(known.tensor) or 0 in known.tensor.stride():
            return
        resident = [held for held in self.held if held.tensor.untyped_storage()._cdata == self._storage(known)]
        known.tensor.zero_()
        known.base.changes += 1
        for held in resident:  # it was kept or forwarded: the same memory, as in plain PyTorch
            held.expected = bits(held.tensor)

    @staticmethod
    def _storage(known: _Known) -> int:
        return int(known.tensor.untyped_storage()._cdata)

    @rule(kind=st.sampled_from(list(IoKind)), count=st.integers(1, 2))
    def fail(self, kind: IoKind, count: int) -> None:
        self.engine.to_fail[kind] = count

    @rule()
    def synchronize(self) -> None:
        self.offloader.synchronize()
        assert pending_bytes(self.offloader) == 0

    @rule()
    def next_step(self) -> None:
        self.offloader.__exit__(None, None, None)
        try:
            self.offloader.__enter__()
        except BudgetError:  # two of these tensors at once are above 300 KiB, and no plan lowers that
            assert self.offloader.config.device_budget is not None
            self.offloader.__enter__()  # an error before a step leaves the offloader usable

    @invariant()
    def each_living_handle_has_its_record(self) -> None:
        records = {id(saved.handle.record) for saved in self.saved if hasattr(saved.handle, "record")}
        assert self.offloader.statistics().live_records == len(records)

    @invariant()
    def no_restored_tensor_changes(self) -> None:
        for held in self.held:
            assert torch.equal(bits(held.tensor), held.expected)

    def teardown(self) -> None:
        try:
            with no_garbage_collection():
                self.offloader.__exit__(None, None, None)
                for saved in self.saved:
                    saved.handle = None
                for held in self.held:
                    held.tensor = torch.empty(0)
                assert_empty(self.offloader)
        finally:
            self.offloader.abort()
            shutil.rmtree(self.directory, ignore_errors=True)


OffloaderMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestOffloaderMachine = pytest.mark.filterwarnings("ignore:actoffload:RuntimeWarning")(OffloaderMachine.TestCase)
