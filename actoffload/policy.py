"""Policies, which decide for each saved tensor whether it moves, and the reasons why a tensor stays. Without torch."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable


class Kind(Enum):
    """The kinds of reasons for which a saved tensor stays."""

    STATIC = "lives anyway, and is no activation"
    CHOSEN = "could move: another plan or another moment may move it"
    ASKED = "the program's options or calls keep it"
    FIXED = "cannot move in this run"


class KeepReason(Enum):
    """Why a saved tensor stayed on its device; the values are the keys of ``Statistics.kept_bytes``."""

    __hash__ = object.__hash__  # members are singletons, and Enum's own hash is a Python function

    def __new__(cls, value: str, kind: Kind = Kind.FIXED, meaning: str = "", remedy: str = "") -> KeepReason:
        """Return a member with the text alone as its value, so that ``KeepReason("buffer")`` finds it."""
        member = object.__new__(cls)
        member._value_ = value
        member.kind, member.meaning, member.remedy = kind, meaning, remedy
        return member

    kind: Kind
    meaning: str  # for a person
    remedy: str  # that lets such tensors move, for a person; empty if nothing does

    PARAMETER = "parameter", Kind.STATIC, "a parameter or a view of one"
    BUFFER = "buffer", Kind.STATIC, "a module's buffer or a view of one"
    INPUT = "input", Kind.STATIC, "lives anyway: the caller holds it"
    SMALL = "below min_bytes", Kind.FIXED, "too small to be worth moving", "lower min_bytes"
    MARKED = "keep()", Kind.ASKED, "you said so"
    REGION = "no_offload()", Kind.ASKED, "you said so"
    POLICY = "policy", Kind.ASKED, "the policy said so", "have the policy decide Decision.OFFLOAD for larger tensors"
    FITS = "fits the budget", Kind.CHOSEN, "the plan keeps device_budget with it", "lower device_budget"
    NO_TIME = (
        "no time to move",
        Kind.CHOSEN,
        "moving it would have made the step wait, by the plan",
        "set device_budget, so that a step may wait for what leaves",
    )
    EXCLUDED = (
        "module excluded",
        Kind.ASKED,
        "saved in a module that `exclude` names, or that `include` does not",
        "widen include=, or name less in exclude=",
    )
    LAST = (
        "last saved layer",
        Kind.CHOSEN,
        "its backward follows at once",
        "pass keep_last_bytes=0; a deeper model has more that can leave",
    )
    PRESSURE = (
        "pressure",
        Kind.CHOSEN,
        "could not have been moved in time",
        "set device_budget, so that forward waits for what leaves; or raise pending_bytes",
    )
    IN_BACKWARD = "saved during backward", Kind.FIXED, "by a recomputation; it is used at once"
    RECOMPUTED = "recomputed", Kind.FIXED, "by a checkpointed region that runs again in backward; it is used at once"
    DERIVED = "computed again", Kind.FIXED, "by backward, from other saved tensors; it is used at once"
    SUBCLASS = "unknown tensor subclass", Kind.FIXED, "how to take it apart is not known"
    LAYOUT = "not strided", Kind.FIXED, "sparse, or another layout without plain memory"
    FILLED_LATER = "filled after it was saved", Kind.FIXED, "its operator (rrelu) saves it before it is computed"
    DEVICE = (
        "other device",
        Kind.FIXED,
        "on a device that is not offloaded",
        "CPU tensors move to disk alone: give target='nvme' and path=; for other devices pass devices=",
    )
    RESIZED = "resized", Kind.FIXED, "its owner freed its memory while it was being moved, to fill it again later"
    ALIVE = "held elsewhere", Kind.FIXED, "the program itself held it until backward: moving it freed nothing"
    CAPTURE = "graph capture", Kind.FIXED, "a captured graph replays on fixed memory"
    DEGRADED = "degraded", Kind.FIXED, "something below failed; see there"
    FORKED = "forked process", Kind.FIXED, "a child of the process that owns the spool"


STATIC = tuple(reason.value for reason in KeepReason if reason.kind is Kind.STATIC)
"""The reasons of tensors that live anyway and are no activations."""


def reasons(kept_bytes: Mapping[str, int]) -> dict[KeepReason, int]:
    """Return the reasons in an offloader's counts, without those of another release, which an old trace may have."""
    known = {reason.value: reason for reason in KeepReason}
    return {known[name]: nbytes for name, nbytes in kept_bytes.items() if name in known}


