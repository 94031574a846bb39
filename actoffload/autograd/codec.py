"""``codec`` and ``fp8``: which saved tensors are saved in another form, and in which."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..policy import CHECKPOINT_INPUT
from ..runtime.store import ActivationStore
from ..runtime.tape import Tape
from ..tiers.record import Record
from .fp8 import Fp8
from .originals import Originals
from .results import Results, can_compute
from .tensor_names import name_of
from .upcasts import Halves, half_bytes


def exact_bytes(node: Any, tensor: Tensor, nbytes: int) -> int:
    """Return how many of the ``nbytes`` of a plain tensor are saved in an exact form: none if backward computes it.

    ``node``: made the tensor, as `Originals.node_of` returns it.
    """
    return 0 if can_compute(node, tensor) else half_bytes(node, tensor) or nbytes


class Codec:
    """The forms of the tensors that a store saves."""

    def __init__(self, store: ActivationStore) -> None:
        self._store = store
        self._codec = store.shared.config.codec
        self._originals = Originals(store)
        self._results = Results(self._originals)
        self._halves = Halves(self._originals)
        self._fp8 = Fp8(self._originals)

    def handle_of(self, tensor: Tensor, tape: Tape[Record], names: tuple[str | None, str | None], *, once: bool) -> Any:
        """Return the handle of a plain tensor that is saved in another form; None if it is saved as it is.

        Args:
            tensor: is about to be saved, and may move.
            tape: of the forward that saves it.
            names: of the module that runs, and of the tensor, where they are known.
            once: whether a region that runs once saves it.
        """
        if not tensor.is_floating_point() or self._store.closed or self._store.shared.stopped:
            return None
        exact_forms = self._applies(tensor) and (once or self._exact_everywhere)
        if exact_forms:
            self._originals.begin_save(tape)
            # First: the cast of a product may be both, and to compute it again takes no memory.
            result = self._results.handle_of(tensor, tape, names)
            if result is not None:
                return result
        if self._is_inexact(tensor, names):
            handle = self._fp8.handle_of(tensor, tape, names)
            if handle is not None:
                return handle
        return self._halves.handle_of(tensor, tape, names) if exact_forms and tensor.dtype is torch.float32 else None

    @property
    def everywhere(self) -> bool:
        """Whether tensors outside of regions that run once may be saved in another form, too."""
        return bool(self._store.shared.config.fp8) or self._exact_everywhere

    def bytes_of(self, tensor: Tensor, nbytes: int, tape: Tape[Record], names: tuple[str | None, str | None]) -> int:
        """Return how many of the bytes of a plain tensor are saved, which a region of this forward saves again."""
        # First: the operands of a named product are mostly named as well, and rounded, so it is not computed again.
        if self._is_inexact(tensor, names) and (code_bytes := self._fp8.code_bytes(tensor)):
            return code_bytes
        if not self._applies(tensor):
            return nbytes
        self._originals.begin_save(tape)
        return exact_bytes(self._originals.node_of(tensor), tensor, nbytes)

    @property
    def _exact_everywhere(self) -> bool:
        return self._codec == "exact" and self._store.shared.coded

    def _applies(self, tensor: Tensor) -> bool:
        # On the CPU each product is computed a second time for the comparison, and a third time in backward. That takes
        # longer than to write it, unless the disk is slow: so only where the user asks for it.
        wanted = self._codec == "exact" or (self._codec == "auto" and not tensor.is_cpu)
        return wanted and self._store.shared.budget.allows_codes

    def _is_inexact(self, tensor: Tensor, names: tuple[str | None, str | None]) -> bool:
        # Never the input of a checkpoint, whose second run has to begin with what the first one had. The program may
        # have named it.
        named = self._store.decision.names.is_inexact(*names)
        return named and name_of(tensor.untyped_storage(), only_boundaries=True) != CHECKPOINT_INPUT
