"""The decision whether a saved storage may leave: module patterns, policy, plan, and the end of the forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from ..config import OffloadConfig
from ..errors import ConfigError
from ..planning.plan import Plan, PlanEntry
from ..policy import Decision, KeepReason, NameFilter, Policy, TensorFacts
from ..tiers.interrupts import expected
from ..tiers.record import Record
from .pipeline import Phases
from .tape import Tape, Window

KEEP_LAST_SHARE = 16
_KEEP = Decision.KEEP.value

InputShapes = tuple[tuple[int, ...], ...]
"""The shapes of a model's inputs."""
ForwardBegins = Callable[[], Callable[[InputShapes], None] | None]
"""Returns the observer of forwards that begin, or None if there is none."""


class Names:
    """The names of the tensors that a forward saves, and the patterns that read them."""

    def __init__(self, config: OffloadConfig, policy: Policy | None) -> None:
        only_boundaries = config.boundaries == "only"
        # Whether a pattern or the policy reads names of tensors.
        self.used = bool(config.include or config.exclude or config.fp8 or policy is not None or only_boundaries)
        self._inexact = NameFilter(config.fp8, None)
        self._filter = NameFilter(config.include, config.exclude, only_boundaries=only_boundaries)
        self._seen: set[str] = set()
        self._late: dict[tuple[int, int], str] = {}

    def excludes(self, module: str | None, name: str | None) -> bool:
        """Whether the patterns, or ``boundaries="only"``, keep a tensor of this name that is saved in this module."""
        return self.used and not self._filter.allows(module, name)

    def is_inexact(self, module: str | None, name: str | None) -> bool:
        """Whether the option ``fp8`` names a tensor of this name that is saved in this module, and it may move."""
        return bool(self._inexact.include) and self._inexact.allows(module, name) and not self.excludes(module, name)

    def complete(self, record: Record) -> None:
        """Complete the name of a record that was just saved, if an earlier forward has shown it."""
        saved = record.saved
        if saved.name is None and self._late:
            saved.name = self._late.get((record.index, record.nbytes))
        if saved.name is not None:
            self._seen.add(saved.name)

    def named_late(self, record: Record, name: str) -> None:
        """Name a record that got its name by a later save; the next forward names the record at its place at once."""
        record.saved.name = name
        self._seen.add(name)
        self._late[record.index, record.nbytes] = name

    def unmatched(self) -> list[str]:
        """Return the patterns for tensor names that no saved tensor has matched yet."""
        return self._filter.without(self._seen) + self._inexact.without(self._seen)


