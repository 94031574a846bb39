"""How large micro-batches may be, and how many a step may have: two straight lines through one recorded step.

Device memory is affine in the samples of a micro-batch, and the memory that tensors move to is proportional to the
samples of a step (Zhang and You, SpeedLoader, NeurIPS 2024). No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from ..errors import ConfigError
from ..sizes import format_size
from .profile import Profile
from .search import Limits


@dataclass(frozen=True)
class Microbatches:
    """A proposal for a step: ``count`` micro-batches of ``size`` samples.

    Attributes:
        size: samples of a micro-batch; ``count``: micro-batches of a step.
        device_bytes: the most memory on the device, as predicted.
        movable_bytes: the bytes of a step that a plan may move, for which host memory and disk have room.
    """

    size: int
    count: int
    device_bytes: int
    movable_bytes: int


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A recorded step.

    Attributes:
        profile: the step.
        batch: samples of a micro-batch; ``count``: micro-batches.
        fixed_bytes: on the device between steps; ``peak_bytes``: the most in a step.
    """

    profile: Profile
    batch: int
    count: int
    fixed_bytes: int
    peak_bytes: int

    @property
    def boundary_bytes(self) -> float:
        """What a layer-major step holds of each sample from block to block: the input of a checkpointed region."""
        return median([s.nbytes for s in self.profile.storages if s.input_of is not None] or [0]) / self.batch


def propose_microbatches(taken: Taken, limits: Limits, memory_bytes: int, samples: int) -> Microbatches:
    """Return the largest micro-batches with which a step has as many samples as its memory holds.

    Args:
        taken: a step.
        limits: of host memory and disk.
        memory_bytes: most bytes on the device.
        samples: the most samples of a step.

    Raises:
        ConfigError: not even one sample fits.
    """
    # Not what the plan moves: a plan for other sizes may move more.
    movable = taken.profile.movable_bytes / (taken.batch * taken.count)
    rooms = {"host": limits.host_budget, "nvme": limits.nvme_budget}
    room = [rooms[tier] for tier in limits.tiers]
    # Of two tiers the second takes what the first has no room for.
    capacity = None if None in room else sum(nbytes for nbytes in room if nbytes is not None)
    most = samples if capacity is None or not movable else min(samples, int(capacity / movable))
    boundary = taken.boundary_bytes
    one = (taken.peak_bytes - taken.fixed_bytes) / taken.batch - boundary * (taken.count - 1)

    def device_bytes(size: int, count: int) -> int:
        return int(taken.fixed_bytes + size * (one + boundary * (count - 1)))

    # Samples of a step come first: they decide how often parameters are gathered for each of them.
    for total in range(most, 0, -1):
        free = memory_bytes - taken.fixed_bytes - total * boundary
        largest = total if one <= boundary else min(total, int(max(0.0, free) / (one - boundary)) + 1)
        for size in range(largest, 0, -1):
            if total % size == 0 and device_bytes(size, total // size) <= memory_bytes:
                return Microbatches(size, total // size, device_bytes(size, total // size), int(total * movable))
    least = format_size(device_bytes(1, 1))
    raise ConfigError("memory", memory_bytes, f"one sample takes {least} of the device, or has no room where it moves")
