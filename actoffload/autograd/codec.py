"""``codec``: which saved tensors are saved in another form, from which backward gets every bit back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .originals import Originals
from .results import Results
from .upcasts import Upcasts

if TYPE_CHECKING:
    from ..runtime.store import ActivationStore
    from ..runtime.tape import Tape
    from ..tiers.record import Record


class Codec:
    """The forms of saved tensors.

    Args:
        store: of the tensors.
    """

    def __init__(self, store: ActivationStore) -> None:
        self._store = store
        self._originals = Originals(store)
        self._upcasts, self._results = Upcasts(self._originals), Results(self._originals)

    def handle_of(self, tensor: Tensor, tape: Tape[Record], names: tuple[str | None, str | None]) -> Any:
        """Return the handle of a plain tensor that is saved in another form; None if it is saved as it is.

        Args:
            tensor: is about to be saved, and may move.
            tape: of the forward that saves it.
            names: of the module that runs, and of the tensor, where they are known.
        """
        if not tensor.is_floating_point() or self._store.closed or self._store.shared.stopped:
            return None
        self._originals.begin_save(tape)
        # First: the cast of a product may be both, and to compute it again takes no memory.
        result = self._results.handle_of(tensor, tape, names)
        if result is not None or tensor.dtype is not torch.float32:
            return result
        return self._upcasts.handle_of(tensor, tape, names)

    def bytes_of(self, tensor: Tensor, nbytes: int, tape: Tape[Record]) -> int:
        """Return how many of the bytes of a plain tensor are saved, which a region of this forward saves again."""
        self._originals.begin_save(tape)
        if self._results.can_compute(tensor):
            return 0
        return nbytes // 2 if self._upcasts.can_halve(tensor) else nbytes
