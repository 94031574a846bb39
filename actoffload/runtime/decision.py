"""Whether a storage that autograd saves may leave: module patterns, the policy, what backward wants back at once."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..config import OffloadConfig
from ..errors import ConfigError
from ..interrupts import expected
from ..planning.plan import Plan, PlanEntry
from ..policy import Decision, KeepReason, NameFilter, Policy, TensorFacts
from ..tiers.record import Record
from .pipeline import Phases
from .tape import Tape, Window

KEEP_LAST_SHARE = 16
_KEEP = Decision.KEEP.value

InputShapes = tuple[tuple[int, ...], ...]
"""The shapes of a model's inputs."""
ForwardBegins = Callable[[], Callable[[InputShapes], None] | None]
"""Gives, while there is one, what is told of a forward that begins."""


class OffloadDecision:
    """Decide by the facts of one record and by what the last forward was like.

    It has more than fifteen attributes: options, plan and last forward decide together.

    Args:
        config: the options.
        window: how far backward is prefetched; no more than that is kept at the end of a forward by default.
        phases: what follows the forward that runs, and how much it will have saved.
    """

    def __init__(self, config: OffloadConfig, window: Window, phases: Phases) -> None:
        self._config = config
        self._window = window
        self._phases = phases
        policy = config.policy
        # A plan is followed entry by entry instead.
        self._policy: Policy | None = None if isinstance(policy, str) or type(policy) is Plan else policy
        self.why_planned = KeepReason.POLICY
        """Why a storage stays that the plan keeps."""
        if isinstance(policy, str):
            self.why_planned = KeepReason.NO_TIME if config.device_budget is None else KeepReason.FITS
        self.uses_names = bool(
            config.include or config.exclude or self._policy is not None or config.boundaries == "only"
        )
        """Whether anything asks for the names of tensors."""
        self._filter = NameFilter(config.include, config.exclude, only_boundaries=config.boundaries == "only")
        self._keeps_last = config.policy in ("auto", "greedy")
        self._names: set[str] = set()
        self._late_names: dict[tuple[int, int], str] = {}
        self._plan: Plan | None = None
        self._borrowed = False
        self._planned_sizes: tuple[int, ...] = ()
        self.forward_begins: ForwardBegins = lambda: None
        """Told of a forward's first storage, by its size."""
        self._unproven = isinstance(policy, Plan) and bool(policy.entries)
        """The user's plan has not been followed yet: the first forward has to save what it says."""
        self._forwards = 0
        self.keep_all = config.policy == "keep"
        """Move nothing for now."""
        self.probe: int | None = None
        """The storage at this place leaves once although a plan keeps it, to measure a link that is not used."""
        self.mismatched_bytes = 0
        """Bytes that a plan knew nothing of at their places; whoever looks at it sets it back."""

    def follow(self, plan: Plan | None, *, borrowed: bool = False) -> None:
        """Do as a plan says; None: as before there was one. ``borrowed``: it was made for larger inputs."""
        self._plan, self._borrowed = plan, borrowed
        entries = () if plan is None or borrowed else plan.entries
        self._planned_sizes = tuple(entry.nbytes if entry.action == _KEEP else -1 for entry in entries)

    def planned_sizes(self) -> tuple[int, ...]:
        """Return by index the bytes of each storage that the plan keeps, or -1; () if not only the plan decides."""
        alone = not (self.uses_names or self._unproven or self.keep_all or self.probe is not None)
        return self._planned_sizes if alone else ()

    def why_keep(self, record: Record, tensor: Tensor, tape: Tape[Record]) -> KeepReason | None:
        """Why a record that was just added to ``tape`` stays, or None.

        Args:
            record: the storage.
            tensor: the view of it that was saved first.
            tape: the forward that it is saved in.
        """
        if record.name is None and self._late_names:
            record.name = self._late_names.get((record.index, record.nbytes))
        if record.name is not None:
            self._names.add(record.name)
        if self.uses_names and not self._filter.allows(record.module, record.name):
            return KeepReason.EXCLUDED
        if self._policy is not None and self._answer(_facts(record, tensor)) is Decision.KEEP:
            return KeepReason.POLICY
        if not record.index and (begins := self.forward_begins()) is not None:
            begins(((record.nbytes,),))
        if self.keep_all:
            return KeepReason.POLICY if self._config.policy == "keep" else KeepReason.PLAN
        entry = self._entry(record)
        if self._unproven:
            self._check(record, entry)
        if entry is not None:
            record.planned_tier, record.release_after = entry.tier, entry.release_after
            if record.index == self.probe:
                self.probe = None
                return None
            return self.why_planned if entry.action == _KEEP else None
        if self._plan is not None:
            self.mismatched_bytes += record.nbytes
        return KeepReason.LAST if self._keeps_last and self._is_last(tape) else None

    def _answer(self, facts: TensorFacts) -> Decision:
        """Return what the policy decides.

        Raises:
            ConfigError: it answers with anything but a `Decision`, which would move what was meant to stay.
        """
        assert self._policy is not None, "it is asked"
        answer = expected(self._policy.decide, facts)
        if not isinstance(answer, Decision):
            remedy = f"decide() returned {answer!r}; return actoffload.Decision.KEEP or actoffload.Decision.OFFLOAD"
            raise ConfigError("policy", self._policy, remedy)
        return answer

    def named_late(self, record: Record, name: str) -> None:
        """A record got its name when it was saved again: the next forward's at its place has it from the start."""
        record.name = name
        self._names.add(name)
        self._late_names[record.index, record.nbytes] = name

    def unmatched_names(self) -> list[str]:
        """The patterns over names of tensors under which nothing was saved yet."""
        return self._filter.without(self._names)

    def _check(self, record: Record, entry: PlanEntry | None) -> None:
        """Raise an error where the first forward saves something else than the user's plan says."""
        self._forwards += not record.index
        if self._forwards > 1:
            self._unproven = False
        elif entry is None:
            assert self._plan is not None, "the user gave one"
            entries, place = self._plan.entries, record.index
            planned = "nothing more"
            if place < len(entries):
                planned = f"{entries[place].nbytes} bytes in {entries[place].module or 'a module without a name'}"
            raise ConfigError(
                "policy",
                f"a plan of {len(entries)} storages",
                f"it was made for another step: at place {place} it has {planned}, and the forward saves "
                f"{record.nbytes} bytes in {record.module or 'no module of model='}; the model, its input's shape and "
                "min_bytes must be those of the step that was recorded",
            )

    def following_bytes(self, record: Record) -> int | None:
        """What the forward saves after this record, as far as a plan says; None: no plan knows."""
        if self._plan is None or self._entry(record) is None:
            return None
        following = record.index + 1
        return self._plan.entries[following].nbytes if following < len(self._plan.entries) else 0

    def _entry(self, record: Record) -> PlanEntry | None:
        """What the plan says of a record; by place alone if it was made for larger ones."""
        if self._plan is None:
            return None
        if not self._borrowed:
            return self._plan.entry(record.index, record.nbytes)
        entry = self._plan.entries[record.index] if record.index < len(self._plan.entries) else None
        return entry if entry is not None and record.nbytes <= entry.nbytes else None

    def _is_last(self, tape: Tape[Record]) -> bool:
        """Whether the newest record of a tape is among the last, and its backward follows at once."""
        follows = self._phases.follows()
        if follows is not None and follows != ("backward", tape):
            return False  # in a pipeline: by the time of its backward others have run
        last = self._phases.expected_bytes(tape)
        tail = self._config.size("keep_last_bytes", min(last // KEEP_LAST_SHARE, self._window.nbytes))
        return last - tail < tape.total_bytes <= last  # beyond it: a longer forward, which goes on


def _facts(record: Record, tensor: Tensor) -> TensorFacts:
    return TensorFacts(
        nbytes=record.nbytes,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        module=record.module,
        name=record.name,
        index=record.index,
    )
