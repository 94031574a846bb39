"""What the tests of what C keeps, as a plan says, share."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import Offloader, Plan
from actoffload.planner import PlanEntry

KEPT_IN_C = [
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or shutil.which("c++") is None, reason="Linux and a C++ compiler"
    ),
    pytest.mark.filterwarnings("ignore:.*saved by one autograd node:RuntimeWarning"),
]
ELEMENTS = 256
BYTES = 4 * ELEMENTS
COUNT = 6


def plan_of(keeps: list[bool], nbytes: int = BYTES, **more: Any) -> Plan:
    """By index: whether the storage stays."""
    return Plan(
        entries=tuple(
            PlanEntry(index=index, nbytes=nbytes, action="keep" if keep else "offload")
            for index, keep in enumerate(keeps)
        ),
        **more,
    )


def kept_in_c(handle: Any) -> bool:
    return _name(handle) in ("actoffload_hooks.Stayed", "actoffload_hooks.Record")


def moved_in_c(handle: Any) -> bool:
    return _name(handle) == "actoffload_hooks.Handle"


def _name(handle: Any) -> str:
    return f"{type(handle).__module__}.{type(handle).__name__}"


def activation(number: int, elements: int = ELEMENTS) -> Tensor:
    return (torch.arange(elements, dtype=torch.float32) + number).requires_grad_() * 1.0


def after_the_first(offloader: Offloader, before: Callable[[Offloader], Any] | None = None) -> Any:
    """The handle of a storage that is saved after another one; both are to stay."""
    pack = offloader._stack()[-1].hooks.pack_hook
    first = pack(activation(0))
    if before is not None:
        before(offloader)
    return first, pack(activation(1))


def chain(x: Tensor, length: int) -> Tensor:
    for _ in range(length):
        x = x.sin()
    return x


def record(offloader: Offloader) -> None:
    offloader.recorder.begin()


def leave_a_note(offloader: Offloader) -> None:
    offloader._dropped.append((_Dropped(offloader), 0))  # type: ignore[arg-type]


class _Dropped:
    """Stands for a record that has other handles."""

    handles, round, waiting, kind = 5, 0, 5, "cpu"

    def __init__(self, offloader: Offloader) -> None:
        self.offloader = offloader
