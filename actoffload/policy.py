"""What moves and what stays: facts in, decisions out. No torch, no clock."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
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
    SUBCLASS = "unknown tensor subclass"
    LAYOUT = "not strided"
    FILLED_LATER = "filled after it was saved"
    DEVICE = "other device"
    RESIZED = "resized"
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
        index: how many storages this forward saved before it.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    module: str | None
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


class ModuleFilter:
    """Glob patterns over qualified module names; a pattern also covers what is inside the module it names."""

    def __init__(self, include: Sequence[str] | None, exclude: Sequence[str] | None) -> None:
        self.include = tuple(include or ())
        self.exclude = tuple(exclude or ())

    def allows(self, module: str | None) -> bool:
        """Whether a tensor saved inside ``module`` may move."""
        name = module or ""
        return (not self.include or _covers(self.include, name)) and not _covers(self.exclude, name)


def _covers(patterns: Sequence[str], name: str) -> bool:
    if not patterns:
        return False
    parts = name.split(".")
    scopes = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(scope, pattern) for pattern in patterns for scope in scopes)
