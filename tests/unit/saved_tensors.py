"""What tests of saved tensors share: activations, plans, and one tensor saved at a time through autograd itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from actoffload import Plan
from actoffload.autograd import native
from actoffload.planning.plan import PlanEntry
from tests.unit.saving import Save

ELEMENTS = 256
BYTES = 4 * ELEMENTS


def plan_of(keeps: list[bool], nbytes: int = BYTES, **more: Any) -> Plan:
    """By index: whether the storage stays."""
    return Plan(
        entries=tuple(
            PlanEntry(index=index, nbytes=nbytes, action="keep" if keep else "offload")
            for index, keep in enumerate(keeps)
        ),
        **more,
    )


def activation(number: int, elements: int = ELEMENTS) -> Tensor:
    """A tensor with a history, and with other elements for each number."""
    return (torch.arange(elements, dtype=torch.float32) + number).requires_grad_() * 1.0


class SavedTensor:
    """One tensor that autograd has saved; gone when this goes."""

    def __init__(self, tensor: Tensor) -> None:
        self._node: Any = Save.apply(torch.zeros((), requires_grad=True), tensor, id).grad_fn

    def unpack(self) -> Tensor:
        """What autograd's unpack hook gives for it."""
        (tensor,) = self._node.saved_tensors
        return tensor  # type: ignore[no-any-return]


@contextmanager
def in_python() -> Iterator[None]:
    """Contexts that are entered meanwhile have their hooks in Python, as where there is no compiler."""
    with mock.patch.object(native, "load", return_value=None):
        yield
