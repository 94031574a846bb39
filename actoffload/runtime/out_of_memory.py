"""Errors of the device's allocator: a note in each one that a step raises, and whether any occurred."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..config import OffloadConfig
from ..sizes import format_size
from ..tiers.accounts import Accounts
from ..tiers.tiers import Tiers

MOST_MODULES = 3


class OutOfMemory:
    """The errors that a store sees: errors that leave a forward, and errors of its own requests in backward.

    The device's allocator also counts errors that the store does not see.
    """

    def __init__(self, config: OffloadConfig, accounts: Accounts, tiers: Tiers) -> None:
        self._config, self._accounts, self._tiers = config, accounts, tiers
        self._seen = False
        self._counted = tiers.allocator_count("num_ooms")

    def note(self, error: BaseException, saves: Iterable[tuple[int, object, str | None]]) -> None:
        """Add a note to an error: the resident bytes, the modules that save the most, and an option that takes less.

        ``saves``: bytes, reason and module of each storage that the forward has saved.
        """
        self._seen = True
        by_module: Counter[str] = Counter()
        for nbytes, _, module in saves:
            by_module[module or "modules without a name (pass model=)"] += nbytes
        largest = ", ".join(f"{format_size(nbytes)} in {name}" for name, nbytes in by_module.most_common(MOST_MODULES))
        told = f"actoffload: {format_size(self._accounts.resident_bytes)} of saved tensors were on the device"
        told += f"; the forward had saved {largest}" if largest else ""
        if not any(note.startswith("actoffload: ") for note in getattr(error, "__notes__", ())):  # else it has one
            error.add_note(f"{told}. Next: {self._next}")

    def happened(self) -> bool:
        """Return whether there was an error since the last call."""
        before, self._counted = self._counted, self._tiers.allocator_count("num_ooms")
        seen, self._seen = self._seen or self._counted > before, False
        return seen

    @property
    def _next(self) -> str:
        config = self._config
        if config.policy != "auto":
            return "policy='all' moves the most; a smaller batch, or gradient checkpointing, saves less"
        if not config.is_limited:
            return "device_memory='auto' begins each shape with the least memory; or make the batch smaller"
        name = "device_memory" if config.device_memory is not None else "device_budget"
        return f"the next step of this shape takes less; else lower {name}={getattr(config, name)!r}, or the batch"
