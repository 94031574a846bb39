"""``codec``: of a float32 tensor that was cast from bfloat16, autograd saves the bfloat16 numbers.

Models in bfloat16 compute norms and adapters in float32, and save what they cast. A bfloat16 number is the upper half
of its float32, so the half that is saved gives back every bit, NaNs included.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from .coded import Form
from .handles import empty
from .originals import Checked, Original, Originals, source_of

LOWER = 0 if sys.byteorder == "little" else 1
"""Which 16 bits of a float32 a bfloat16 lacks."""


def half_bytes(node: Any, tensor: Tensor) -> int:
    """Return half of the size of a float32 storage that was cast from bfloat16, and not changed; else 0.

    ``node``: made the tensor, as `Originals.node_of` returns it.
    """
    found = source_of(node) if tensor.dtype is torch.float32 else None
    cast = found is not None and found[1].dtype is torch.bfloat16
    return tensor.untyped_storage().nbytes() // 2 if cast else 0


class Halves(Form):
    """The form of float32 tensors that were cast from bfloat16."""

    exact = True

    def __init__(self, originals: Originals) -> None:
        super().__init__(originals)
        self._checked = Checked()

    def code_bytes(self, tensor: Tensor) -> int:
        """As `half_bytes`."""
        return half_bytes(self.originals.node_of(tensor), tensor) if tensor.dtype is torch.float32 else 0

    def encode(self, tensor: Tensor, stream: Any, key: tuple[Any, ...]) -> Tensor | None:
        """Return the upper halves of a tensor's storage; None if a lower half is not zero.

        An accelerator's host waits to learn that in the first forward that has ``key``. Later it learns it before
        backward returns.
        """
        if self._checked.differs(key):
            return None
        storage, store = tensor.untyped_storage(), self.store
        self.make_room(tensor.device, storage.nbytes() // 2)
        flat = empty(torch.int16, tensor.device).detach().set_(storage, 0, (storage.nbytes() // 2,), (1,))
        lower, upper = flat[LOWER::2], flat[1 - LOWER :: 2]
        forward = store.shared.accounts.steps
        if store.tiers.by_device[tensor.device.type].copies is None:
            if torch.count_nonzero(lower):
                return None
        elif self._checked.before(key, forward):
            self.originals.note(stream, lower.any())
        else:
            differs = self.originals.read(lower.any(), stream)
            self._checked.note(key, forward, not differs)
            if differs:
                return None
        whole = tensor if tensor._base is None else tensor._base
        # Not a view of the clone: its base would hold the memory.
        numbers = empty(torch.bfloat16, tensor.device).detach()
        return numbers.set_(upper.clone().untyped_storage(), 0, whole.shape, whole.stride())

    def decode(self, code: Tensor, original: Original) -> Tensor:
        """Return the float32 numbers."""
        return code.view(torch.bfloat16).to(torch.float32)
