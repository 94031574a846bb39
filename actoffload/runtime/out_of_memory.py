"""What is added to an error of PyTorch's allocator that a step raises: what was resident of ours, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..config import OffloadConfig
from ..sizes import format_size
from ..tiers.accounts import Accounts

MOST_MODULES = 3


def note(config: OffloadConfig, accounts: Accounts, saves: Iterable[tuple[int, object, str | None]]) -> str:
    """Return the note: saved tensors on the device, the modules that save the most, the option that takes less.

    Args:
        config: the options.
        accounts: what is resident.
        saves: bytes, reason and module of each storage that the forward has saved.
    """
    by_module: Counter[str] = Counter()
    for nbytes, _, module in saves:
        by_module[module or "modules without a name (pass model=)"] += nbytes
    largest = ", ".join(f"{format_size(nbytes)} in {name}" for name, nbytes in by_module.most_common(MOST_MODULES))
    told = f"actoffload: {format_size(accounts.resident_bytes)} of saved tensors were on the device"
    return f"{told}{f'; the forward had saved {largest}' if largest else ''}. Next: {_next(config)}"


def _next(config: OffloadConfig) -> str:
    if config.policy != "auto":
        return "policy='all' moves the most; a smaller batch, or gradient checkpointing, saves less"
    if config.device_memory is not None:
        return (
            f"the next step of this shape takes less; else lower device_memory={config.device_memory!r}, or the batch"
        )
    if config.device_budget is not None:
        return (
            f"the next step of this shape takes less; else lower device_budget={config.device_budget!r}, or the batch"
        )
    return "device_memory='auto' begins each shape with the least memory; or make the batch smaller"
