"""For tests of saved tensors: activations, a policy, and one tensor saved at a time through autograd itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from actoffload.autograd import native
from actoffload.policy import Decision, TensorFacts
from actoffload.runtime.identity import Compiled
from tests.unit.saving import Save

ELEMENTS = 256
BYTES = 4 * ELEMENTS


@dataclass(frozen=True)
class KeepsByIndex:
    """A policy that keeps storages by their index; storages beyond its list move."""

    keeps: tuple[bool, ...]

    def decide(self, facts: TensorFacts) -> Decision:
        stays = facts.index < len(self.keeps) and self.keeps[facts.index]
        return Decision.KEEP if stays else Decision.OFFLOAD


def activation(number: int, elements: int = ELEMENTS) -> Tensor:
    """A tensor with a history, and with other elements for each number."""
    return (torch.arange(elements, dtype=torch.float32) + number).requires_grad_() * 1.0


class SavedTensor:
    """One tensor that autograd has saved; it dies with this object."""

    def __init__(self, tensor: Tensor) -> None:
        self._node: Any = Save.apply(torch.zeros((), requires_grad=True), tensor, id).grad_fn

    def unpack(self) -> Tensor:
        """The tensor that the unpack hook returns."""
        (tensor,) = self._node.saved_tensors
        return tensor  # type: ignore[no-any-return]


@contextmanager
def in_python() -> Iterator[None]:
    """Contexts entered meanwhile have hooks in Python, and all comparisons are in Python, as without a compiler."""
    with (
        mock.patch.object(native, "load", return_value=None),
        mock.patch.object(Compiled, "same_counter", return_value=None),
    ):
        yield
