"""``device_memory``: one number for everything on the device, from which the budget of saved bytes follows."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import BudgetError
from ..planning.constants import MEMORY_MARGIN
from ..runtime.store import ActivationStore
from ..sizes import format_size, parse_share
from .shapes import Shape

OTHER_LIBRARIES = (
    "moving activations cannot help: shard them with FSDP2 (fully_shard) or ZeRO, move them with ZeRO-Offload, or take "
    "an 8-bit or paged optimizer (bitsandbytes, torchao)"
)


class DeviceMemory:
    """The number, and how much of it is left for saved tensors.

    Args:
        store: has the device, and knows what it has beside saved tensors.
    """

    def __init__(self, store: ActivationStore) -> None:
        self._config, self._tiers, self._run = store.shared.config, store.tiers, store.run
        self._known_bytes = 0

    @property
    def limit_bytes(self) -> int:
        """The number in bytes; 0 while a share of something that is unknown yet."""
        given = self._config.device_memory
        if isinstance(given, int):
            return given
        if not self._known_bytes:
            total, memory = self._tiers.total_bytes(), self._tiers.in_use()
            if total is None or memory is None:
                return 0
            share = parse_share("device_memory", given)
            if share is None:  # "auto": others may have a part of it
                usable = self._tiers.usable_bytes()
                total = total if usable is None else min(total, memory[0] + usable)
                share = 1 - MEMORY_MARGIN
            self._known_bytes = int(share * total)
        return self._known_bytes

    def left_bytes(self, shape: Shape, known: Iterable[Shape]) -> int:
        """What a shape's steps may save; 0 where nothing has shown yet what else they need."""
        other = shape.other_bytes
        if other is None:  # a smaller one than another needs no more than that
            larger = [one for one in known if one.other_bytes is not None and one.elements >= shape.elements]
            nearest = min(larger, key=lambda one: one.elements, default=None)
            if nearest is None:
                return 0
            shape, other = nearest, nearest.other_bytes
        assert other is not None, "it is known by now"
        memory = self._tiers.in_use()
        grown = 0 if memory is None or shape.settled else max(0, memory[0] - shape.began_bytes)  # by optimizer states
        return max(0, self.limit_bytes - other - grown)

    def check_states(self) -> None:
        """Raise where parameters, gradients and optimizer states alone pass the number.

        Raises:
            BudgetError: of ``device_memory``.
        """
        limit, alone = self.limit_bytes, self._run.states_bytes
        if limit and alone > limit:
            detail = (
                f"parameters, gradients and optimizer states alone take {format_size(alone)}, "
                f"{format_size(alone - limit)} more than {format_size(limit)}"
            )
            raise BudgetError(limit, alone, detail, option="device_memory", remedy=OTHER_LIBRARIES)

    @property
    def passed_by(self) -> int:
        """By how many bytes the last step has passed the number in forward or backward."""
        return max(0, self._run.passed_bytes - self.limit_bytes) if self.limit_bytes else 0
