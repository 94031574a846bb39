"""What tests of saved tensors share: activations, a policy, and one tensor saved at a time through autograd itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actoffload.policy import Decision, TensorFacts
from tests.unit.saving import Save

ELEMENTS = 256
BYTES = 4 * ELEMENTS


@dataclass(frozen=True)
class KeepsByIndex:
    """A policy that says by index whether a storage stays; what is beyond moves."""

    keeps: tuple[bool, ...]

    def decide(self, facts: TensorFacts) -> Decision:
        """See `Policy`."""
        stays = facts.index < len(self.keeps) and self.keeps[facts.index]
        return Decision.KEEP if stays else Decision.OFFLOAD


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
