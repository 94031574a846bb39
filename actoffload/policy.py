"""What moves and what stays: facts in, decisions out. No torch, no clock."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable


class KeepReason(Enum):
    """Why a saved tensor stayed on its device; the keys of ``Statistics.kept_bytes``."""

    __hash__ = object.__hash__  # members are singletons, and Enum's own hash is a Python function

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    SMALL = "below min_bytes"
    MARKED = "keep()"
    REGION = "no_offload()"
    POLICY = "policy"
    FITS = "fits the budget"
    NO_TIME = "no time to move"
    PLAN = "plan"
    EXCLUDED = "module excluded"
    LAST = "last saved layer"
    PRESSURE = "pressure"
    IN_BACKWARD = "saved during backward"
    RECOMPUTED = "recomputed"
    SUBCLASS = "unknown tensor subclass"
    LAYOUT = "not strided"
    FILLED_LATER = "filled after it was saved"
    DEVICE = "other device"
    RESIZED = "resized"
    ALIVE = "held elsewhere"
    CAPTURE = "graph capture"
    DEGRADED = "degraded"
    FORKED = "forked process"


STATIC = ("parameter", "buffer", "input")
"""Reasons of what lives anyway, and is no activation."""


class Decision(Enum):
    """What a policy says of one storage."""

    OFFLOAD = "offload"
    KEEP = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """What a policy may know of a saved storage when autograd saves it.

    Attributes:
        nbytes: bytes that would move.
        shape: shape of the view that was saved first.
        dtype: for example ``"float32"``.
        device: for example ``"cuda:0"``.
        module: qualified name of the innermost module that was running, or None when no names are known.
        name: what `actoffload.name` called it; ``"checkpoint_input"`` for the inputs of a checkpoint; else None.
        index: how many storages this forward saved before it.
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
    """One override point: say of each storage whether it may leave.

    >>> class BigOnly:
    ...     def decide(self, facts: TensorFacts) -> Decision:
    ...         return Decision.OFFLOAD if facts.nbytes >= 8 << 20 else Decision.KEEP
    >>> isinstance(BigOnly(), Policy)
    True
    """

    def decide(self, facts: TensorFacts) -> Decision:
        """``Decision.OFFLOAD`` or ``Decision.KEEP``.

        Called on the training thread under the offloader's lock: be quick, and do not call the offloader.
        """
        ...


CHECKPOINT_INPUT = "checkpoint_input"
"""The name of what a checkpoint saves in place of all that its block saves."""
TENSOR = "tensor:"
"""Begins a pattern over names of tensors."""


class NameFilter:
    """Glob patterns over qualified names of modules, and over names of tensors where they begin with ``tensor:``.

    A pattern over modules also covers what is inside the module that it names. With ``only_boundaries`` nothing moves
    but the inputs of checkpoints.
    """

    def __init__(
        self, include: Sequence[str] | None, exclude: Sequence[str] | None, *, only_boundaries: bool = False
    ) -> None:
        self.include = tuple(include or ())
        self.exclude = tuple(exclude or ())
        self.only_boundaries = only_boundaries

    def allows(self, module: str | None, name: str | None = None) -> bool:
        """Whether a tensor called ``name`` that is saved inside ``module`` may move."""
        if self.only_boundaries and name != CHECKPOINT_INPUT:
            return False
        return (not self.include or _covers(self.include, module, name)) and not _covers(self.exclude, module, name)

    def without(self, names: Collection[str]) -> list[str]:
        """The patterns over tensors that match none of these names."""
        patterns = [pattern.removeprefix(TENSOR) for pattern in (*self.include, *self.exclude) if _is_tensors(pattern)]
        return [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]


def module_patterns(patterns: Sequence[str] | None) -> list[str]:
    """Those patterns that are over modules."""
    return [pattern for pattern in patterns or () if not _is_tensors(pattern)]


def _is_tensors(pattern: str) -> bool:
    return pattern.startswith(TENSOR)


def _covers(patterns: Sequence[str], module: str | None, name: str | None) -> bool:
    if not patterns:
        return False
    parts = (module or "").split(".")
    scopes = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    for pattern in patterns:
        if _is_tensors(pattern):
            if name is not None and fnmatch.fnmatchcase(name, pattern.removeprefix(TENSOR)):
                return True
        elif any(fnmatch.fnmatchcase(scope, pattern) for scope in scopes):
            return True
    return False