class Decision(Enum):
    """A policy's decision on one storage."""

    OFFLOAD = "offload"
    KEEP = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """The facts of a storage for a policy, at the time when autograd saves it.

    Attributes:
        nbytes: bytes that would move.
        shape: shape of the view that was saved first.
        dtype: for example ``"float32"``.
        device: for example ``"cuda:0"``.
        module: qualified name of the innermost running module, or None if no names are known.
        name: its name from `actoffload.name`; ``"checkpoint_input"`` for the inputs of a checkpoint; else None.
        index: the number of storages that this forward saved before it.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    module: str | None
    name: str | None = None
    index: int


@runtime_checkable
class Policy(Protocol):
    """One override point: decide for each storage whether it may leave.

    >>> class BigOnly:
    ...     def decide(self, facts: TensorFacts) -> Decision:
    ...         return Decision.OFFLOAD if facts.nbytes >= 8 << 20 else Decision.KEEP
    >>> isinstance(BigOnly(), Policy)
    True
    """

    def decide(self, facts: TensorFacts) -> Decision:
        """Return ``Decision.OFFLOAD`` or ``Decision.KEEP``.

        The offloader calls it on the training thread under its lock: be quick, and do not call the offloader.
        """
        ...


OUTSIDE = "(no module)"


@functools.cache
def part_of(module: str | None) -> str:
    """Return the part of the model that contains a module: the module's name up to the first number."""
    names = (module or OUTSIDE).split(".")
    number = next((place for place, name in enumerate(names) if name.isdigit()), len(names))
    return ".".join(names[: number + 1])


CHECKPOINT_INPUT = "checkpoint_input"
"""The name of the tensors that a checkpoint saves in place of its block's."""
TENSOR = "tensor:"
"""The prefix of a pattern over names of tensors."""


class NameFilter:
    """Glob patterns over qualified names of modules, or with the prefix ``tensor:`` over names of tensors.

    A pattern over modules also covers the modules inside those that it matches. With ``only_boundaries`` only the
    inputs of checkpoints move.
    """

    def __init__(
        self, include: Sequence[str] | None, exclude: Sequence[str] | None, *, only_boundaries: bool = False
    ) -> None:
        self.include = tuple(include or ())
        self.exclude = tuple(exclude or ())
        self.only_boundaries = only_boundaries

    def allows(self, module: str | None, name: str | None = None) -> bool:
        """Return whether a tensor called ``name`` that is saved inside ``module`` may move."""
        if self.only_boundaries and name != CHECKPOINT_INPUT:
            return False
        return (not self.include or _covers(self.include, module, name)) and not _covers(self.exclude, module, name)

    def without(self, names: Collection[str]) -> list[str]:
        """Return the patterns over tensors that match none of these names."""
        patterns = [pattern.removeprefix(TENSOR) for pattern in (*self.include, *self.exclude) if _is_tensors(pattern)]
        return [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]


def module_patterns(patterns: Sequence[str] | None) -> list[str]:
    """Return the patterns over modules."""
    return [pattern for pattern in patterns or () if not _is_tensors(pattern)]


def _is_tensors(pattern: str) -> bool:
    return pattern.startswith(TENSOR)


def _covers(patterns: Sequence[str], module: str | None, name: str | None) -> bool:
    if not patterns:
        return False
    parts = (module or "").split(".")
    # Each module around it as well: a pattern that matches `blocks.0` has to cover `blocks.0.mlp`.
    scopes = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    for pattern in patterns:
        if _is_tensors(pattern):
            if name is not None and fnmatch.fnmatchcase(name, pattern.removeprefix(TENSOR)):
                return True
        elif any(fnmatch.fnmatchcase(scope, pattern) for scope in scopes):
            return True
    return False
