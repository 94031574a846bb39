"""The bytes that steps of a shape may save: from ``device_budget``, ``device_memory``, or the memory taken anyway."""

from __future__ import annotations

from collections.abc import Collection

from ..errors import BudgetError
from ..planning.constants import MEMORY_MARGIN, UNSEEN_STEPS
from ..planning.regions import more_beside
from ..planning.search import Limits, tiers_of
from ..runtime.ranks import several_ranks
from ..runtime.store import ActivationStore
from ..sizes import format_size, parse_share
from .shapes import Shape, Shapes, Stage

OTHER_LIBRARIES = (
    "moving activations cannot help: shard them with FSDP2 (fully_shard) or ZeRO, move them with ZeRO-Offload, or take "
    "an 8-bit or paged optimizer (bitsandbytes, torchao)"
)


class Budgets:
    """The bounds of one offloader's steps, in bytes; ``shapes``: all known ones."""

    def __init__(self, store: ActivationStore, shapes: Shapes) -> None:
        self._shapes = shapes
        self._shared, self._tiers, self._run, self._regions = store.shared, store.tiers, store.run, store.regions
        self._config = store.shared.config
        self._given: int | None = None
        """The ``device_budget`` of the running step; None as well for a share of a peak that is not known yet."""
        self._known_bytes = 0

    def begin_step(self) -> None:
        """Begin a step, for which ``device_budget`` was just set.

        Raises:
            BudgetError: parameters, gradients and optimizer states alone pass ``device_memory``.
        """
        self._given = self._shared.budget.limit_bytes if self._config.device_budget is not None else None
        limit, alone = self.device_bytes, self._run.states_bytes
        if limit and alone > limit:
            detail = (
                f"as an optimizer's step ends, parameters, gradients, optimizer states and what else is there take "
                f"{format_size(alone)}: {format_size(alone - limit)} more"
            )
            raise BudgetError(limit, alone, detail, option="device_memory", remedy=OTHER_LIBRARIES)

    def of(self, shape: Shape, once: Collection[int] | None = None) -> int | None:
        """The most bytes that a shape's steps may save with the regions that run ``once``; None for no bound.

        Regions that run once may take the memory that the program's own checkpoints would hold, and no more.
        """
        once = shape.once if once is None else once
        bounds = [shape.most_bytes]
        if self._config.device_memory is not None:
            bounds.append(self._left_bytes(shape))
        elif self._of_the_device and once and shape.base is not None:
            bounds.append(shape.need.own_bytes(shape.base))
        less = self._more_beside(shape, once)
        bounds = [None if nbytes is None else max(0, nbytes - less) for nbytes in bounds]
        return min((nbytes for nbytes in (self._given, *bounds) if nbytes is not None), default=None)

    def at_most(self, shape: Shape, nbytes: float) -> None:
        """Lower the bound of the bytes that a shape's steps may save, with the regions that run once now."""
        shape.at_most(nbytes + self._more_beside(shape, shape.once))

    @property
    def _of_the_device(self) -> bool:
        """Whether the bounds are parts of a number for the whole device, which no ``device_budget`` is."""
        return self._config.device_memory is not None or self._config.device_budget is None

    def _more_beside(self, shape: Shape, once: Collection[int]) -> int:
        if shape.base is None or not self._of_the_device or once == shape.need.of:
            return 0
        return more_beside(shape.base, once)

    def bound(self, shape: Shape) -> None:
        """Bound the step of a shape that begins."""
        self._shared.budget.limit_bytes = self.of(shape)
        like = self._like(shape)
        taken = self._regions.taken
        taken.in_forward, taken.count = like.need.in_forward, like.regions or self._regions.most

    def limits(self, shape: Shape, once: Collection[int] | None = None) -> Limits:
        """The limits of a plan for a shape with the regions that run ``once``, by default as in its steps now."""
        config = self._config
        return Limits(
            device_budget=self.of(shape, once),
            in_forward=self._like(shape).need.in_forward,
            host_budget=sum(pool.capacity_bytes for pool in self._tiers.pools) or None,
            nvme_budget=None if config.nvme_budget is None else config.size("nvme_budget", 0),
            pending_bytes=None if config.pending_bytes is None else config.size("pending_bytes", 0),
            tiers=("host",) if self._tiers.spool is None else tiers_of(config.target),
            agreed=not several_ranks(),
            whole_device=self._of_the_device,
        )

    @property
    def room_bytes(self) -> int | None:
        """Saved bytes for which the device has room beside all else; None while that is not known."""
        usable, memory = self._tiers.usable_bytes(), self._tiers.in_use()
        if usable is None or memory is None or not self._run.beside.recorded.nbytes:
            return None
        # Memory in use counts as room too, except for the part beside saved tensors: the rest is saved tensors now.
        return max(0, int((1 - MEMORY_MARGIN) * usable) + memory[0] - self._run.beside.recorded.nbytes)

    # -- device_memory ------------------------------------------------------------------------------------------------

    @property
    def device_bytes(self) -> int:
        """``device_memory`` in bytes; 0 without it, and for a share before the device is known."""
        given = self._config.device_memory
        if given is None or isinstance(given, int):
            return given or 0
        if not self._known_bytes:
            total, memory = self._tiers.total_bytes(), self._tiers.in_use()
            if total is None or memory is None:
                return 0
            share = parse_share("device_memory", given)
            if share is None:  # "auto": other processes may have a part of the device
                usable = self._tiers.usable_bytes()
                total = total if usable is None else min(total, memory[0] + usable)
                share = 1 - MEMORY_MARGIN
            self._known_bytes = int(share * total)
        return self._known_bytes

    @property
    def passed_bytes(self) -> int:
        """The bytes by which the last step passed ``device_memory`` in forward or backward."""
        return max(0, self._run.beside.passed_bytes - self.device_bytes) if self.device_bytes else 0

    def begin_peak(self, shape: Shape) -> None:
        """Have one step under each plan, the one that begins or a later one, show the device's peak."""
        followed = shape.stage is Stage.FOLLOWED and not self.peak_is_known(shape)
        ready = self._run.optimizer.settled or not shape.need.settled
        self._run.beside.measure_peak(self._tiers, wanted=followed and ready)

    def peak_is_known(self, shape: Shape) -> bool:
        """Whether a step under the shape's plan has shown the device's peak, or nobody asks for it."""
        return not self.device_bytes or shape.steps.shows_peak

    def all_is_there(self, shape: Shape) -> bool:
        """Whether a step began with optimizer states and gradients, or so many did not that there may never be any."""
        return self._config.device_memory is None or shape.need.settled or shape.need.unsettled >= UNSEEN_STEPS

    def _left_bytes(self, shape: Shape) -> int:
        """The part of ``device_memory`` for saved tensors; 0 while nothing shows the other needs of such a step."""
        need = self._like(shape).need
        if need.beside is None:
            return 0
        memory = self._tiers.in_use()
        # Optimizer states that appeared since that step was recorded take their part.
        grown = 0 if memory is None or need.settled else max(0, memory[0] - need.beside.began_bytes)
        return max(0, self.device_bytes - need.beside.nbytes - need.rounding_bytes - grown)

    def _like(self, shape: Shape) -> Shape:
        """The shape, or a larger one if nothing shows what its own steps need beside saved tensors: no more."""
        if shape.need.beside is not None:
            return shape
        larger = (one for one in self._shapes if one.need.beside is not None and one.elements >= shape.elements)
        return min(larger, key=lambda one: one.elements, default=shape)
