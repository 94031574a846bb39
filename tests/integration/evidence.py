"""The checks of each row of the adapters' tests: same bits, bytes on disk, a lower peak, no live records."""

from __future__ import annotations

import contextlib
import inspect
import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch import Tensor

from actoffload import Offloader, Statistics
from actoffload.runtime.store import ActivationStore
from tests.harness import assert_same_bits, assert_same_gradients


@dataclass
class Run:
    """The results of one training run, as plain data that processes can exchange.

    Attributes:
        losses: one tensor for each loss, in order.
        tensors: gradients (before the optimizer used them) and final weights, by name.
        statistics: the offloader's, or None for the run without one.
        moved_parameter_bytes: bytes that moved although a parameter lies in their storage; must be 0.
    """

    losses: list[Tensor] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    statistics: Statistics | None = None
    moved_parameter_bytes: int = 0


def assert_same_run(found: Run, expected: Run) -> None:
    """Fail unless both runs have the same losses and tensors."""
    assert found.losses, "no loss was recorded"
    assert_same_bits(found.losses, expected.losses, "loss")
    assert found.tensors, "no gradient was recorded"
    assert_same_gradients(found.tensors, expected.tensors)


def assert_evidence(offloaded: Run, plain: Run, *, peak_falls: bool | None = True) -> Statistics:
    """Fail unless the offloaded run has the plain run's bits, moved bytes, and kept its parameters.

    ``peak_falls`` is False for a model in one compiled graph, and None where the peak may fall or not.
    """
    assert_same_run(offloaded, plain)
    statistics = offloaded.statistics
    assert statistics is not None
    assert statistics.nvme_written_bytes > 0
    assert statistics.nvme_read_bytes > 0
    assert peak_falls is None or (statistics.resident_peak_bytes < statistics.baseline_peak_bytes) == peak_falls
    assert statistics.live_records == 0
    assert offloaded.moved_parameter_bytes == 0
    assert not statistics.degraded
    return statistics


class OwnerMeter:
    """Counts the bytes that move out of the storages of ``parameters``, which it looks up at each move."""

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self.parameter_bytes = 0
        self.other_bytes = 0
        self._parameters = parameters

    def see(self, address: int, span: tuple[int, int]) -> None:
        """Count a span of the storage at an address that the offloader is about to move."""
        begin, end = address + span[0], address + span[1]
        for parameter in self._parameters():
            owner = parameter.untyped_storage()
            first = owner.data_ptr()
            if owner.nbytes() and begin < first + owner.nbytes() and first < end:
                self.parameter_bytes += end - begin
                return
        self.other_bytes += end - begin


@contextlib.contextmanager
def counting_owners(parameters: Callable[[], Iterable[Tensor]]) -> Iterator[OwnerMeter]:
    """Count the bytes that any offloader of this process moves in this context, by owner: parameters or not."""
    meter = OwnerMeter(parameters)
    admit = ActivationStore.admit

    def counting(
        self: ActivationStore, tensor: Tensor, span: tuple[int, int], storage: Any, *rest: Any, **named: Any
    ) -> Any:
        meter.see(storage.data_ptr(), span)
        return admit(self, tensor, span, storage, *rest, **named)

    ActivationStore.admit = counting  # type: ignore[method-assign]
    try:
        yield meter
    finally:
        ActivationStore.admit = admit  # type: ignore[method-assign]


@contextlib.contextmanager
def noting_offloaders() -> Iterator[list[Offloader]]:
    """The offloaders that are made in this context, which would otherwise die with their models."""
    made, build = list[Offloader](), Offloader.__init__

    def noted(self: Offloader, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        made.append(self)

    with patch.object(Offloader, "__init__", noted):
        yield made


SEAMS = ("transformers.Trainer.train", "accelerate.Accelerator.prepare", "deepspeed.initialize")
"""The functions that ``ACTOFFLOAD`` patches, and TRL's for its own flag."""


@contextlib.contextmanager
def unpatched() -> Iterator[None]:
    """As in a program without ``ACTOFFLOAD``: neither it nor the line that names it wraps functions of frameworks."""

    def is_theirs(function: Any) -> bool:
        return not function.__globals__["__name__"].startswith(("actoffload.", "_actoffload_"))

    others = {name: value for name, value in os.environ.items() if not name.startswith("ACTOFFLOAD")}
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, others, clear=True))
        for name in SEAMS:
            stack.enter_context(patch(name, inspect.unwrap(pkgutil.resolve_name(name), stop=is_theirs)))
        yield