class OffloadDecision:
    """Decide by the facts of one record and by the size of the last forward.

    ``window``: of prefetch, which by default bounds the bytes that stay at the end of a forward.
    """

    def __init__(self, config: OffloadConfig, window: Window, phases: Phases) -> None:
        self._config = config
        self._window = window
        self._phases = phases
        policy = config.policy
        # A plan's `decide` is not called: `follow` reads it entry by entry, with tiers and moments of release.
        self._policy: Policy | None = None if isinstance(policy, str) or type(policy) is Plan else policy
        self.why_planned = KeepReason.POLICY
        """The reason of a storage that the plan keeps."""
        if isinstance(policy, str):
            self.why_planned = KeepReason.FITS if config.is_limited else KeepReason.NO_TIME
        self.names = Names(config, self._policy)
        self._keeps_last = config.policy in ("auto", "greedy")
        self.last: list[tuple[int, KeepReason | None, str | None]] = []
        """For each storage of the last forward: its bytes, the reason why it stays, and its module."""
        self._plan: Plan | None = None
        self._planned_sizes: tuple[int, ...] = ()
        self.forward_begins: ForwardBegins = lambda: None
        """Its observer receives the size of a forward's first storage."""
        self._unproven = policy if isinstance(policy, Plan) and policy.entries else None
        """The user's plan, until its first forward is over."""
        self._keeps_all = config.policy == "keep"
        self.probe: int | None = None
        """The storage at this place leaves once although the plan keeps it, to measure a link that is not in use."""
        self.mismatched_bytes = 0
        """Bytes of storages that the plan does not list at their places; the autopilot resets it."""

    def follow(self, plan: Plan | None) -> None:
        """Follow a plan; None: decide without one again."""
        self._plan = plan
        entries = () if plan is None else plan.entries
        self._planned_sizes = tuple(entry.nbytes if entry.action == _KEEP else -1 for entry in entries)

    def planned_sizes(self) -> tuple[int, ...]:
        """Return by index the bytes of each storage that the plan keeps, or -1; () unless the plan alone decides."""
        alone = not self.names.used and self._unproven is None and self.probe is None
        return self._planned_sizes if alone else ()

    def note(self, record: Record) -> None:
        """Note a record that was just added to its tape: its name, the forward that it begins, its entry in the plan.

        Raises:
            ConfigError: the user's plan does not list it in the first forward.
        """
        if self.names.used:  # first, as it saves a call for each record
            self.names.complete(record)
        # Before the plan is read: the observer may follow another plan for a forward of this size.
        if not record.index:
            self.begins_with(record.nbytes)
        if self._unproven is not None:
            self._check_place(record, self._unproven)
        entry = self._entry(record)
        if entry is None and self._plan is not None:
            self.mismatched_bytes += record.nbytes
        if entry is not None and record.index == self.probe:
            self.probe = None  # once: a single transfer measures the link
            entry = replace(entry, action=Decision.OFFLOAD.value)
        record.saved.planned = entry

    def _check_place(self, record: Record, plan: Plan) -> None:
        """Check that the user's plan lists a record of the first forward at its place."""
        if record.tape.number > 1:
            self._unproven = None
        elif plan.entry(record.index, record.nbytes) is None:
            entries, place = plan.entries, record.index
            planned, saves = "nothing more", f"{record.nbytes} bytes in {record.saved.module or 'no module of model='}"
            if place < len(entries):
                planned = f"{entries[place].nbytes} bytes in {entries[place].module or 'a module without a name'}"
            raise ConfigError(
                "policy",
                f"a plan of {len(entries)} storages",
                f"it was made for another step: at place {place} it has {planned}, and the forward saves {saves}; "
                "the model, its input's shape and min_bytes must be those of the step that was recorded",
            )

    def why_keep(self, record: Record, tensor: Tensor, tape: Tape[Record]) -> KeepReason | None:
        """Return why a record stays, which `note` has noted, or None. It changes nothing.

        ``tensor``: the view of it that was saved first; ``tape``: has it as its newest record.
        """
        # Before the plan, which does not know the patterns and may move a storage that they keep.
        if self.names.used and self.names.excludes(record.saved.module, record.saved.name):
            return KeepReason.EXCLUDED
        if self._policy is not None and self._answer(record, tensor) is Decision.KEEP:
            return KeepReason.POLICY
        if self._keeps_all:
            return KeepReason.POLICY
        planned = record.saved.planned
        if planned is not None:
            return self.why_planned if planned.action == _KEEP else None
        return KeepReason.LAST if self._keeps_last and self._is_last(tape) else None

    def begins_with(self, nbytes: int) -> None:
        """Note that a forward begins with tensors of so many bytes: a region's inputs, or the first saved tensor.

        Its first storage says less of its shapes, as it depends on the plan: a region that runs once saves no input,
        and a coded tensor has another size.
        """
        if (begins := self.forward_begins()) is not None:
            begins(((nbytes,),))

    def _answer(self, record: Record, tensor: Tensor) -> Decision:
        """Return the decision of the policy.

        Raises:
            ConfigError: it returned no `Decision`, so a tensor that was to stay might move.
        """
        assert self._policy is not None, "it is asked"
        facts = TensorFacts(
            nbytes=record.nbytes,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            device=str(tensor.device),
            module=record.saved.module,
            name=record.saved.name,
            index=record.index,
        )
        answer = expected(self._policy.decide, facts)
        if not isinstance(answer, Decision):
            remedy = f"decide() returned {answer!r}; return actoffload.Decision.KEEP or actoffload.Decision.OFFLOAD"
            raise ConfigError("policy", self._policy, remedy)
        return answer

    def following_bytes(self, record: Record) -> int | None:
        """Return the bytes that the forward saves next according to the plan; None if no plan knows them."""
        # A forward that backward builds saves other tensors, depending on which of them are back from the disk.
        if self._plan is None or record.tape.built or self._entry(record) is None:
            return None
        following = record.index + 1
        if following < len(self._plan.entries):
            return self._plan.entries[following].nbytes
        # Another forward may begin, unless backward followed here in the step before: a plan counts on all of its room.
        phase = self._phases.follows()
        return 0 if phase is not None and phase[0] == "backward" else None

    def could_move(self, record: Record) -> bool:
        """Whether the plan keeps a record by choice: the recorded step had no reason, such as another owner."""
        entry = self._entry(record)
        return entry is not None and not entry.reason

    def _entry(self, record: Record) -> PlanEntry | None:
        """Return the plan's entry for a record, or None."""
        return None if self._plan is None else self._plan.entry(record.index, record.nbytes)

    def _is_last(self, tape: Tape[Record]) -> bool:
        """Return whether the newest record of a tape is among its last, and its backward follows at once."""
        follows = self._phases.follows()
        if follows is not None and follows != ("backward", tape):
            return False  # in a pipeline: other phases come before its backward, and could use the memory
        last = self._phases.expected_bytes(tape)
        tail = self._config.size("keep_last_bytes", min(last // KEEP_LAST_SHARE, self._window.nbytes))
        return last - tail < tape.total_bytes <= last  # above `last`: this forward is longer, and continues
